"""Listening, and leaving in two steps.

On SIGTERM the service first says that it is not ready and serves on, so that load balancers look away while no
connection is refused yet. Then it closes the listening socket and lets what runs finish; what has not finished at the
end of the drain gets an error event. A second signal skips all waiting. The process then exits as one that did as told.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from types import FrameType

import uvicorn

from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError
from jaxserve.server.app import create_app
from jaxserve.server.protocol import HTTPConfig
from jaxserve.server.service import Service

logger = logging.getLogger(__name__)

# A peer that vanished without a word is noticed within half a minute. Connections inherit these from the listener.
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}


def listen(config: ServerConfig) -> socket.socket:
    """Opens the listening socket; connections wait in it until ``serve`` runs.

    Raises:
        ConfigError: the address is in use or is not ours.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listener = socket.create_server((config.host, config.port), family=family, backlog=2048)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(f"Cannot listen on {config.host}:{config.port}: {reason}.", param="server.port") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        option = getattr(socket, name, None)
        if option is not None:
            listener.setsockopt(socket.IPPROTO_TCP, option, value)
    return listener


class Server(uvicorn.Server):
    """uvicorn's server with an orderly exit; ``run([listener])`` serves until a signal ends it."""

    def __init__(self, service: Service) -> None:
        super().__init__(HTTPConfig(create_app(service), service.config))
        self._service = service
        self._close_at: float | None = None
        self._hurry = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's signature
        """The first signal starts the drain, the next one ends it.

        The signal is not kept: uvicorn would raise it again at the end, and the exit code would tell of a kill.
        """
        if self._close_at is not None:
            self._hurry = True
            self._close_at = 0.0
            return
        was_ready = self._service.readiness.is_ready()
        self._service.readiness.drain()
        wait = self._service.config.lame_duck_s if was_ready else 0.0
        self._close_at = time.monotonic() + wait
        logger.info("draining", extra={"fields": {"signal": signal.Signals(sig).name, "serving_on_s": wait}})

    def abandon(self) -> None:
        """Ends the service at once because it can never be ready; from any thread, also before it runs."""
        self._hurry = True
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether it is time to close."""
        if self._close_at is not None and time.monotonic() >= self._close_at:
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes the listener, waits for running requests, and ends them when time is up."""
        ender = asyncio.create_task(self._end_running())
        try:
            await super().shutdown(sockets)
        finally:
            ender.cancel()

    async def _end_running(self) -> None:
        end = time.monotonic() + self._service.config.drain_s
        while time.monotonic() < end and not self._hurry:  # noqa: ASYNC110 - a signal handler can only set a flag
            await asyncio.sleep(0.05)
        self._service.running.end()
