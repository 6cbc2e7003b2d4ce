"""Listening, and leaving in three steps.

On SIGTERM the service first says that it is not ready and serves on, so that load balancers look away while no
connection is refused yet. Then it closes the listening socket and lets what runs finish. What has not finished at the
end of the drain gets an error event, and a moment later the last connections are cut. A second signal skips all
waiting. The process then exits as one that did as told.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
import time
from types import FrameType

import uvicorn

from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError, JaxserveError, ShuttingDown
from jaxserve.server.app import create_app
from jaxserve.server.newcomers import GuardedConfig
from jaxserve.server.service import Service

logger = logging.getLogger(__name__)

# A peer that vanished without a word is noticed within half a minute. Connections inherit these from the listener.
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
SEND_BUFFER_BYTES = 128 * 1024  # Linux doubles it; left alone, it lets each slow reader have megabytes

BEAT_SECONDS = 0.1
FAREWELL_SECONDS = 0.5  # for the last error events to leave
_LAST_ANSWER = (b"connection", b"close")  # while draining: the next request should go elsewhere


def listen(config: ServerConfig) -> socket.socket:
    """Opens the listening socket; connections wait in it until ``serve`` runs.

    Raises:
        ConfigError: the address is in use or is not ours.
    """
    return _listen(config, config.port, "server.port")


def listen_for_probes(config: ServerConfig, main_port: int) -> socket.socket | None:
    """Opens the socket of the probes alone, if there is to be one; ``main_port`` is what ``listen`` got.

    Raises:
        ConfigError: the address is in use or is not ours.
    """
    if config.probe_port is None:
        return None
    param = "server.probe_port"
    if config.probe_port != "auto":
        return _listen(config, config.probe_port, param)
    if config.port == 65_535:
        raise ConfigError("Cannot listen beside port 65535: give the probes a port, or turn theirs off.", param=param)
    return _listen(config, 0 if config.port == 0 else main_port + 1, param)


def _listen(config: ServerConfig, port: int, param: str) -> socket.socket:
    host = config.host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        number = error.errno or 0  # a name that is not found has one of its own sort, below 0
        reason = os.strerror(number) if number > 0 else error.strerror or str(error)
        raise ConfigError(f"Cannot listen on {host}:{port}: {reason}.", param=param) from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    # It counts for a peer that has gone and for one that takes nothing: the kernel can't tell them apart.
    patience = {"TCP_USER_TIMEOUT": int(1000 * config.write_timeout_s)}
    for name, value in (_KEEPALIVE | patience).items():
        option = getattr(socket, name, None)
        if option is not None:
            listener.setsockopt(socket.IPPROTO_TCP, option, value)
    return listener


class Server(uvicorn.Server):
    """uvicorn's server with an orderly exit; ``run([listener])`` serves until a signal ends it."""

    def __init__(self, service: Service, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(GuardedConfig(create_app(service), service))
        self._tls = tls
        self._service = service
        self._close_at: float | None = None
        self._hurry = False
        self._error: JaxserveError = ShuttingDown("The server is shutting down.")
        self._beating: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts the loop's heartbeat, too."""
        self._beating = asyncio.create_task(self._beat())
        self._service.access.attach(asyncio.get_running_loop())
        if self._tls is None:
            await super().startup(sockets)
        else:
            await self._start_tls(self._tls, sockets or [])

    async def _start_tls(self, context: ssl.SSLContext, sockets: list[socket.socket]) -> None:
        """Does what uvicorn does, and bounds both handshakes: it leaves them a minute and half a minute."""
        config = self.config

        def protocol() -> asyncio.Protocol:
            return config.http_protocol_class(  # type: ignore[call-arg]
                config=config, server_state=self.server_state, app_state={}
            )

        self.servers = [
            await asyncio.get_running_loop().create_server(
                protocol,
                sock=listener,
                backlog=config.backlog,
                ssl=context,
                ssl_handshake_timeout=self._service.config.header_timeout_s,
                ssl_shutdown_timeout=FAREWELL_SECONDS,
            )
            for listener in sockets
        ]
        self.started = True

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

    def abandon(self, error: JaxserveError | None = None) -> None:
        """Ends the service at once because it can't serve any more; from any thread, also before it runs.

        ``error`` is what running requests are told.
        """
        self._error = error or self._error
        self._hurry = True
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether it is time to close."""
        done = await super().on_tick(counter)
        if self._close_at is None:
            return done
        if _LAST_ANSWER not in self.server_state.default_headers:
            self.server_state.default_headers = [*self.server_state.default_headers, _LAST_ANSWER]
        return done or time.monotonic() >= self._close_at

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
        self._service.running.end(self._error)
        await asyncio.sleep(FAREWELL_SECONDS)
        for connection in tuple(self.server_state.connections):
            connection.transport.abort()  # it reads nothing, or has not yet said what it wants

    async def _beat(self) -> None:
        pulse = self._service.vitals.pulse
        while True:
            begin = time.monotonic()
            await asyncio.sleep(BEAT_SECONDS)
            pulse.beat(time.monotonic() - begin - BEAT_SECONDS)
