from __future__ import annotations

import pytest

from jaxserve.engine.canary import Canary
from jaxserve.engine.request import Delta, FinishReason, Request
from jaxserve.errors import NumericalError, QueueTimeout

KNOWN = Request("golden-0", (1, 2))


def asked(canary: Canary) -> Request:
    assert [canary.error(now) for now in (0.0, 1.0)] == [None, None]
    question = canary.error(2.0)
    assert question is not None
    return question


def test_three_in_a_minute_are_too_many():
    canary = Canary(KNOWN, (7, 8))
    assert [canary.error(now) for now in (0.0, 31.0, 62.0)] == [None, None, None]
    question = canary.error(63.0)
    assert (question.id, question.prompt) == ("canary-1", (1, 2))
    assert canary.is_asked("canary-1")
    assert not canary.is_asked("golden-0")
    assert [canary.error(64.0) for _ in range(9)] == [None] * 9  # one question at a time


@pytest.mark.parametrize(
    ("deltas", "sick"),
    [
        ([Delta((7,)), Delta((8,), finish_reason=FinishReason.LENGTH)], False),
        ([Delta((7, 9), finish_reason=FinishReason.LENGTH)], True),
        ([Delta((7,), finish_reason=FinishReason.STOP)], True),
        ([Delta(finish_reason=FinishReason.ERROR, error=NumericalError("no"))], True),
        ([Delta(finish_reason=FinishReason.ERROR, error=QueueTimeout("no"))], False),
    ],
)
def test_a_wrong_answer_is_remembered(deltas, sick):
    canary = Canary(KNOWN, (7, 8))
    asked(canary)
    for delta in deltas:
        assert not canary.sick
        canary.hear(delta)
    assert canary.sick is sick
    assert not canary.is_asked("canary-1")
    assert asked(canary).id == "canary-2"


def test_without_a_known_answer_nothing_is_asked():
    canary = Canary()
    assert [canary.error(0.0) for _ in range(9)] == [None] * 9
    canary.hear(Delta((1,)))
    assert not canary.sick
