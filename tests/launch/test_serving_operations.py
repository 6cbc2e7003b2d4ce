"""What an operator does to a server, and what the machine does: signals, a pipe that nobody reads, no descriptors."""

from __future__ import annotations

import contextlib
import resource
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from tests.rigs.served import Served, started

SMALL = ("--engine.pools", "4x128")


@pytest.fixture(scope="module")
def server():
    with started(*SMALL) as server:
        server.wait_until_ready()
        yield server


def generate(server: Served) -> httpx2.Response:
    return httpx2.post(server.url + "/generate", json={"prompt": "a", "max_tokens": 5, "seed": 1}, timeout=30)


def test_the_probes_have_an_address_of_their_own(server: Served):
    assert server.probe_url != server.url
    for path in ("/livez", "/readyz", "/startupz", "/ping", "/v2/health/ready", "/v2/models/tiny/ready"):
        assert httpx2.get(server.probe_url + path).status_code == 200, path
    assert httpx2.get(server.probe_url + "/metrics").status_code == 404


def test_a_pipe_that_nobody_reads_holds_up_no_request(server: Served):
    text = generate(server).json()["text"]
    server.reading.clear()
    try:
        with httpx2.Client(base_url=server.url, timeout=30) as client, ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: client.get("/livez"), range(1000)))  # far more than a pipe holds
        assert generate(server).json()["text"] == text
    finally:
        server.reading.set()
    assert generate(server).json()["text"] == text


def test_without_descriptors_newcomers_are_told_and_probes_answer(server: Served):
    """The limit falls below what is needed for a crowd that says nothing; then the crowd goes home."""
    before = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (server.fds() + 60, before[1]))
    try:
        with contextlib.ExitStack() as crowd, httpx2.Client(base_url=server.url) as regular:
            assert regular.get("/livez").status_code == 200
            for _ in range(200):
                crowd.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=5))
            assert httpx2.get(server.probe_url + "/readyz").status_code == 200
            assert httpx2.get(server.probe_url + "/livez").status_code == 200
            assert regular.post("/generate", json={"prompt": "a", "max_tokens": 5}).status_code == 200
            with contextlib.suppress(httpx2.TransportError):  # or closed at once, at the very end
                assert generate(server).json()["error"]["code"] == "server_is_overloaded"
        end = time.monotonic() + 20
        while server.metric("jaxserve_shortages_total", resource="descriptors") < 1:
            assert time.monotonic() < end
    finally:
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, before)
    assert generate(server).status_code == 200
    assert server.records("short of descriptors")


def test_a_signal_in_its_first_moment_ends_it_as_told():
    with started(*SMALL) as server:
        assert server.probe_url  # the line is out; the event loop may not run yet
        server.process.send_signal(signal.SIGINT)
        assert server.wait(60) == 0
        assert server.records("ended")[0]["exit"] == 0


def test_a_port_of_the_probes_that_is_taken_is_said():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with started(*SMALL, "--server.probe-port", str(taken.getsockname()[1])) as server:
            assert server.wait(60) == 78
            assert "Cannot listen" in server.lines[-1]


def test_short_memory_refuses_generations_and_nothing_else():
    with started(*SMALL, "--server.rss-limit-bytes", "1000000") as server:
        server.wait_until_ready()
        answer = generate(server)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_is_overloaded")
        assert "retry-after" in answer.headers
        assert httpx2.get(server.probe_url + "/readyz").status_code == 200
        assert server.metric("jaxserve_shortages_total", resource="memory") >= 1
        assert server.stop() == 0
