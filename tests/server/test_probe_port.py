"""The probes on their own thread: they answer while the service's loop does not, from first to last."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time

import httpx2
import msgspec
import pytest

from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError
from jaxserve.server.probe_port import MOST_CONNECTIONS, ProbePort
from jaxserve.server.serve import listen, listen_for_probes


@pytest.fixture
def probed(service):
    """A service's probe port, and where it is."""
    listener = listen_for_probes(service.config, 0)
    port = ProbePort(service, listener)
    port.start()
    yield port, "http://{}:{}".format(*listener.getsockname()[:2])
    port.stop()


def test_it_answers_what_the_main_port_answers(probed, served):
    _, url = probed
    time.sleep(0.2)
    for path in ("/livez", "/readyz", "/startupz", "/v2/health/ready", "/v2/models/toy/ready", "/v2/models/x/ready"):
        own, main = httpx2.get(url + path), httpx2.get(served.url + path)
        assert (own.status_code, own.json()) == (main.status_code, main.json())
    assert httpx2.get(url + "/v1/models").status_code == 404
    assert httpx2.post(url + "/readyz").status_code == 405


def test_it_answers_while_the_loop_is_blocked(probed, served, service, wait_for):
    """The service's loop sleeps in the middle of an answer; only its own port hears that."""
    _, url = probed
    loop_blocked = 1.5

    async def block() -> None:
        time.sleep(loop_blocked)  # noqa: ASYNC251 - that is what is tried

    with httpx2.Client() as client:
        wait_for(lambda: client.get(url + "/readyz").status_code == 200)
        asyncio.run_coroutine_threadsafe(block(), served.server.servers[0].get_loop())
        begin, found, slowest = time.monotonic(), [], 0.0
        while time.monotonic() - begin < loop_blocked + 0.5:
            asked = time.monotonic()
            found.append((asked - begin, client.get(url + "/readyz").status_code, client.get(url + "/livez")))
            slowest = max(slowest, time.monotonic() - asked)
            time.sleep(0.02)
    unready = [when for when, status, _ in found if status == 503]
    assert unready
    assert min(unready) < loop_blocked
    assert found[-1][1] == 200
    assert {live.status_code for _, _, live in found} == {200}
    assert slowest < 1
    assert service.vitals.pulse.lag() > 1


def test_it_is_there_before_the_service_and_after_it(probed, service, serve_it):
    _, url = probed
    assert httpx2.get(url + "/livez").status_code == 200
    with serve_it(service):
        pass
    answer = httpx2.get(url + "/readyz")
    assert (answer.status_code, answer.json()["status"]) == (503, "draining")
    assert httpx2.get(url + "/livez").status_code == 200


def test_it_is_gone_when_stopped(service):
    listener = listen_for_probes(service.config, 0)
    address = listener.getsockname()[:2]
    port = ProbePort(service, listener)
    port.start()
    with httpx2.Client(base_url="http://{}:{}".format(*address)) as client:
        client.get("/livez")
        begin = time.monotonic()
        port.stop()  # a connection that is kept does not hold it up
        assert time.monotonic() - begin < 5
    with pytest.raises(OSError, match="refused"), socket.create_connection(address, timeout=1):
        pass


def test_it_takes_a_few_connections_only(probed):
    """Whoever opens more is turned away; the probes that were there first still are."""
    _, url = probed
    host, port = url.removeprefix("http://").split(":")
    with httpx2.Client(base_url=url) as client, contextlib.ExitStack() as opened:
        assert client.get("/livez").status_code == 200
        for _ in range(3 * MOST_CONNECTIONS):
            opened.enter_context(socket.create_connection((host, int(port)), timeout=5))
        assert client.get("/livez").status_code == 200


def test_it_has_the_limits_of_the_main_port(probed):
    _, url = probed
    assert httpx2.get(url + "/livez", headers={"x": "y" * 100_000}).status_code == 431


@pytest.mark.parametrize(("main", "setting"), [(0, "auto"), (8000, 0)])
def test_a_free_port(main, setting):
    with listen_for_probes(ServerConfig(port=main, probe_port=setting), 1) as listener:
        assert listener.getsockname()[1] > 1


def test_auto_is_the_next_port():
    for _ in range(20):  # somebody else may have it
        with listen(ServerConfig(port=0)) as main, contextlib.suppress(ConfigError):
            port = main.getsockname()[1]
            with listen_for_probes(ServerConfig(port=port), port) as listener:
                assert listener.getsockname()[1] == port + 1
                return
    pytest.fail("no two ports side by side")


def test_off_is_none():
    assert listen_for_probes(ServerConfig(probe_port=None), 8000) is None


def test_a_port_that_is_taken_or_none_is_one_sentence():
    with listen(ServerConfig(port=0)) as main:
        taken = main.getsockname()[1]
        for config, port in ((ServerConfig(probe_port=taken), 1), (ServerConfig(port=65535), 65535)):
            with pytest.raises(ConfigError, match="Cannot listen") as caught:
                listen_for_probes(config, port)
            assert caught.value.param == "server.probe_port"


def test_the_health_route_of_a_platform(service):
    service.config = msgspec.structs.replace(service.config, health_route="/vertex/health")
    listener = listen_for_probes(service.config, 0)
    port = ProbePort(service, listener)
    port.start()
    try:
        assert httpx2.get("http://{}:{}/vertex/health".format(*listener.getsockname()[:2])).status_code == 200
    finally:
        port.stop()
