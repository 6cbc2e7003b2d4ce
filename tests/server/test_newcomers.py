"""When descriptors run short newcomers are told so, those who are here are served, and the probes answer."""

from __future__ import annotations

import contextlib
import socket

import httpx2
import pytest

from jaxserve.engine.metrics import Metrics
from jaxserve.server import newcomers
from jaxserve.server.guards import Room
from jaxserve.server.newcomers import GuardedConfig


@pytest.fixture
def room(monkeypatch):
    """What the guard says: ``room[0]``."""
    given = [Room.SERVE]
    monkeypatch.setattr(newcomers, "room_for", lambda descriptor: given[0])
    return given


def test_a_newcomer_is_refused_and_a_regular_is_not(room, service, served, caplog):
    service.metrics = Metrics()
    with httpx2.Client(base_url=served.url) as regular:
        assert regular.get("/readyz").status_code == 200
        room[0] = Room.REFUSE
        for _ in range(3):
            refused = httpx2.post(served.url + "/generate", json={"prompt": "x"})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "server_is_overloaded"
            assert refused.headers["connection"] == "close"
            assert "retry-after" in refused.headers
        assert regular.post("/generate", json={"prompt": "x"}).status_code == 200
        room[0] = Room.SERVE
        assert httpx2.get(served.url + "/readyz").status_code == 200
    assert service.metrics.shortages.labels("descriptors")._value.get() == 3
    assert len([record for record in caplog.records if record.message == "short of descriptors"]) == 1


def test_at_the_very_end_it_is_closed(room, served):
    room[0] = Room.CLOSE
    with socket.create_connection(served.address, timeout=5) as connection, contextlib.suppress(ConnectionResetError):
        assert connection.recv(100) == b""
    room[0] = Room.SERVE
    assert httpx2.get(served.url + "/livez").status_code == 200


def test_a_newcomer_that_asks_nothing_is_soon_gone(room, served, monkeypatch):
    monkeypatch.setattr(newcomers, "HEAD_SECONDS", 0.1)
    room[0] = Room.REFUSE
    with socket.create_connection(served.address, timeout=5) as connection:
        assert connection.recv(100) == b""


def test_the_config_is_uvicorns(service):
    async def nothing(scope, receive, send) -> None: ...

    config = GuardedConfig(nothing, service)
    config.load()
    assert config.http_protocol_class is newcomers.GuardedProtocol
