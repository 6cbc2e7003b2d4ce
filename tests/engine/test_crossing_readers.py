"""What waits for a reader who does not come is bounded in bytes, by the request's own ``max_tokens``."""

from __future__ import annotations

import tracemalloc

import pytest

from jaxserve.engine.crossing import Stream
from jaxserve.engine.request import Delta, FinishReason, Request, SamplingParams, TokenLogprob

TOKENS = 2000
BARE_BYTES, LOGPROB_BYTES = 400, 4096  # a token that waits, at most


def delta(token: int, alternatives: int | None, *, last: bool = False) -> Delta:
    """One token as the engine tells of it."""
    logprobs = ()
    if alternatives is not None:
        top = tuple((1000 + token + index, -0.5 - index) for index in range(alternatives))
        logprobs = (TokenLogprob(1000 + token, -0.25, top),)
    return Delta((1000 + token,), logprobs, FinishReason.LENGTH if last else None)


def fill(stream: Stream, alternatives: int | None, count: int) -> None:
    for token in range(count):
        stream.put(delta(token, alternatives, last=token == count - 1))


@pytest.fixture
def stream() -> Stream:
    return Stream(Request("a", (1,), SamplingParams(max_tokens=TOKENS)), lambda request, reason: None)


@pytest.mark.parametrize(("alternatives", "bound"), [(None, BARE_BYTES), (20, LOGPROB_BYTES)])
def test_a_token_that_waits_takes_so_many_bytes(stream, alternatives, bound):
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        fill(stream, alternatives, TOKENS)
        waiting = tracemalloc.get_traced_memory()[0] - before
        assert TOKENS * 8 < waiting < TOKENS * bound
    finally:
        tracemalloc.stop()
    merged = stream.take()
    assert merged is not None
    assert (len(merged.tokens), merged.finish_reason) == (TOKENS, FinishReason.LENGTH)
    assert stream.take() is None


def test_what_comes_after_the_end_is_not_kept(stream):
    """A reader that has gone takes its tokens along."""
    fill(stream, 20, 10)
    stream.cancel()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        fill(stream, 20, TOKENS)
        assert tracemalloc.get_traced_memory()[0] - before < 10_000
    finally:
        tracemalloc.stop()
