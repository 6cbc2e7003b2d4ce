"""A connection that comes when descriptors run short: it is told so, or closed at once.

Knows sockets and one answer. Whether they run short is for ``guards`` to say.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.errors import Overloaded
from jaxserve.server.guards import Room, room_for
from jaxserve.server.openai import error_response
from jaxserve.server.protocol import BoundedProtocol, HTTPConfig
from jaxserve.server.service import Service

logger = logging.getLogger(__name__)

HEAD_SECONDS = 1.0  # for the request of one who gets no answer to it
_QUIET_SECONDS = 10.0  # between two log lines about the same shortage


class GuardedConfig(HTTPConfig):
    """What uvicorn is told, and the service that is guarded."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        super().__init__(app, service.config, service.count_refusal)
        self.http = GuardedProtocol
        self._service = service
        self._said_at = -_QUIET_SECONDS

    def note_shortage(self, descriptor: int) -> None:
        """Counts it; says so, though not each time."""
        if self._service.metrics is not None:
            self._service.metrics.observe_shortage("descriptors")
        now = time.monotonic()
        if now - self._said_at >= _QUIET_SECONDS:
            self._said_at = now
            logger.warning("short of descriptors", extra={"fields": {"descriptor": descriptor}})

    async def refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 503 to anything, an ASGI application."""
        error = Overloaded("The server is short of connections.", retry_after=self.limits.retry_after_s)
        response = error_response(error)
        response.headers["connection"] = "close"
        await response(scope, receive, send)


class GuardedProtocol(BoundedProtocol):
    """One connection."""

    def __init__(self, config: GuardedConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._guard = config

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Looks at what is left."""
        super().connection_made(transport)
        descriptor = transport.get_extra_info("socket").fileno()
        room = room_for(descriptor)
        if room is Room.SERVE:
            return
        self._guard.note_shortage(descriptor)
        if room is Room.CLOSE:
            transport.abort()
        else:
            self.app = self._guard.refuse
            self._expect(HEAD_SECONDS)
