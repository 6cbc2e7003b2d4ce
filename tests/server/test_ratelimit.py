"""Nobody takes more than theirs, nobody loses what they did not use, and the wall clock has no say in it."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import InvalidRequest, RateLimited, Unauthenticated
from jaxserve.server.keys import Key, KeyLimits
from jaxserve.server.ratelimit import Bucket, RateLimits


class Clock:
    """Seconds, as a test sets them."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def key(name: str = "a", **limits: int) -> Key:
    return Key(id=name, client="one", sha256="0" * 64, limits=KeyLimits(**limits))


def limits_of(clock: Clock, *keys: Key) -> RateLimits:
    limits = RateLimits(clock)
    limits.renew(keys)
    return limits


# --- the bucket -------------------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(st.floats(0, 90), st.integers(0, 120), st.floats(0, 1)),
    max_size=40,
)


def violations(bucket_type: type[Bucket], capacity: int, steps: list[tuple[float, int, float]]) -> list[str]:
    """Plays takes and refunds; says where more was had than capacity + rate x time, or more came back than went."""
    now, net, found = 1000.0, 0.0, []
    bucket = bucket_type(capacity, now)
    for pause, amount, share in steps:
        now += pause
        if bucket.wait(amount, now) == 0:
            bucket.take(amount, now)
            bucket.give(amount * share, now)
            net += amount * (1 - share)
        if net > capacity + (now - 1000.0) * capacity / 60 + 1e-6:
            found.append(f"{net} at {now}")
        if not -1e-6 <= bucket.level(now) <= capacity + 1e-6:
            found.append(f"level {bucket.level(now)} at {now}")
    return found


@given(capacity=st.integers(1, 100), steps=STEPS)
def test_never_more_than_capacity_and_rate(capacity, steps):
    assert violations(Bucket, capacity, steps) == []


@given(capacity=st.integers(1, 100), amount=st.integers(1, 100), taken=st.integers(0, 100))
def test_whoever_waits_as_told_is_served(capacity, amount, taken):
    bucket = Bucket(capacity, 0.0)
    bucket.take(min(taken, capacity), 0.0)
    wait = bucket.wait(amount, 0.0)
    assert wait == pytest.approx(max(0, amount - (capacity - min(taken, capacity))) * 60 / capacity)
    if amount <= capacity:
        assert bucket.wait(amount, wait + 1e-6) == 0


def test_the_property_would_notice():
    class Generous(Bucket):
        def give(self, amount, now):
            self._level += amount * 1.5 + 1

    class Fast(Bucket):
        def level(self, now):
            return super().level(1000.0 + (now - 1000.0) * 2)

    steps = [(0.0, 10, 1.0), (1.0, 10, 0.0), (1.0, 10, 0.0)] * 5
    assert violations(Bucket, 10, steps) == []
    assert violations(Generous, 10, steps) != []
    assert violations(Fast, 10, [(20.0, 6, 0.0)] * 20) != []


# --- requests ---------------------------------------------------------------------------------------------------------


def test_requests_a_minute(clock):
    limits = limits_of(clock, one := key(requests_per_minute=3))
    for _ in range(3):
        limits.enter(one).settle()
    with pytest.raises(RateLimited) as caught:
        limits.enter(one)
    assert (caught.value.kind, caught.value.retry_after) == ("requests", pytest.approx(20))
    clock.now += 20
    limits.enter(one)
    with pytest.raises(RateLimited):
        limits.enter(one)


def test_requests_at_once(clock):
    limits = limits_of(clock, one := key(concurrency=2))
    first, _ = limits.enter(one), limits.enter(one)
    with pytest.raises(RateLimited) as caught:
        limits.enter(one)
    assert caught.value.kind == "requests"
    first.settle()
    first.settle()  # as good as once
    limits.enter(one)
    with pytest.raises(RateLimited):
        limits.enter(one)


def test_a_refusal_takes_nothing(clock):
    limits = limits_of(clock, one := key(requests_per_minute=2, concurrency=1))
    running = limits.enter(one)
    for _ in range(5):
        with pytest.raises(RateLimited):
            limits.enter(one)
    running.settle()
    limits.enter(one)


# --- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spent", "left"), [(None, (100, 100)), (0, (90, 100)), (7, (90, 93)), (50, (90, 50)), (70, (90, 50))]
)
def test_what_was_not_used_goes_back(spent, left, clock):
    """A request that never reached the engine gets all back; the prompt of one that did has been read."""
    limits = limits_of(clock, one := key(input_tokens_per_minute=100, output_tokens_per_minute=100))
    charge = limits.enter(one)
    charge.reserve(10, 50)
    if spent is not None:
        charge.begin(lambda: spent)
    charge.settle()
    charge.settle()
    again = limits.enter(one)
    again.reserve(*left)
    with pytest.raises(RateLimited) as caught:
        again.reserve(1, 1)
    assert caught.value.kind == "tokens"


