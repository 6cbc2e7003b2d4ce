"""HTTP/1.1 from bytes, with the limits that uvicorn lacks: size of the head, time to send it, time to read an answer.

uvicorn accepts a head of any size, waits for ever for its end, and holds a stream for ever for a reader that has gone
away. ASGI middleware runs after the head is parsed, so these limits have to be here, and with them what httptools lets
pass of the ways to read one request as two. Knows sockets and HTTP, no route.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import logging
import math
import termios
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

import httptools
import uvicorn
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from jaxserve.config import ServerConfig
from jaxserve.server.openai import error_body

logger = logging.getLogger(__name__)


def _uncounted(status: int) -> None:
    """Refusals that nobody counts."""


class HTTPConfig(uvicorn.Config):
    """What uvicorn is told, and the limits of the protocol below, which tells ``refused`` each status it answers."""

    def __init__(self, app: ASGIApp, limits: ServerConfig, refused: Callable[[int], None] = _uncounted) -> None:
        self.limits = limits
        self.refused = refused
        super().__init__(
            cast("Any", app),
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",  # that it starts and ends is said elsewhere
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=math.ceil(limits.keep_alive_timeout_s),
            # Streams are ended with an error event before (see serve.py); this is for what hangs even then.
            timeout_graceful_shutdown=math.ceil(limits.drain_s) + 5,
        )


class _Refused(Exception):
    """Stops the parser from within its callback; never leaves this module."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, config: HTTPConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._limits = config.limits
        self._count_refusal = config.refused
        self._in_head = True
        self._head_bytes = 0
        self._framing_bytes = 0  # chunk sizes and trailers, since the last byte of a body
        self._unwanted_bytes = 0  # of a body that came after its answer
        self._replaying = False
        self._status = HTTPStatus.BAD_REQUEST
        self._receipt: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None

    # --- the connection -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A head is due from now on."""
        super().connection_made(transport)
        self._expect(self._limits.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """No timer outlives the connection."""
        self._expect(None)
        self._watch_reader(None)
        super().connection_lost(exc)

    # --- what comes in ------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parses, then checks the size of a head that is not complete yet, and of what is neither head nor body."""
        if self._in_head:
            self._head_bytes += len(data)
            if self._receipt is None and not self._answering():  # another request on a connection that was kept
                self._expect(self._limits.header_timeout_s)
        self._framing_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stopped:
            self._ignore_upgrade(data[stopped.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("")
        if self.transport.is_closing():
            return
        size = self._head_bytes if self._in_head else self._framing_bytes
        if size > self._limits.max_header_bytes:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def on_message_begin(self) -> None:
        """A client may not send a request before the last one is answered.

        Reading would have to stop until then, and a client that hangs up would not be noticed.
        """
        if self._replaying:
            return
        if self._answering():
            raise _Refused
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A part of the URL."""
        if not self._replaying:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Counts lines, so that the parser stops early. Trailers are dropped: the head has been acted on by then."""
        if self._replaying or not self._in_head:
            return
        if len(self.headers) >= self._limits.max_headers:
            self._status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            raise _Refused
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Checks the exact size of the head, which may have come in one piece with the body, and what it says."""
        if self._replaying:
            return
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._limits.max_header_bytes:
            self._status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            raise _Refused
        # A URL with a host in it may differ from the Host header, and a proxy may have gone by either.
        if self.parser.get_http_version() not in ("1.0", "1.1") or not self.url.startswith(b"/") or b"#" in self.url:
            raise _Refused
        self._in_head = False
        self._framing_bytes = self._unwanted_bytes = 0
        self._expect(self._limits.body_timeout_s)
        self.scope["state"]["arrived"] = time.monotonic()
        super().on_headers_complete()
        if self.expect_100_continue or self.parser.should_upgrade():
            # If it is refused it may keep its body back: nobody could tell whether what it sends next is one.
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """Passes a piece on. Of a body whose answer is out already a part is read, so that the answer is, too."""
        self._framing_bytes = 0
        if self.cycle.response_complete:
            self._unwanted_bytes += len(body)
            if self._unwanted_bytes > self._limits.max_body_bytes:
                self.transport.close()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Nothing is due until the next request."""
        if self.parser.should_upgrade():
            return  # the parser skips the body of such a request; see below
        self._in_head = True
        self._head_bytes = 0
        self._expect(None)
        super().on_message_complete()

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Goes on as if the head had not asked for another protocol; ``rest`` is what came behind it.

        Java's own client asks for HTTP/2 with every first request, and the parser then stops before the body. Another
        one is shown the head without that line.
        """
        framing = (b"content-length", b"transfer-encoding")
        lines = [name + b": " + value + b"\r\n" for name, value in self.headers if name in framing]
        self.parser = httptools.HttpRequestParser(self)
        self._replaying = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(lines))
        self.parser.feed_data(b"\r\n")
        self._replaying = False
        if rest:
            self.data_received(rest)

    def _expect(self, seconds: float | None) -> None:
        """Gives the client so long to complete what it sends; ``None`` for as long as it likes."""
        if self._receipt is not None:
            self._receipt.cancel()
        self._receipt = None if seconds is None else self.loop.call_later(seconds, self._too_late)

    def _too_late(self) -> None:
        if self._in_head and self._head_bytes == 0:
            self.transport.close()  # nothing was asked, so nothing is answered
        else:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT)

    def _answering(self) -> bool:
        cycle = self._current()
        return cycle is not None and not cycle.response_complete

    def _current(self) -> RequestResponseCycle | None:
        return self.cycle  # None before the first request, whatever uvicorn's annotation says

    def _refuse(self, status: HTTPStatus) -> None:
        self._status = status
        self.send_400_response(status.phrase)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - the text is uvicorn's, the answer is ours
        """Answers what is no request in the shape of all errors, unless another answer has begun, and closes."""
        cycle = self._current()
        if cycle is not None and cycle.response_started and not (cycle.response_complete and self._in_head):
            self.transport.close()
            return
        logger.info("not a request", extra={"fields": {"status": self._status.value}})
        self._count_refusal(self._status.value)
        body = error_body(HTTPException(self._status))
        head = (
            f"HTTP/1.1 {self._status.value} {self._status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()

    # --- what goes out ------------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """The client reads more slowly than it is written to: it has to take something from time to time."""
        super().pause_writing()
        self._watch_reader(self._unread())

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._watch_reader(None)
        super().resume_writing()

    def _watch_reader(self, unread: int | None) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
        self._stuck = None
        if unread is not None:
            self._stuck = self.loop.call_later(self._limits.write_timeout_s, self._check_reader, unread)

    def _unread(self) -> int:
        """Bytes that the client has not taken, those in the kernel's buffer (megabytes, perhaps) included."""
        queued = array.array("i", [0])
        fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
        return self.transport.get_write_buffer_size() + queued[0]

    def _check_reader(self, unread_before: int) -> None:
        unread = self._unread()
        if unread < unread_before:
            self._watch_reader(unread)
        else:
            self.transport.abort()  # close() would wait for the reader
