from __future__ import annotations

from jaxserve.engine.completion import Answer
from jaxserve.engine.request import Delta, FinishReason, Request, TokenLogprob


def test_deltas_add_up():
    answer = Answer(Request("a", (1,)))
    answer.add(Delta((1, 2), (TokenLogprob(1, -0.5), TokenLogprob(2, -0.25))))
    answer.add(Delta((3,), finish_reason=FinishReason.STOP))
    whole = answer.whole()
    assert (whole.tokens, len(whole.logprobs), whole.finish_reason) == ((1, 2, 3), 2, FinishReason.STOP)


def test_what_never_finished_has_failed():
    assert Answer(Request("a", (1,))).whole().finish_reason is FinishReason.ERROR
