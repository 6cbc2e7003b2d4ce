"""The account of what nobody reads: every byte is counted once, and whoever has left most gives way."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from jaxserve.engine.request import Account, Delta, Pass, TokenLogprob
from jaxserve.engine.unread import Unread, size_of


@pytest.mark.parametrize("tokens", [0, 1, 8])
@pytest.mark.parametrize("alternatives", [None, 0, 20])
def test_sizes_are_those_of_the_interpreter(tokens, alternatives):
    """Within a factor of two, and rather too large."""

    def made(seed: int) -> Delta:
        ids = tuple(100_000 + seed * 100 + token for token in range(tokens))
        top = [tuple((token + n, token / 3.0 - n) for n in range(alternatives or 0)) for token in ids]
        logprobs = tuple(TokenLogprob(token, token / 7.0, entry) for token, entry in zip(ids, top, strict=True))
        return Delta(ids, () if alternatives is None else logprobs)

    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        kept = [made(seed) for seed in range(500)]
        real = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    counted = sum(map(size_of, kept))
    assert 0.8 * real < counted < 2.5 * real


def test_who_left_most_gives_way():
    unread: Unread[str] = Unread(1000)
    unread.add("a", 400)
    unread.add("b", 500)
    assert unread.slowest() is None
    unread.add("a", 200)
    assert unread.slowest() == "a"
    unread.clear("a")
    assert unread.slowest() is None
    unread.clear("a")
    unread.add("c", 501)
    assert unread.slowest() == "c"


def test_nothing_is_lost_from_the_account():
    dice, unread, real = random.Random(0), Unread[int](10**9), dict.fromkeys(range(20), 0)
    for _ in range(5000):
        owner, size = dice.randrange(20), dice.randrange(100)
        if dice.random() < 0.3:
            unread.clear(owner)
            real[owner] = 0
        else:
            unread.add(owner, size)
            real[owner] += size
        assert unread._total == sum(real.values())


def test_canvases_and_passes_take_their_room():
    """Within a factor of two, and rather too large."""

    def made(seed: int) -> Delta:
        canvas = tuple(100_000 + seed * 100 + place for place in range(32))
        passes = tuple(Pass((), Account(passes=1, drafted=seed + 300), tuple(t + n for t in canvas)) for n in range(4))
        return Delta(canvas=canvas, passes=passes)

    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        kept = [made(seed) for seed in range(200)]
        real = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert real <= sum(map(size_of, kept)) <= 2.2 * real
