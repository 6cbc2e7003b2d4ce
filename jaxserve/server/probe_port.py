"""The probes on a thread, an event loop and a port of their own.

They answer whatever the service's own loop does: while it is blocked, while the process starts, and until it is gone.
Supervisors that get no answer end a process that only has much to do.
"""

from __future__ import annotations

import asyncio
import socket
import threading

import uvicorn

from jaxserve.server.probes import create_probe_app
from jaxserve.server.protocol import BoundedProtocol, HTTPConfig
from jaxserve.server.service import Service

MOST_CONNECTIONS = 64  # probes are few; who opens more takes descriptors from those who were here first
CLOSE_SECONDS = 1.0


class ProbeProtocol(BoundedProtocol):
    """One connection; one of a few."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Turns away what is too much."""
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()


class ProbePort:
    """A second, tiny server for ``service``; it owns ``listener``."""

    def __init__(self, service: Service, listener: socket.socket) -> None:
        config = HTTPConfig(create_probe_app(service), service.config)
        config.http = ProbeProtocol
        self._listener = listener
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listener],), name="probes", daemon=True)

    def start(self) -> None:
        """Answers from now on."""
        self._thread.start()

    def stop(self) -> None:
        """The very last thing: whoever asks later finds nobody."""
        self._server.force_exit = self._server.should_exit = True
        self._thread.join(CLOSE_SECONDS)
        self._listener.close()
