from __future__ import annotations

import dataclasses

import pytest

from jaxserve.engine.request import Delta, FinishReason, Request, SamplingParams


def test_requests_are_values():
    request = Request("a", (1, 2), SamplingParams(seed=3))
    assert request == Request("a", (1, 2), SamplingParams(seed=3))
    assert hash(request)
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.id = "b"


def test_reasons_are_the_words_that_go_out():
    assert [str(reason) for reason in FinishReason] == ["stop", "length", "cancelled", "error"]
    assert Delta().finish_reason is None
