"""One request, given byte by byte, and all that comes back: a client that does not mind what it sends.

Knows sockets and as much of HTTP/1.1 as reading an answer takes. An ordinary client would refuse to send most of what a
fuzzer has to.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import msgspec

MOST = 16 << 20  # an answer of more bytes is cut off


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What came back, and after how many seconds it was all there.

    Attributes:
        status: 0 if the connection was closed without an answer, or nothing came in time.
        headers: names in lower case; of several with one name the last.
        complete: whether the answer was all there before the connection was closed or the time was up.
        in_time: false if the client got tired of waiting.
    """

    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float
    complete: bool
    in_time: bool

    def json(self) -> Any:
        """The body as JSON."""
        return msgspec.json.decode(self.body)


def request(
    method: str, path: str, body: bytes | None = None, headers: Sequence[tuple[str, str]] = (), *, keep: bool = False
) -> bytes:
    """The bytes of a request; ``headers`` replace those of the same name that it would have."""
    own = {"host": "127.0.0.1", "connection": "keep-alive" if keep else "close"}
    if body is not None:
        own |= {"content-type": "application/json", "content-length": str(len(body))}
    given = {name.lower() for name, _ in headers}
    lines = [(name, value) for name, value in own.items() if name not in given] + list(headers)
    head = "".join(f"{name}: {value}\r\n" for name, value in lines)
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("utf-8", "surrogatepass") + (body or b"")


async def exchange(address: tuple[str, int], data: bytes, patience: float) -> Answer:
    """Sends ``data`` on a connection of its own and reads one answer, for at most ``patience`` seconds."""
    begin = time.monotonic()
    said = bytearray()
    in_time, ended, bodiless = True, False, data.startswith(b"HEAD ")
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(patience):
            reader, writer = await asyncio.open_connection(*address)
            sending = asyncio.create_task(_send(writer, data))
            try:
                while not _complete(said, bodiless=bodiless) and len(said) < MOST:
                    piece = await reader.read(65_536)
                    if not piece:
                        ended = True
                        break
                    said += piece
            finally:
                sending.cancel()
    except TimeoutError:
        in_time = False
    except OSError:
        ended = True
    finally:
        if writer is not None:
            writer.transport.abort()
    complete = _complete(said, bodiless=bodiless) and (ended or in_time)
    return _read(bytes(said), time.monotonic() - begin, complete=complete, in_time=in_time)


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    try:
        writer.write(data)
        await writer.drain()
    except OSError:
        pass  # it closed, perhaps with an answer


def _head(said: bytes | bytearray) -> tuple[int, dict[str, str], int] | None:
    """Status, headers and length of the head, once all of it is there."""
    begin = 0
    while said.startswith(b"HTTP/1.1 1", begin):  # "100 Continue" comes before the answer
        begin = said.find(b"\r\n\r\n", begin) + 4
        if begin < 4:
            return None
    end = said.find(b"\r\n\r\n", begin)
    if end < 0:
        return None
    first, *lines = bytes(said[begin:end]).decode("latin-1").split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    words = first.split()
    status = int(words[1]) if len(words) > 1 and words[1].isdigit() else -1
    return status, headers, end + 4


def _complete(said: bytes | bytearray, *, bodiless: bool) -> bool:
    head = _head(said)
    if head is None or bodiless:
        return head is not None
    _, headers, start = head
    if headers.get("transfer-encoding") == "chunked":
        return said.endswith(b"0\r\n\r\n")
    return len(said) - start >= int(headers.get("content-length", 0))


def _read(said: bytes, seconds: float, *, complete: bool, in_time: bool) -> Answer:
    head = _head(said)
    if head is None:
        return Answer(0, {}, said, seconds, complete=False, in_time=in_time)
    status, headers, start = head
    body = said[start:]
    if headers.get("transfer-encoding") == "chunked":
        body = _unchunked(body)
    return Answer(status, headers, body, seconds, complete=complete, in_time=in_time)


def _unchunked(body: bytes) -> bytes:
    found = bytearray()
    while body:
        line, _, rest = body.partition(b"\r\n")
        try:
            size = int(line, 16)
        except ValueError:
            break
        found += rest[:size]
        body = rest[size + 2 :]
    return bytes(found)
