"""When the service may be asked."""

from __future__ import annotations

import dataclasses

import pytest

from jaxserve.errors import NotReady
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


def test_a_busy_engine_without_a_step_is_stalled(service, model, config):
    assert not service.stalled()
    for age, stalled in ((config.heartbeat_limit_s - 1, False), (config.heartbeat_limit_s, True)):
        service.model = dataclasses.replace(model, heartbeat=lambda age=age: age)
        assert service.stalled() is stalled
