"""What every request passes through, on bare ASGI and on a socket where only a socket will show it."""

from __future__ import annotations

import json
import logging
import socket
import threading

import httpx2
import psutil
import pytest

from jaxserve.server.logs import JSONFormatter

CHAT = {"messages": [{"role": "user", "content": "a very secret question"}], "seed": 1}


@pytest.mark.parametrize("given", ["abc-123", "x" * 128, "!~"])
def test_a_harmless_request_id_comes_back(given, ask):
    assert ask("GET", "/livez", headers={"x-request-id": given}).headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "ü", "a\tb", "x" * 100_000])
def test_any_other_is_replaced(given, ask):
    found = ask("GET", "/livez", headers={"x-request-id": given.encode("latin-1")}).headers["x-request-id"]
    assert found != given
    assert len(found) == 32


def test_two_request_ids_are_none(ask):
    found = ask("GET", "/livez", headers=[("x-request-id", "one"), ("x-request-id", "two")]).headers
    assert found["x-request-id"] not in ("one", "two")


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"content-type": "text/plain"}, 415, "unsupported_media_type"),
        ({"content-type": "application/x-www-form-urlencoded"}, 415, "unsupported_media_type"),
        ({"content-type": ""}, 415, "unsupported_media_type"),
        ({"content-encoding": "gzip"}, 415, "unsupported_media_type"),
        ({"transfer-encoding": "identity, chunked"}, 400, "invalid_http"),
        ({"content-type": "application/json; charset=utf-8"}, 200, None),
        ({"content-type": "Application/JSON"}, 200, None),
        ({"content-encoding": "identity"}, 200, None),
    ],
)
def test_headers_of_a_body(headers, status, code, ask):
    found = ask("POST", "/v1/chat/completions", CHAT, headers)
    assert found.status_code == status
    assert code is None or found.json()["error"]["code"] == code


@pytest.mark.parametrize(("hosts", "status"), [([b"x"], 200), ([], 400), ([b"x", b"x"], 400), ([b"x", b"y"], 400)])
def test_there_is_one_host(hosts, status, served):
    lines = b"".join(b"host: " + host + b"\r\n" for host in hosts)
    with socket.create_connection(served.address, timeout=5) as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\n" + lines + b"connection: close\r\n\r\n")
        said = b""
        while data := connection.recv(65536):
            said += data
    assert int(said.split()[1]) == status
    assert status == 200 or b'"code":"invalid_http"' in said


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/chat", "//v1/models", "/v1/models/", "/V1/models", "/livez/", "/docs"]
)
def test_no_such_url(path, ask):
    found = ask("GET", path)
    assert found.status_code == 404
    assert found.json()["error"]["code"] in ("invalid_url", "model_not_found")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("PUT", "/v1/chat/completions", "POST"),
        ("DELETE", "/v1/models", "GET, HEAD"),
        ("OPTIONS", "/generate", "POST"),
        ("PATCH", "/readyz", "GET, HEAD"),
    ],
)
def test_no_such_method(method, path, allowed, ask):
    found = ask(method, path)
    assert found.status_code == 405
    assert found.headers["allow"] == allowed
    assert found.json()["error"]["code"] == "method_not_supported"


@pytest.mark.parametrize(("path", "status"), [("/livez", 405), ("/v1/models", 405), ("/nowhere", 404)])
def test_a_wrong_url_or_method_is_told_before_a_wrong_type(path, status, ask):
    assert ask("POST", path, b"x", {"content-type": "text/plain"}).status_code == status


# --- bodies -----------------------------------------------------------------------------------------------------------


def test_a_body_at_the_limit_and_beyond(ask, config):
    pad = config.max_body_bytes - len(json.dumps(CHAT | {"pad": ""}).encode())
    exact = json.dumps(CHAT | {"pad": "x" * pad}).encode()
    assert len(exact) == config.max_body_bytes
    assert ask("POST", "/v1/chat/completions", exact).status_code == 200
    found = ask("POST", "/v1/chat/completions", exact + b" ")
    assert found.status_code == 413
    assert found.json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_300_megabytes_are_not_read(path, declared, served, config):
    """The answer comes while the client still sends, and what it sends is not kept."""
    process = psutil.Process()
    before = process.memory_info().rss
    chunk = b" " * 2**16
    sent = 0
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += f"content-length: {300 * 2**20}\r\n\r\n" if declared else "transfer-encoding: chunked\r\n\r\n"
    peak = 0
    with socket.create_connection(served.address, timeout=5) as connection:
        connection.sendall(head.encode())
        try:
            while sent < 300 * 2**20:
                connection.sendall(chunk if declared else b"10000\r\n" + chunk + b"\r\n")
                sent += len(chunk)
                peak = max(peak, process.memory_info().rss)
        except OSError:
            pass
        said = connection.recv(65536)
    assert said.startswith(b"HTTP/1.1 413")
    assert b'"code":"request_too_large"' in said
    assert b"connection: close" in said
    assert sent < 20 * 2**20  # the limit twice, and what fits into the kernel's buffers
    assert peak - before < 10 * 2**20


