"""When the service may be asked."""

from __future__ import annotations

import socket

import msgspec
import pytest
from prometheus_client import generate_latest

from jaxserve.engine.metrics import Metrics
from jaxserve.errors import NotReady, Overloaded, ShuttingDown
from jaxserve.server.guards import Memory
from jaxserve.server.service import Service


def test_there_is_no_model_until_it_is_ready(config, model):
    service = Service(config=config)
    with pytest.raises(NotReady) as caught:
        service.ready_model()
    assert caught.value.retry_after == config.retry_after_s
    service.readiness.advance("compiling", 5, 9)
    service.model = model
    with pytest.raises(NotReady, match="compiling 5/9"):
        service.ready_model()
    service.readiness.ready()
    assert service.ready_model() is model


def test_a_draining_service_still_serves_and_a_failed_one_does_not(service, model):
    service.readiness.drain()
    assert service.ready_model() is model
    service.readiness.fail("broken")
    with pytest.raises(NotReady):
        service.ready_model()


def test_a_drain_may_refuse_what_is_new(service, model, config):
    service.readiness.drain()
    assert service.admit() is model
    service.config = msgspec.structs.replace(config, drain_reject=True)
    with pytest.raises(ShuttingDown):
        service.admit()
    assert service.ready_model() is model


def test_short_memory_refuses_generations_and_is_counted(service, model):
    service.metrics = Metrics()
    assert service.admit() is model
    service.memory = Memory(1000, 0.9, resident=lambda: 900)
    with pytest.raises(Overloaded) as caught:
        service.admit()
    assert caught.value.retry_after == service.config.retry_after_s
    assert service.metrics.shortages.labels("memory")._value.get() == 1
    assert service.ready_model() is model
    assert service.vitals.ready()


def test_the_memory_limit_may_be_set_or_off(config):
    for limit, short in ((1024, True), (None, False)):
        assert Service(config=msgspec.structs.replace(config, rss_limit_bytes=limit)).memory.short() is short


def test_what_is_no_request_is_counted(service, serve_it):
    service.metrics = Metrics()
    with serve_it(service) as served, socket.create_connection(served.address, timeout=5) as connection:
        connection.sendall(b"no request\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 400")
    said = generate_latest(service.metrics.registry).decode()
    assert 'jaxserve_http_request_seconds_count{method="other",route="unmatched",status="400"} 1.0' in said
