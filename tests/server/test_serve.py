"""Listening and leaving: nobody is refused while load balancers look away, and every stream ends in words."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import httpx2
import msgspec
import pytest

from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError, DeviceFault
from jaxserve.server.serve import Server, listen

BODY = {"prompt": "x", "max_tokens": 200, "stream": True, "ignore_eos": True}

HALF_A_BODY = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"


def in_background(served, body: dict, found: list) -> threading.Thread:
    """Asks in a thread; ``found`` gets the answer."""
    thread = threading.Thread(target=lambda: found.append(httpx2.post(served.url + "/generate", json=body, timeout=20)))
    thread.start()
    return thread


def with_times(service, **seconds: float) -> None:
    service.config = msgspec.structs.replace(service.config, **seconds)


def test_first_not_ready_then_closed(service, engine, serve_it, events, wait_for):
    with_times(service, lame_duck_s=0.5, drain_s=5.0)
    engine.answer, engine.delay, engine.widest = b"x" * 150, 0.01, 1
    found: list = []
    with serve_it(service) as served:
        thread = in_background(served, BODY, found)
        wait_for(lambda: engine.active)
        begin = time.monotonic()
        served.terminate()
        answer = httpx2.get(served.url + "/readyz")
        assert (answer.status_code, answer.json()["status"]) == (503, "draining")
        assert httpx2.get(served.url + "/livez").status_code == 200
        assert httpx2.post(served.url + "/generate", json={"prompt": "y", "max_tokens": 3}).status_code == 200
        assert served.thread.is_alive()
        thread.join()
        served.thread.join(10)
        assert 0.5 < time.monotonic() - begin < 20
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(served.url + "/readyz")
    assert events(found[0])[-1] == "[DONE]"


@pytest.mark.parametrize("stream", [True, False])
def test_what_does_not_finish_is_ended_in_words(stream, service, engine, serve_it, events, wait_for):
    with_times(service, drain_s=0.3)
    engine.answer, engine.delay, engine.widest = b"x" * 200, 0.05, 1
    found: list = []
    with serve_it(service) as served:
        thread = in_background(served, BODY | {"stream": stream}, found)
        wait_for(lambda: engine.active)
        time.sleep(0.2)
        begin = time.monotonic()
        served.terminate()
        thread.join()
        served.thread.join(10)
        assert time.monotonic() - begin < 10
    (answer,) = found
    if stream:
        *_, last = events(answer)
        assert last["error"]["code"] == "server_shutdown"
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_shutdown")
        assert "retry-after" in answer.headers
    assert engine.active == set()


def test_a_second_signal_ends_at_once(service, engine, serve_it, events, wait_for):
    with_times(service, lame_duck_s=30.0, drain_s=30.0)
    engine.hold = True
    found: list = []
    with serve_it(service) as served:
        thread = in_background(served, BODY | {"stream": False}, found)
        wait_for(lambda: engine.active)
        served.terminate()
        served.terminate()
        thread.join(3)
        served.thread.join(3)
        assert not served.thread.is_alive()
    assert found[0].status_code == 503


def test_answers_of_a_draining_server_send_the_next_request_elsewhere(service, serve_it, wait_for):
    with_times(service, lame_duck_s=5.0)
    with serve_it(service) as served, httpx2.Client(base_url=served.url) as client:
        assert "connection" not in client.get("/livez").headers
        served.terminate()
        wait_for(lambda: client.get("/livez").headers.get("connection") == "close")
        assert client.post("/generate", json={"prompt": "x", "max_tokens": 3}).headers["connection"] == "close"
        served.terminate()


@pytest.mark.parametrize("sent", [b"", b"POST /generate HTTP/1.1\r\nhost:", HALF_A_BODY])
def test_who_never_says_what_he_wants_does_not_hold_it_up(sent, service, serve_it):
    with_times(service, drain_s=0.2)
    with serve_it(service) as served, socket.create_connection(served.address, timeout=20) as connection:
        connection.sendall(sent)
        time.sleep(0.2)
        begin = time.monotonic()
        served.terminate()
        served.thread.join(10)
        assert time.monotonic() - begin < 5
        assert not served.thread.is_alive()


def test_who_never_reads_does_not_hold_it_up(service, engine, serve_it, wait_for):
    with_times(service, drain_s=0.2)
    engine.answer, engine.widest = b"x" * 250, 1
    body = json.dumps(BODY | {"prompt": ["x"] * 8, "n": 8, "max_tokens": 250, "logprobs": 5}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    with serve_it(service) as served, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect(served.address)
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        wait_for(lambda: engine.active)
        time.sleep(0.5)
        assert engine.active
        begin = time.monotonic()
        served.terminate()
        served.thread.join(10)
        assert time.monotonic() - begin < 5
        assert not served.thread.is_alive()


@pytest.mark.parametrize("stream", [True, False])
def test_a_service_that_is_given_up_says_why_and_ends_at_once(stream, service, engine, serve_it, events, wait_for):
    with_times(service, drain_s=30.0)
    engine.answer, engine.delay, engine.widest = b"x" * 200, 0.05, 1
    found: list = []
    with serve_it(service) as served:
        thread = in_background(served, BODY | {"stream": stream}, found)
        wait_for(lambda: engine.active)
        time.sleep(0.2)
        begin = time.monotonic()
        served.server.abandon(DeviceFault("The device is broken."))
        thread.join()
        served.thread.join(10)
        assert time.monotonic() - begin < 5
    (answer,) = found
    last = events(answer)[-1] if stream else answer.json()
    assert last["error"]["code"] == "device_fault"


def test_the_loop_has_a_heartbeat(service, serve_it, wait_for):
    with serve_it(service):
        wait_for(lambda: service.vitals.pulse.age() < 0.2)
        time.sleep(0.5)
        assert service.vitals.pulse.age() < 0.5
    time.sleep(0.3)
    assert service.vitals.pulse.age() > 0.25


def test_without_a_model_there_is_nothing_to_wait_for(service, serve_it):
    with_times(service, lame_duck_s=30.0)
    service.readiness = type(service.readiness)()
    with serve_it(service) as served:
        served.terminate()
        served.thread.join(3)
        assert not served.thread.is_alive()


def test_idle_connections_do_not_hold_it_up(service, serve_it):
    with_times(service, drain_s=30.0)
    with serve_it(service) as served, httpx2.Client() as client:
        client.get(served.url + "/livez")
        begin = time.monotonic()
        served.terminate()
        served.thread.join(5)
        assert time.monotonic() - begin < 10


def test_it_listens_before_there_is_a_model(service, model, serve_it):
    service.model = None
    service.readiness = type(service.readiness)()
    with serve_it(service) as served:
        assert httpx2.get(served.url + "/readyz").json()["status"] == "starting"
        service.readiness.advance("loading", 3, 12)
        assert httpx2.get(served.url + "/readyz").json()["progress"] == {"phase": "loading", "done": 3, "total": 12}
        service.model = model
        service.readiness.ready()
        assert httpx2.get(served.url + "/readyz").status_code == 200


def test_an_address_in_use_is_one_sentence():
    with listen(ServerConfig(port=0)) as first:
        with pytest.raises(ConfigError, match="in use") as caught:
            listen(ServerConfig(port=first.getsockname()[1]))
        assert caught.value.param == "server.port"


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_that_is_not_ours(host):
    with pytest.raises(ConfigError, match="Cannot listen"):
        listen(ServerConfig(host=host, port=0))


def test_sigterm_exits_with_zero(tmp_path):
    """A process of its own, with the real signal: uvicorn alone would end as if killed."""
    script = textwrap.dedent(
        """
        import sys
        from jaxserve.config import ServerConfig
        from jaxserve.server.serve import Server, listen
        from jaxserve.server.service import Service

        config = ServerConfig(port=0)
        listener = listen(config)
        print(listener.getsockname()[1], flush=True)
        Server(Service(config=config)).run([listener])
        assert "jax" not in sys.modules
        """
    )
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env=os.environ | {"PYTHONPATH": "."},
    )
    try:
        port = int(process.stdout.readline())
        assert httpx2.get(f"http://127.0.0.1:{port}/readyz").status_code == 503
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.stdout.close()
        process.wait()


def test_a_service_that_can_never_be_ready_ends_at_once(service):
    listener = listen(ServerConfig(port=0))
    server = Server(service)
    server.abandon()  # before it runs, too: loading may fail faster than the loop starts
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