def test_a_client_that_sends_before_it_reads_still_gets_its_answer(served):
    found = httpx2.post(
        served.url + "/v1/chat/completions",
        content=(b" " * 2**16 for _ in range(4800)),
        headers={"content-type": "application/json"},
        timeout=10,
    )
    assert found.status_code == 413


def test_a_client_that_waits_for_leave_is_not_given_it(served, config):
    with socket.create_connection(served.address, timeout=5) as connection:
        connection.sendall(
            b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nexpect: 100-continue\r\n"
            b"content-length: 300000000\r\n\r\n"
        )
        assert connection.recv(65536).startswith(b"HTTP/1.1 413")


# --- logs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def lines(caplog):
    """The access log's lines as JSON."""
    caplog.set_level(logging.INFO, "jaxserve.access")

    def read() -> list[dict]:
        formatter = JSONFormatter()
        return [json.loads(formatter.format(record)) for record in caplog.records if record.name == "jaxserve.access"]

    return read


def test_a_line_a_request(ask, lines, engine):
    engine.answer = b"a very secret answer"
    ask("POST", "/v1/chat/completions", CHAT, {"x-request-id": "r-1"})
    ask("POST", "/v1/chat/completions", CHAT | {"stream": True})
    ask("GET", "/v1/models/secret")
    ask("GET", "/secret/path?secret=1")
    ask("BREW", "/livez")
    ask("POST", "/generate", b"{secret")
    first, second, *rest = lines()
    assert first["ms"] >= 0
    assert (first["method"], first["route"], first["status"]) == ("POST", "/v1/chat/completions", 200)
    assert first["request_id"] == "r-1"
    assert first["completion_tokens"] == 21
    assert second["completion_tokens"] == 21
    found = [(line["method"], line["route"], line["status"], line["error"]) for line in rest]
    assert found == [
        ("GET", "/v1/models/{model:path}", 404, "model_not_found"),
        ("GET", "unmatched", 404, "invalid_url"),
        ("other", "/livez", 405, "method_not_supported"),
        ("POST", "/generate", 400, "invalid_json"),
    ]
    assert "secret" not in json.dumps(lines())


def test_no_lines_where_none_are_wanted(ask, lines, service):
    service.access_log = False
    ask("GET", "/livez")
    assert lines() == []


def test_requests_are_counted(ask, service):
    seen = []

    class Metrics:
        def observe_http(self, **fields):
            seen.append(fields)

    service.metrics = Metrics()
    ask("GET", "/livez")
    (found,) = seen
    assert found.pop("seconds") >= 0
    assert found == {"method": "GET", "route": "/livez", "status": 200}


def test_a_client_that_hangs_up_is_a_line(served, lines, engine, wait_for):
    engine.hold = True
    with socket.create_connection(served.address, timeout=5) as connection:
        body = json.dumps(CHAT).encode()
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % len(body) + body
        )
        wait_for(lambda: engine.active)
    wait_for(lines)
    (line,) = lines()
    assert line["status"] == 499


def test_probes_answer_while_texts_are_read(served, tokenizer, monkeypatch):
    """Tokenising happens in threads, so the event loop has time for everybody else."""
    begun, release = threading.Event(), threading.Event()
    encode = type(tokenizer).encode

    def slow(self, *args, **kwargs):
        begun.set()
        release.wait(5)
        return encode(self, *args, **kwargs)

    monkeypatch.setattr(type(tokenizer), "encode", slow)
    answers = []
    thread = threading.Thread(
        target=lambda: answers.append(httpx2.post(served.url + "/tokenize", json={"prompt": "x"}, timeout=10))
    )
    thread.start()
    assert begun.wait(5)
    assert httpx2.get(served.url + "/livez", timeout=1).status_code == 200
    assert answers == []
    release.set()
    thread.join()
    assert answers[0].json()["count"] == 1
