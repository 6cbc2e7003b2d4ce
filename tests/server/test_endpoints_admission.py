"""Who is told no is told at once: before the body is read, before a word is tokenised, and while it still sends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator

import httpx2
import msgspec
import pytest
from starlette.requests import Request

from jaxserve.config import ServerConfig
from jaxserve.errors import Overloaded
from jaxserve.server.endpoints import Endpoints

GENERATE = {"prompt": "x", "max_tokens": 4}
FULL = Overloaded("The queue is full.", retry_after=2.5)


@pytest.fixture
def config() -> ServerConfig:
    return ServerConfig(port=0, lame_duck_s=0.0, drain_s=1.0, max_body_bytes=400_000, max_preparing=6)


def head(length: int | None, *more: str) -> bytes:
    framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    lines = ["POST /generate HTTP/1.1", "host: x", "content-type: application/json", framing, *more]
    return "\r\n".join([*lines, "", ""]).encode()


def answer(connection: socket.socket) -> tuple[int, dict[str, str], dict]:
    """Reads one answer of a known length: status, headers, body."""
    said = b""
    while b"\r\n\r\n" not in said:
        data = connection.recv(65536)
        assert data, "closed before the answer"
        said += data
    lines, body = said.split(b"\r\n\r\n", 1)
    status, *rest = lines.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in rest)}
    while len(body) < int(headers["content-length"]):
        body += connection.recv(65536)
    return int(status.split()[1]), headers, json.loads(body)


@pytest.fixture
def connection(served) -> Iterator[socket.socket]:
    with socket.create_connection(served.address, timeout=5) as connection:
        yield connection


def test_the_refusal_comes_before_the_body(connection, engine, tokenizer, monkeypatch):
    """And the connection serves on once the body has been thrown away."""
    monkeypatch.setattr(type(tokenizer), "encode", lambda *args, **kwargs: pytest.fail("a word was tokenised"))
    engine.refuse = FULL
    connection.sendall(head(100_000))
    status, headers, body = answer(connection)
    assert (status, body["error"]["code"]) == (503, "server_is_overloaded")
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("3", "2500")
    monkeypatch.undo()
    engine.refuse = None
    connection.sendall(b" " * 100_000)
    body = json.dumps(GENERATE).encode()
    connection.sendall(head(len(body)) + body)
    assert answer(connection)[0] == 200


@pytest.mark.parametrize("refused", [True, False])
def test_a_client_that_asks_first_is_not_told_to_go_on(refused, connection, engine):
    """It may keep its body back then, so what it sends next belongs to nothing."""
    engine.refuse = FULL if refused else None
    body = json.dumps(GENERATE).encode()
    connection.sendall(head(len(body), "expect: 100-continue"))
    if refused:
        assert answer(connection)[:1] == (503,)
    else:
        assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        status, headers, _ = answer(connection)
        assert (status, headers["connection"]) == (200, "close")
    assert connection.recv(65536) == b""


def test_nobody_sends_for_ever_after_a_refusal(connection, engine, config):
    engine.refuse = FULL
    connection.sendall(head(None))
    assert answer(connection)[0] == 503
    chunk = b"10000\r\n" + b" " * 2**16 + b"\r\n"
    sent = 0
    with contextlib.suppress(OSError):
        while sent < 100 * 2**20:
            connection.sendall(chunk)
            sent += len(chunk)
    assert sent < 20 * 2**20  # the limit, and what fits into the kernel's buffers


def test_the_queue_may_fill_while_a_request_is_read(connection, engine, wait_for):
    body = json.dumps(GENERATE).encode()
    connection.sendall(head(len(body)))
    wait_for(lambda: engine.asked)
    engine.refuse = FULL
    connection.sendall(body)
    assert answer(connection)[0] == 503
    assert engine.submitted == []


@pytest.fixture
def slow_texts(tokenizer, monkeypatch) -> Iterator[threading.Event]:
    """Tokenising waits for this event; the threads of the service are all taken then."""
    release, encode = threading.Event(), type(tokenizer).encode

    def slow(self, *args, **kwargs):
        release.wait(10)
        return encode(self, *args, **kwargs)

    monkeypatch.setattr(type(tokenizer), "encode", slow)
    yield release
    release.set()


def ask(served, service, wait_for) -> tuple[threading.Thread, list[int]]:
    """Asks in the background; returns when it holds a place."""
    statuses: list[int] = []

    def run() -> None:
        statuses.append(httpx2.post(served.url + "/generate", json=GENERATE, timeout=10).status_code)

    before = len(service.admission)
    thread = threading.Thread(target=run)
    thread.start()
    wait_for(lambda: len(service.admission) > before)
    return thread, statuses


def test_one_more_than_max_preparing_is_refused_at_once(served, service, slow_texts, wait_for):
    waiting = []
    while len(waiting) < service.config.max_preparing:
        waiting.append(ask(served, service, wait_for))
    refused = httpx2.post(served.url + "/generate", json=GENERATE, timeout=5)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_is_overloaded")
    assert refused.headers["retry-after"] == "1"
    slow_texts.set()
    for thread, _ in waiting:
        thread.join(10)
    assert [statuses for _, statuses in waiting] == [[200]] * len(waiting)
    wait_for(lambda: len(service.admission) == 0)


def test_who_only_counts_is_in_nobodys_way(served, service, wait_for, tokenizer, monkeypatch):
    release, encode = threading.Event(), type(tokenizer).encode

    def slow_for_long_ones(self, text, **kwargs):
        if len(text) > 1000:
            release.wait(10)
        return encode(self, text, **kwargs)

    monkeypatch.setattr(type(tokenizer), "encode", slow_for_long_ones)
    answers: list[int] = []

    def count() -> None:
        answers.append(httpx2.post(served.url + "/tokenize", json={"prompt": "x" * 2000}, timeout=10).status_code)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(service.counting) == 4)
    assert httpx2.post(served.url + "/generate", json=GENERATE, timeout=5).status_code == 200
    assert answers == []
    release.set()
    for thread in threads:
        thread.join(10)
    assert answers == [200] * 4


def test_who_hangs_up_before_its_turn_is_never_tokenised(served, service, engine, slow_texts, wait_for):
    busy = [ask(served, service, wait_for) for _ in range(service.config.tokenize_threads)]
    body = json.dumps(GENERATE | {"prompt": "gone"}).encode()
    with socket.create_connection(served.address, timeout=5) as connection:
        connection.sendall(head(len(body)) + body)
        wait_for(lambda: len(service.admission) > len(busy))
    wait_for(lambda: len(service.admission) == len(busy))
    slow_texts.set()
    for thread, _ in busy:
        thread.join(10)
    assert len(engine.submitted) == len(busy)


# --- deadlines of clients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["0", "-1", "1.5", "x", "", "1e3", "99999999999", "86400001", "+5", "٣"])
def test_a_timeout_is_a_whole_number(given, ask_headers):
    found = ask_headers([("x-request-timeout-ms", given.encode())])
    assert found.status_code == 400
    assert found.json()["error"]["param"] == "x-request-timeout-ms"


@pytest.fixture
def ask_headers(ask):
    return lambda headers: ask("POST", "/generate", GENERATE, headers)


def test_there_is_one_timeout(ask_headers):
    assert ask_headers([("x-request-timeout-ms", "5"), ("x-request-timeout-ms", "5")]).status_code == 400


def test_the_engine_learns_of_it(ask_headers, engine):
    before = time.monotonic()
    assert ask_headers({"x-request-timeout-ms": "60000"}).status_code == 200
    assert before + 60 <= engine.submitted[-1].deadline <= time.monotonic() + 60
    assert ask_headers({}).status_code == 200
    assert engine.submitted[-1].deadline is None


@pytest.mark.parametrize("stage", ["receiving", "waiting"])
def test_it_passes_before_the_engine_is_asked(stage, served, service, connection, engine, slow_texts, wait_for):
    """The clock starts with the request's head, so waiting for a thread counts, and the answer doesn't wait for one."""
    busy = [ask(served, service, wait_for) for _ in range(service.config.tokenize_threads)]
    body = json.dumps(GENERATE).encode()
    begin = time.monotonic()
    sent = head(len(body), "x-request-timeout-ms: 200")
    connection.sendall(sent if stage == "receiving" else sent + body)
    status, headers, said = answer(connection)
    assert (status, said["error"]["code"]) == (408, "deadline_exceeded")
    assert headers["x-should-retry"] == "false"
    assert 0.2 <= time.monotonic() - begin < 4
    slow_texts.set()
    for thread, _ in busy:
        thread.join(10)
    assert len(engine.submitted) == len(busy)


# --- tenants ----------------------------------------------------------------------------------------------------------


def test_the_engine_learns_on_whose_behalf(service, engine):
    """Whatever checks the keys writes the tenant into the scope."""
    body = [{"type": "http.request", "body": msgspec.json.encode(GENERATE), "more_body": False}]

    async def receive():
        if body:
            return body.pop()
        return await asyncio.Event().wait()

    async def run():
        scope = {"type": "http", "method": "POST", "path": "/generate", "headers": [], "query_string": b""}
        scope["state"] = {"tenant": "t", "key": None}
        return await Endpoints(service).generate(Request(scope, receive))

    assert asyncio.run(run()).status_code == 200
    assert engine.asked == ["t", "t"]
    assert engine.submitted[-1].tenant == "t"