def test_all_or_nothing(clock):
    limits = limits_of(clock, one := key(input_tokens_per_minute=100, output_tokens_per_minute=100))
    limits.enter(one).reserve(10, 60)
    with pytest.raises(RateLimited) as caught:
        limits.enter(one).reserve(90, 50)
    assert caught.value.retry_after == pytest.approx(6)
    assert "output tokens" in caught.value.message
    limits.enter(one).reserve(90, 40)


@pytest.mark.parametrize(("amounts", "param"), [((101, 1), None), ((1, 101), "max_tokens")])
def test_what_can_never_be_is_no_matter_of_waiting(amounts, param, clock):
    limits = limits_of(clock, one := key(input_tokens_per_minute=100, output_tokens_per_minute=100))
    with pytest.raises(InvalidRequest, match="this key may use 100 a minute") as caught:
        limits.enter(one).reserve(*amounts)
    assert (caught.value.param, caught.value.code) == (param, "exceeds_key_limit")


def test_without_a_key_or_a_limit_nothing_is_limited(clock):
    limits = limits_of(clock, free := key())
    for _ in range(1000):
        for one in (None, free):
            charge = limits.enter(one)
            charge.reserve(10**9, 10**9)
    assert limits.headers(None) == limits.headers(free) == []


def test_keys_do_not_share(clock):
    limits = limits_of(clock, one := key("a", requests_per_minute=1), two := key("b", requests_per_minute=1))
    limits.enter(one)
    limits.enter(two)
    with pytest.raises(RateLimited):
        limits.enter(one)


@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(0, 40), st.integers(0, 60), st.floats(0, 30), st.booleans()),
        max_size=30,
    )
)
def test_over_any_history_nobody_has_more_than_theirs(history):
    """Tokens really generated never exceed capacity and rate, and running requests settle to none."""
    clock = Clock()
    limits = limits_of(clock, one := key(output_tokens_per_minute=50, input_tokens_per_minute=50))
    begin, generated, read, open_charges = clock.now, 0, 0, []
    for prompt, wanted, spent, pause, at_once in history:
        clock.now += pause
        charge = limits.enter(one)
        open_charges.append(charge)
        try:
            charge.reserve(prompt, wanted)
        except RateLimited:
            continue
        used = min(spent, wanted)
        charge.begin(lambda used=used: used)
        generated, read = generated + used, read + prompt
        if at_once:
            charge.settle()
        assert generated <= 50 + (clock.now - begin) * 50 / 60 + 1e-6
        assert read <= 50 + (clock.now - begin) * 50 / 60 + 1e-6
    for charge in open_charges:
        charge.settle()
    assert limits._accounts["a"].running == 0
    assert limits._accounts["a"].output.level(clock.now) <= 50


# --- clocks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_a_jump_of_the_wall_clock_changes_nothing(jump, monkeypatch):
    limits = RateLimits()
    limits.renew([one := key(requests_per_minute=2)])
    limits.enter(one)
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + jump)
    limits.enter(one)
    with pytest.raises(RateLimited) as caught:
        limits.enter(one)
    assert 25 < caught.value.retry_after <= 30


def test_a_clock_that_stands_or_steps_back_gives_nothing():
    bucket = Bucket(60, 100.0)
    bucket.take(60, 100.0)
    assert [bucket.level(now) for now in (100.0, 50.0, 100.0, 101.0)] == [0, 0, 0, 1]


# --- renewal ----------------------------------------------------------------------------------------------------------


def test_what_is_used_up_stays_used_up(clock):
    limits = limits_of(clock, one := key(requests_per_minute=2, concurrency=9))
    running = [limits.enter(one), limits.enter(one)]
    limits.renew([one])
    with pytest.raises(RateLimited):
        limits.enter(one)
    limits.renew([wider := key(requests_per_minute=3, concurrency=3)])
    limits.enter(wider)
    with pytest.raises(RateLimited, match="3 requests running"):
        limits.enter(wider)
    limits.renew([wider := key(requests_per_minute=3, concurrency=9)])
    with pytest.raises(RateLimited, match="used up its requests"):
        limits.enter(wider)
    for charge in running:
        charge.settle()
    limits.renew([key(concurrency=2)])
    limits.enter(key())
    with pytest.raises(RateLimited, match="2 requests running"):
        limits.enter(key())
    limits.renew([free := key()])
    limits.enter(free)


