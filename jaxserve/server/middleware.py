"""What happens to every HTTP request on its way in and out: an id, a log line, strict headers, a bounded body.

Pure ASGI, because ``BaseHTTPMiddleware`` hides disconnects from the endpoints. Knows HTTP. Knows no route and no model.
Nothing here reads or logs what a request says or is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import traceback
import uuid

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.server.audit import digesting
from jaxserve.server.openai import error_object, error_response
from jaxserve.server.service import Service

logger = logging.getLogger(__name__)
access = logging.getLogger("jaxserve.access")

CLIENT_CLOSED = 499  # nginx's number for a client that hung up; it is logged, never sent
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class RequestId:
    """Gives every request an id, the client's own if it is harmless, and says it in the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sets ``scope["state"]["request_id"]`` and the header ``x-request-id``."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = [value for name, value in scope["headers"] if name == b"x-request-id"]
        known = len(given) == 1 and _REQUEST_ID.fullmatch(given[0])
        request_id = given[0] if known else uuid.uuid4().hex.encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode("ascii")

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", request_id)]}
            await send(message)

        await self._app(scope, receive, send_with_id)


class SafeHeaders:
    """Tells browsers to take every answer for what it says it is, and everybody in between to keep none."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Adds ``x-content-type-options`` and, where the answer has none, ``cache-control``."""

        async def send_safe(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (b"x-content-type-options", b"nosniff")]
                if not any(name == b"cache-control" for name, _ in headers):
                    headers.append((b"cache-control", b"no-store"))
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_safe)


class AccessLog:
    """Writes one line a request when it is over, counts it, and has it noted in the audit log."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A client that hung up ends here: there is nobody to answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_CLOSED
        begin = time.monotonic()
        audit = self._service.audit
        if audit is not None and audit.body_digest:
            receive = digesting(receive, scope)

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except ClientDisconnect:
            status = CLIENT_CLOSED
        finally:
            self._note(scope, status, time.monotonic() - begin)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        # The route's own path, never the client's: it is bounded in number and free of surprises.
        route = getattr(scope.get("route"), "path", "unmatched")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        if self._service.metrics is not None:
            self._service.metrics.observe_http(method=method, route=route, status=status, seconds=seconds)
        state = scope["state"]
        fields = {"method": method, "route": route, "status": status, "ms": round(seconds * 1000, 1)}
        if "tokens" in state:
            fields["prompt_tokens"], fields["completion_tokens"] = state["tokens"]
        if "error" in state:
            fields["error"] = state["error"]
        if state.get("tenant"):
            fields["key"] = state["tenant"]
        fields["request_id"] = state["request_id"]
        if self._service.access_log:
            access.info("request", extra={"fields": fields})
        if self._service.audit is not None and not state.get("public"):
            self._service.audit.write(self._who(scope) | fields)

    def _who(self, scope: Scope) -> dict[str, str | None]:
        """Who asked whom for what, as far as it is known; never the key itself."""
        key, model = scope["state"].get("key"), self._service.model
        return {
            "key": None if key is None else key.id,
            "client": None if key is None else key.client,
            "address": self._service.access.address(scope),
            "model": None if model is None else model.id,
            "body_sha256": scope["state"].get("body_sha256"),
        }


class Failures:
    """Turns whatever an endpoint did not foresee into a 500, and logs where it happened but not what it said."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Messages of exceptions may quote a prompt, so only their class and place are written."""
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except ClientDisconnect:
            raise
        except Exception as error:
            if scope["type"] != "http":
                raise
            frames = traceback.extract_tb(error.__traceback__)
            where = " < ".join(f"{frame.name}:{frame.lineno}" for frame in reversed(frames[-8:]))
            fields = {"error": type(error).__name__, "where": where, "request_id": scope["state"]["request_id"]}
            logger.error("unforeseen failure", extra={"fields": fields})
            scope["state"]["error"] = error_object(error).code
            if not started:
                await error_response(error)(scope, receive, send)


class StrictHeaders:
    """Refuses what proxies and this server might read differently."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 400 itself."""
        if scope["type"] == "http" and _ambiguous(scope):
            await error_response(HTTPException(400))(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _ambiguous(scope: Scope) -> bool:
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    hosts = sum(name == b"host" for name, _ in headers)
    if hosts > 1 or (hosts == 0 and scope["http_version"] == "1.1"):
        return True
    encodings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    return any(value != b"chunked" for value in encodings) or (bool(encodings) and scope["http_version"] == "1.0")


class OnlyJSON:
    """Refuses bodies that are not plain JSON. It stands around a route, so that a wrong URL or method is told first."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises 415."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        kinds = [value for name, value in headers if name == b"content-type"]
        plain = len(kinds) == 1 and kinds[0].split(b";", 1)[0].strip().lower() == b"application/json"
        coded = any(name == b"content-encoding" and value.strip().lower() != b"identity" for name, value in headers)
        if coded or not plain:
            raise HTTPException(415)
        await self._app(scope, receive, send)


class BodyLimit:
    """Reads no more of a body than ``limit`` bytes, and answers 413 to a longer one.

    The rest is read and thrown away for a moment, up to as many bytes again, before the connection is closed: closing
    on unread data resets it, and the client might lose the answer.
    """

    def __init__(self, app: ASGIApp, limit: int, linger: float = 1.0) -> None:
        self._app = app
        self._limit = limit
        self._linger = linger

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The endpoint sees the error as an exception of its ``receive``."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if _declared_length(scope) > self._limit:
            await self._refuse(scope, receive, send)
            return
        size = 0
        too_large = False

        async def bounded_receive() -> Message:
            nonlocal size, too_large
            message = await receive()
            if message["type"] == "http.request":
                size += len(message.get("body", b""))
                if size > self._limit:
                    too_large = True
                    raise HTTPException(413)
            return message

        async def held_send(message: Message) -> None:
            if not too_large:  # else what the endpoint makes of it is replaced below
                await send(message)

        await self._app(scope, bounded_receive, held_send)
        if too_large:
            await self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def open_ended_send(message: Message) -> None:
            await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)

        await error_response(HTTPException(413))(scope, receive, open_ended_send)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._linger):
                await self._discard(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _discard(self, receive: Receive) -> None:
        left = self._limit
        while left > 0:
            message = await receive()
            if message["type"] == "http.disconnect" or not message.get("more_body"):
                return
            left -= len(message["body"])


def _declared_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0
