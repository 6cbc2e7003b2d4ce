"""Hostile and broken clients on raw sockets: what uvicorn alone would accept for ever is cut off here.

Ways to read one request as two have a table of their own in ``test_protocol_smuggling.py``.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import psutil
import pytest
import uvicorn

from jaxserve.config import ServerConfig
from jaxserve.server.protocol import HTTPConfig
from jaxserve.server.serve import listen

LIMITS = ServerConfig(
    port=0,
    max_header_bytes=4096,
    max_headers=20,
    header_timeout_s=0.4,
    body_timeout_s=0.4,
    keep_alive_timeout_s=1.0,
    write_timeout_s=0.5,
    drain_s=0.0,
    max_body_bytes=300_000,
)
HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"


class App:
    """Reads the body, then answers; ``/endless`` writes until the client is gone, ``/early`` doesn't read."""

    def __init__(self) -> None:
        self.disconnected = threading.Event()
        self.calls = 0
        self.sent = 0
        self.heads: list[dict] = []

    async def __call__(self, scope, receive, send) -> None:
        self.calls += 1
        self.heads.append(scope)
        if scope["path"] == "/early":
            await send({"type": "http.response.start", "status": 503, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
            return
        while (message := await receive())["type"] == "http.request" and message["more_body"]:
            pass
        if message["type"] == "http.disconnect":
            self.disconnected.set()
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/endless":
            for _ in range(1000):
                await send({"type": "http.response.body", "body": bytes(2**14), "more_body": True})
                self.sent += 2**14
            await receive()
            self.disconnected.set()
            return
        if scope["path"] == "/waiting":
            await receive()
            self.disconnected.set()
        await send({"type": "http.response.body", "body": b"fine", "more_body": False})


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
def refused() -> list[int]:
    """Statuses of answers that the app knows nothing of."""
    return []


@pytest.fixture
def address(app, refused) -> Iterator[tuple[str, int]]:
    listener = listen(LIMITS)
    server = uvicorn.Server(HTTPConfig(app, LIMITS, refused.append))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    yield listener.getsockname()
    server.should_exit = server.force_exit = True
    thread.join(10)
    assert not thread.is_alive()


def connect(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, timeout=5)


def everything(connection: socket.socket) -> bytes:
    """What the server says until it closes."""
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(65536):
            said += data
    return said


def code_of(said: bytes) -> tuple[int, str]:
    """Status and error code of an answer that must have the shape of all errors."""
    head, body = said.split(b"\r\n\r\n", 1)
    assert b"connection: close" in head
    return int(head.split()[1]), msgspec.json.decode(body)["error"]["code"]


def pour(connection: socket.socket, data: bytes, times: int) -> int:
    """Sends ``data`` again and again; how many bytes went out before the server would have no more."""
    sent = 0
    with contextlib.suppress(OSError):
        for _ in range(times):
            connection.sendall(data)
            sent += len(data)
    return sent


def test_a_plain_request_is_served(address):
    with connect(address) as connection:
        connection.sendall(HEAD + b"content-length: 2\r\nconnection: close\r\n\r\n{}")
        said = everything(connection)
    assert said.startswith(b"HTTP/1.1 200")
    assert b"fine" in said


def test_a_connection_is_kept_and_then_closed(address):
    with connect(address) as connection:
        for _ in range(3):
            connection.sendall(HEAD + b"content-length: 2\r\n\r\n{}")
            said = b""
            while not said.endswith(b"0\r\n\r\n"):
                said += connection.recv(65536)
            time.sleep(0.6)  # longer than a head may take, but nothing has come yet
        assert everything(connection) == b""


@pytest.mark.parametrize("piece", [b"x" * 65536, b"a: b\r\n" * 10_000])
def test_an_endless_head_is_refused(address, piece):
    memory = psutil.Process().memory_info().rss
    with connect(address) as connection:
        connection.sendall(HEAD + b"x: ")
        sent = pour(connection, piece, 1000)
        said = everything(connection)
    assert sent < 20 * 2**20  # what fits into the kernel's buffers
    assert not said or code_of(said) == (431, "headers_too_large")
    assert psutil.Process().memory_info().rss - memory < 20 * 2**20


@pytest.mark.parametrize(
    ("extra", "status"),
    [
        (b"x: " + b"y" * 3500 + b"\r\n", 200),
        (b"x: " + b"y" * 4096 + b"\r\n", 431),
        (b"a: b\r\n" * 17, 200),
        (b"a: b\r\n" * 20, 431),
    ],
)
def test_the_limits_of_a_head(address, extra, status):
    with connect(address) as connection:
        connection.sendall(HEAD + extra + b"content-length: 1000\r\nconnection: close\r\n\r\n" + b"x" * 1000)
        said = everything(connection)
    assert int(said.split()[1]) == status


def test_a_large_body_in_one_piece_is_no_large_head(address):
    with connect(address) as connection:
        connection.sendall(HEAD + b"content-length: 100000\r\nconnection: close\r\n\r\n" + b"x" * 100_000)
        assert everything(connection).startswith(b"HTTP/1.1 200")


def test_a_long_url_is_refused(address):
    with connect(address) as connection:
        connection.sendall(b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\nhost: x\r\n\r\n")
        assert code_of(everything(connection))[0] == 431


def test_a_slow_head_is_cut_off(address):
    with connect(address) as connection:
        begin = time.monotonic()
        for byte in HEAD * 10:
            try:
                connection.sendall(bytes([byte]))
            except OSError:
                break
            time.sleep(0.05)
            if time.monotonic() - begin > 1.0:
                break
        said = everything(connection)
        assert time.monotonic() - begin < 10
    assert not said or code_of(said) == (408, "request_timeout")


def test_a_head_that_stops_is_told(address):
    with connect(address) as connection:
        connection.sendall(HEAD)
        assert code_of(everything(connection)) == (408, "request_timeout")


def test_a_silent_connection_is_closed(address):
    with connect(address) as connection:
        begin = time.monotonic()
        assert everything(connection) == b""
        assert time.monotonic() - begin < 10


def test_a_slow_body_is_cut_off(address, app):
    with connect(address) as connection:
        connection.sendall(HEAD + b"content-length: 100\r\n\r\n{")
        assert code_of(everything(connection)) == (408, "request_timeout")
    assert app.disconnected.wait(2)


def test_a_body_in_time_may_be_followed_by_a_long_answer(address, app):
    with connect(address) as connection:
        connection.sendall(b"POST /waiting HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        assert not app.disconnected.wait(1.0)
        connection.sendall(b"\r\n")  # some clients end a body with a line of their own
        assert not app.disconnected.wait(0.6)
    assert app.disconnected.wait(2)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/1.1\nhost: x\n\n",
        HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        HEAD + b"content-length: -1\r\n\r\n",
        HEAD + b"content-length: 99999999999999999999999\r\n\r\n",
        HEAD + b"x: a\r\n b\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    ],
)
def test_what_is_no_http_is_refused(address, request_bytes, refused):
    with connect(address) as connection:
        connection.sendall(request_bytes)
        assert code_of(everything(connection)) == (400, "invalid_http")
    assert refused == [400]


CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


def test_what_stands_behind_a_body_is_not_in_the_head(address, app):
    """A gate that has looked at the head must not be shown another one later."""
    with connect(address) as connection:
        connection.sendall(CHUNKED + b"2\r\n{}\r\n0\r\nauthorization: Bearer x\r\nhost: y\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    assert [name for name, _ in app.heads[0]["headers"]] == [b"host", b"transfer-encoding"]


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"2\r\n{}\r\n0\r\nx: ", b"y" * 65536),
        (b"2\r\n{}\r\n0\r\n", b"a: b\r\n" * 10_000),
        (b"2;", b"x" * 65536),
        (b"", b"0" * 65536),
    ],
)
def test_endless_words_between_the_pieces_of_a_body_are_refused(address, app, begin, piece):
    memory = psutil.Process().memory_info().rss
    with connect(address) as connection:
        connection.sendall(CHUNKED + begin)
        assert pour(connection, piece, 1000) < 20 * 2**20
        said = everything(connection)
    assert not said or code_of(said)[0] in (400, 431)
    assert app.disconnected.wait(2)
    assert psutil.Process().memory_info().rss - memory < 20 * 2**20


def test_a_body_in_pieces_of_one_byte_is_read(address):
    """Half of the bytes and more are not the body's, and still they are no reason to refuse it."""
    with connect(address) as connection:
        connection.sendall(CHUNKED)
        for _ in range(20):
            connection.sendall(b"1\r\nx\r\n" * 1000)
        connection.sendall(b"0\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")


def test_many_bodies_in_pieces_of_one_byte_leave_nothing(address):
    """Triton's own test for its CVE of 2025: a hundred of them and no more memory than before."""

    def send_one() -> None:
        with connect(address) as connection:
            connection.sendall(CHUNKED + b"1\r\nx\r\n" * 10_000 + b"0\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")

    for _ in range(5):
        send_one()
    before = psutil.Process().memory_info().rss
    for _ in range(100):
        send_one()
    assert psutil.Process().memory_info().rss - before < 2**20


def test_an_answer_before_the_body_keeps_the_connection(address, app):
    with connect(address) as connection:
        connection.sendall(b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 200000\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 503")
        connection.sendall(b"x" * 200_000 + HEAD + b"content-length: 2\r\n\r\n{}")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    assert app.calls == 2


def test_an_unwanted_body_is_not_read_for_ever(address):
    """Neither however long it is nor however long it takes."""
    early = b"POST /early HTTP/1.1\r\nhost: x\r\n"
    with connect(address) as connection:
        connection.sendall(early + b"transfer-encoding: chunked\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 503")
        assert pour(connection, b"10000\r\n" + bytes(2**16) + b"\r\n", 1000) < 20 * 2**20
    with connect(address) as connection:
        connection.sendall(early + b"content-length: 100\r\n\r\nx")
        assert connection.recv(65536).startswith(b"HTTP/1.1 503")
        assert everything(connection) == b""


def test_the_clock_of_a_request_starts_with_its_head(address, app):
    with connect(address) as connection:
        connection.sendall(HEAD + b"content-length: 2\r\n\r\n")
        time.sleep(0.1)
        before = time.monotonic()
        connection.sendall(b"{}")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    assert before - 0.5 < app.heads[0]["state"]["arrived"] < before


def test_a_second_request_may_not_come_early(address, app):
    """Else reading stops until the first is answered, and nobody notices a client that hangs up."""
    with connect(address) as connection:
        connection.sendall(b"POST /waiting HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}" + HEAD + b"\r\n")
        said = everything(connection)
    assert said.count(b"HTTP/1.1") <= 1
    assert app.disconnected.wait(2)
    assert app.calls == 1


def test_a_reader_that_takes_nothing_is_dropped(address, app):
    """And until then less than half a megabyte is kept for it, in the kernel and here."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(address)
        connection.sendall(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
        end = time.monotonic() + 5
        while not app.disconnected.is_set():
            assert time.monotonic() < end
            sent = app.sent
            time.sleep(0.05)
        assert 2**15 < sent < 2**19


def test_a_slow_reader_is_not_dropped(address, app):
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(address)
        connection.sendall(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            connection.recv(2**17)
            time.sleep(0.002)
        assert not app.disconnected.is_set()


def test_a_client_that_hangs_up_is_noticed(address, app):
    with connect(address) as connection:
        connection.sendall(b"POST /waiting HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
        connection.recv(65536)
    assert app.disconnected.wait(2)
