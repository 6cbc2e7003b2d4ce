"""What each probe answers: the right status in the shape that who asks expects, and nothing but fixed words."""

from __future__ import annotations

import asyncio
import dataclasses
import math

import httpx2
import msgspec
import pytest

from jaxserve.errors import DeviceFault
from jaxserve.server.app import create_app
from jaxserve.server.probes import create_probe_app, probe_routes
from jaxserve.server.readiness import Readiness

READY = ("/readyz", "/health", "/ping", "/v2/health/ready", "/v2/models/toy/ready")
LIVE = ("/livez", "/v2/health/live")
ALL = (*READY, *LIVE, "/startupz")


@pytest.fixture(params=[create_app, create_probe_app], ids=["main", "own"])
def get(request, service):
    """Asks for a path, on the main port and on that of the probes."""
    app = request.param(service)

    def get(path: str) -> httpx2.Response:
        async def run() -> httpx2.Response:
            transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
            async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                return await client.get(path)

        return asyncio.run(run())

    return get


def codes(get) -> dict[str, int]:
    """The status of every probe."""
    return {path: get(path).status_code for path in ALL}


def test_a_ready_service(get, service):
    assert set(codes(get).values()) == {200}
    body = get("/readyz").json()
    assert body == {
        "status": "ready",
        "since": int(service.readiness.status.since),
        "checks": {"model": "ok", "engine": "ok", "event_loop": "ok"},
        "model": "toy",
        "native_kernels": False,
        "progress": {"phase": "ready", "done": 0, "total": 0},
    }
    assert get("/health").json() == get("/ping").json() == body
    assert get("/livez").json() == {"status": "alive", "checks": body["checks"]}
    assert get("/startupz").json()["status"] == "started"
    assert get("/v2/health/live").json() == {"live": True}
    assert get("/v2/health/ready").json() == {"ready": True}
    assert get("/v2/models/toy/ready").json() == {"name": "toy", "ready": True}
    answer = get("/readyz")
    assert (answer.headers["content-type"], answer.headers["cache-control"]) == ("application/json", "no-store")


def test_a_start_says_how_far_it_is(get, service):
    service.readiness, service.model = Readiness(), None
    service.readiness.advance("compiling", 17, 24)
    found = codes(get)
    assert {path for path in ALL if found[path] == 200} == set(LIVE)
    assert {found[path] for path in (*READY, "/startupz")} == {503}
    body = get("/readyz").json()
    assert (body["status"], body["model"], body["native_kernels"]) == ("compiling", None, None)
    assert body["progress"] == {"phase": "compiling", "done": 17, "total": 24}
    assert body["checks"]["model"] == body["checks"]["engine"] == "absent"
    assert get("/startupz").json() == {"status": "starting", "progress": body["progress"]}
    assert get("/v2/models/toy/ready").json() == {"name": None, "ready": False}


def test_a_drain(get, service):
    service.readiness.drain()
    found = codes(get)
    assert {found[path] for path in READY} == {503}
    assert {found[path] for path in (*LIVE, "/startupz")} == {200}
    assert get("/readyz").json()["status"] == "draining"
    assert get("/v2/models/toy/ready").json() == {"name": "toy", "ready": False}


def test_a_failure_says_no_more_than_that(get, service):
    service.readiness.fail("/secret/path is damaged")
    found = codes(get)
    assert {found[path] for path in (*READY, *LIVE)} == {503}
    assert get("/livez").json()["status"] == "dead"
    assert not any("secret" in get(path).text for path in ALL)


@pytest.mark.parametrize(
    ("given", "word", "alive"),
    [
        ({"heartbeat": lambda: 2.0, "step_limit": lambda: 1.0}, "stalled", True),
        ({"degraded": lambda: True}, "degraded", True),
        ({"failure": lambda: DeviceFault("0xdeadbeef is broken")}, "failed", False),
        ({"heartbeat": lambda: math.inf}, "stalled", False),
    ],
)
def test_an_engine_that_is_not_well(get, service, model, given, word, alive):
    service.model = dataclasses.replace(model, **given)
    service.vitals.look()
    found = codes(get)
    assert {found[path] for path in READY} == {503}
    assert {found[path] for path in LIVE} == {200 if alive else 503}
    body = get("/readyz").json()
    assert (body["status"], body["checks"]["engine"]) == ("degraded", word)
    assert "deadbeef" not in get("/readyz").text


def test_a_full_queue_is_no_reason_to_look_away(get, engine):
    engine.active = {str(i) for i in range(10_000)}
    assert set(codes(get).values()) == {200}


def test_another_model_is_not_here(get):
    for path in ("/v2/models/nobody/ready", "/v2/models/..%2f..%2fetc/ready"):
        answer = get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert "nobody" not in answer.text


def test_a_platform_may_name_a_path_of_its_own(service, get):
    assert get("/healthz").status_code == 404
    config = msgspec.structs.replace(service.config, health_route="/healthz")
    service.config = config
    assert "/healthz" in {route.path for route in probe_routes(service)}
    service.config = msgspec.structs.replace(config, health_route="/livez")
    routes = [route for route in probe_routes(service) if route.path == "/livez"]
    assert len(routes) == 1  # a path that is taken keeps its meaning


def test_the_port_of_its_own_has_probes_and_nothing_else(service):
    main = {route.path for route in create_app(service).routes}
    own = {route.path for route in create_probe_app(service).routes}
    assert own < main
    assert own == {route.path for route in probe_routes(service)}