def test_a_revoked_key_gets_no_further(clock):
    limits = limits_of(clock, one := key())
    charge = limits.enter(one)
    limits.renew([], ["a"])
    with pytest.raises(Unauthenticated):
        charge.reserve(1, 1)
    with pytest.raises(Unauthenticated):
        limits.enter(one)
    charge.settle()
    limits.renew([one], ["a"])  # another secret under the same id
    limits.enter(one).reserve(1, 1)
    with pytest.raises(Unauthenticated):
        charge.reserve(1, 1)


# --- headers ----------------------------------------------------------------------------------------------------------


def test_headers_by_openais_names(clock):
    limits = limits_of(
        clock, one := key(requests_per_minute=60, input_tokens_per_minute=600, output_tokens_per_minute=6000)
    )
    assert dict(limits.headers(one)) == {
        b"x-ratelimit-limit-requests": b"60",
        b"x-ratelimit-remaining-requests": b"60",
        b"x-ratelimit-reset-requests": b"0ms",
        b"x-ratelimit-limit-tokens": b"600",
        b"x-ratelimit-remaining-tokens": b"600",
        b"x-ratelimit-reset-tokens": b"0ms",
    }
    limits.enter(one).reserve(1, 6000)
    clock.now += 0.5
    found = dict(limits.headers(one))
    assert found[b"x-ratelimit-remaining-requests"] == b"59"
    assert found[b"x-ratelimit-reset-requests"] == b"500ms"
    assert found[b"x-ratelimit-limit-tokens"] == b"6000"
    assert found[b"x-ratelimit-remaining-tokens"] == b"50"
    assert found[b"x-ratelimit-reset-tokens"] == b"59.5s"


def test_only_what_is_limited_is_shown(clock):
    limits = limits_of(clock, one := key(output_tokens_per_minute=5, concurrency=3))
    assert {name for name, _ in limits.headers(one)} == {
        b"x-ratelimit-limit-tokens",
        b"x-ratelimit-remaining-tokens",
        b"x-ratelimit-reset-tokens",
    }


@pytest.mark.parametrize(
    ("used", "reset"),
    [(0, b"0ms"), (1, b"100ms"), (9, b"900ms"), (10, b"1s"), (599, b"59.9s"), (600, b"1m0s")],
)
def test_a_reset_is_a_duration_as_openai_writes_it(used, reset, clock):
    limits = limits_of(clock, one := key(input_tokens_per_minute=600))
    limits.enter(one).reserve(used, 0)
    assert dict(limits.headers(one))[b"x-ratelimit-reset-tokens"] == reset


def test_the_scarcer_of_both_is_that_with_the_smaller_share_left(clock):
    limits = limits_of(clock, one := key(input_tokens_per_minute=1000, output_tokens_per_minute=10))
    limits.enter(one).reserve(900, 1)
    assert dict(limits.headers(one))[b"x-ratelimit-limit-tokens"] == b"1000"
    limits.enter(one).reserve(0, 9)
    assert dict(limits.headers(one))[b"x-ratelimit-limit-tokens"] == b"10"


def test_a_request_that_reserved_nothing_brings_nothing_back(clock):
    limits = limits_of(clock, one := key(input_tokens_per_minute=10, output_tokens_per_minute=10))
    limits.enter(one).reserve(10, 10)
    limits.enter(one).settle()
    with pytest.raises(RateLimited):
        limits.enter(one).reserve(1, 0)
    with pytest.raises(RateLimited):
        limits.enter(one).reserve(0, 1)


@pytest.mark.parametrize(
    ("before", "used", "after", "left"), [(10, 4, 20, 16), (10, 4, 3, 0), (10, 0, 3, 3), (3, 3, 10, 7)]
)
def test_new_limits_leave_what_is_used_used(before, used, after, left, clock):
    """Until it comes back at the new rate."""
    limits = limits_of(clock, one := key(input_tokens_per_minute=before))
    limits.enter(one).reserve(used, 0)
    limits.renew([one := key(input_tokens_per_minute=after)])
    assert dict(limits.headers(one))[b"x-ratelimit-remaining-tokens"] == str(left).encode()


def test_a_limit_that_comes_later_gives_back_nothing_of_before(clock):
    limits = limits_of(clock, key())
    early = limits.enter(key())
    early.reserve(50, 50)
    limited = key(input_tokens_per_minute=60, output_tokens_per_minute=60)
    limits.renew([limited])
    limits.enter(limited).reserve(60, 60)
    early.settle()
    with pytest.raises(RateLimited):
        limits.enter(limited).reserve(1, 0)
    with pytest.raises(RateLimited):
        limits.enter(limited).reserve(0, 1)
