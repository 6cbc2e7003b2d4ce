"""The scheduler as a state machine, with a device that is a hash: any leak, loss or swap changes what comes out."""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict

import pytest

from jaxserve.config import EngineConfig, Pool
from jaxserve.engine.request import FinishReason, Request, SamplingParams
from jaxserve.engine.scheduler import Emitted, Policy, Scheduler, check
from jaxserve.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    NumericalError,
    Overloaded,
    QueueTimeout,
)
from jaxserve.plan import ModelShape, make_plan

EOS = 7
SHAPE = ModelShape(200, 1000, 8, 4096, 8, 2, 16)
POLICY = Policy(max_concurrency=100, max_waiting=8, queue_timeout=60, request_timeout=600, batch_window=0)


def scheduler(*pools: Pool, policy: Policy = POLICY, steps: int = 4) -> Scheduler:
    engine = EngineConfig(pools=pools or (Pool(2, 64),), prefill_buckets=(16, 32), steps_per_dispatch=steps)
    return Scheduler(make_plan(SHAPE, engine, dtype="float32", dtype_bytes=4, memory_limit=2**40), policy, (EOS,))


def request(name: str, prompt: int = 5, **sampling) -> Request:
    return Request(name, tuple(range(48, 48 + prompt)), SamplingParams(**{"max_tokens": 6, **sampling}))


def next_token(tokens: list[int]) -> int:
    return hashlib.blake2b(repr(tokens).encode(), digest_size=4).digest()[0] % 40 + 8  # never the end token


class HashDevice:
    """Slots that hold tokens. The next token is a hash of what stands in the slot, nothing else."""

    def __init__(self) -> None:
        self.slots: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.active: dict[tuple[int, int], int] = {}

    def run(self, tick):
        for work in tick.prefills:
            chunk, held = work.chunk, self.slots[work.running.pool, work.running.slot]
            self.active.pop((work.running.pool, work.running.slot), None)
            del held[chunk.start :]
            held += work.running.request.prompt[chunk.start : chunk.start + chunk.count]
        return [(work, self._decode(work)) for work in tick.runs]

    def _decode(self, work):
        for running in work.admitted:
            at = (work.pool, running.slot)
            length = len(running.request.prompt)
            del self.slots[at][length - 1 :]
            self.slots[at].append(running.request.prompt[-1])
            self.active[at] = length + running.request.sampling.max_tokens
        emitted = {}
        for slot, _ in work.slots:
            at, new = (work.pool, slot), []
            for _ in range(work.steps):
                if at in self.active:
                    new.append(next_token(self.slots[at]))
                    self.slots[at].append(new[-1])
                    if len(self.slots[at]) >= self.active[at]:
                        del self.active[at]
            emitted[slot] = Emitted(tuple(new), (), finite=True)
        return emitted


def oracle(request: Request) -> list[int]:
    tokens = list(request.prompt)
    for _ in range(request.sampling.max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(request.prompt) :]


def play(machine: Scheduler, device: HashDevice, now: float = 0.0, flight=()):
    """Ticks until nothing is left, one dispatch ahead as the engine does it; returns tokens and last deltas."""
    tokens, last = defaultdict(list), {}
    for _ in range(500):
        if not machine.has_work and not flight:
            break
        tick = machine.schedule(now)
        before, flight = flight, device.run(tick)
        said = list(tick.ended) + [line for work, given in before for line in machine.deliver(work, given, now)]
        for running, delta in said:
            tokens[running.request.id] += delta.tokens
            last[running.request.id] = delta
        now += 0.01
    return tokens, last


def test_everyone_gets_what_is_theirs():
    machine = scheduler(Pool(2, 64), Pool(1, 128))
    requests = [request(str(index), prompt=1 + 7 * index, max_tokens=1 + index) for index in range(8)]
    for one in requests:
        machine.submit(one, seed=0, now=0.0)
    tokens, last = play(machine, HashDevice())
    assert {one.id: tokens[one.id] for one in requests} == {one.id: oracle(one) for one in requests}
    assert {delta.finish_reason for delta in last.values()} == {FinishReason.LENGTH}
    assert (machine.running, machine.waiting, machine.has_work, machine.cache_usage) == (0, 0, False, 0.0)


@pytest.mark.parametrize("seed", range(200))
def test_a_swarm_of_faults(seed):
    """Cancels, deadlines, failed steps at random: who is not hit gets the oracle's tokens, and slots come back."""
    dice = random.Random(seed)
    machine = scheduler(Pool(dice.randint(1, 3), 64), Pool(1, 128), steps=dice.randint(1, 5))
    device, flight, now = HashDevice(), [], 0.0
    tokens, last, requests, gone = defaultdict(list), {}, {}, set()
    for turn in range(300):
        now += dice.random() / 50
        if len(requests) < 25 and dice.random() < 0.3:
            deadline = now + 0.05 if dice.random() < 0.1 else None
            made = request(f"r{turn}", dice.randint(1, 60), max_tokens=dice.randint(1, 40))
            made = Request(made.id, made.prompt, made.sampling, deadline)
            try:
                machine.submit(made, seed=0, now=now)
                requests[made.id] = made
            except Overloaded:
                assert machine.waiting >= POLICY.max_waiting
        if requests and dice.random() < 0.05:
            victim = dice.choice(list(requests))
            gone.add(victim)
            machine.cancel(victim)
        if dice.random() < 0.01:
            flight, device = [], HashDevice()
            said = machine.fail_all(EngineError("a step failed"))
        else:
            tick = machine.schedule(now)
            before, flight = flight, device.run(tick)
            said = list(tick.ended) + [line for work, given in before for line in machine.deliver(work, given, now)]
        for running, delta in said:
            assert running.request.id not in gone
            assert running.request.id not in last
            tokens[running.request.id] += delta.tokens
            if delta.finish_reason is not None:
                last[running.request.id] = delta
        assert machine.running <= sum(pool.slots for pool in machine._plan.pools)
    more, ends = play(machine, device, now, flight)
    for name, part in more.items():
        tokens[name] += part
    last |= ends
    assert not machine.has_work
    assert all(
        pool.free == list(range(plan.slots)) for pool, plan in zip(machine._pools, machine._plan.pools, strict=True)
    )
    for name, made in requests.items():
        expected = oracle(made)
        assert tokens[name] == expected[: len(tokens[name])]
        if name in last and last[name].finish_reason is FinishReason.LENGTH:
            assert tokens[name] == expected
        else:
            assert name in gone or last[name].finish_reason is FinishReason.ERROR


def test_the_swarm_would_see_a_leak():
    """A device that leaves one token of the slot's last tenant behind gives somebody other tokens."""

    class Leaky(HashDevice):
        def _decode(self, work):
            for running in work.admitted:
                self.slots[work.pool, running.slot].insert(0, 1)
            return super()._decode(work)

    machine = scheduler()
    machine.submit(request("a", prompt=20), seed=0, now=0.0)
    tokens, _ = play(machine, Leaky())
    assert tokens["a"] != oracle(request("a", prompt=20))


def test_the_queue_is_bounded_and_first_come_first_served():
    machine = scheduler(Pool(1, 64))
    for index in range(9):
        machine.submit(request(str(index)), seed=0, now=float(index))
        if index == 0:
            machine.schedule(0.0)
    assert (machine.running, machine.waiting) == (1, 8)
    with pytest.raises(Overloaded, match="8 requests are waiting"):
        machine.submit(request("late"), seed=0, now=9.0)
    machine.cancel("0")
    tick = machine.schedule(9.0)
    assert [work.running.request.id for work in tick.prefills] == ["1"]


def test_free_slots_are_no_queue():
    for most in (0, 1, 3):
        machine = scheduler(Pool(8, 64), policy=Policy(100, most, 60, 600, 0))
        for index in range(8 + most):
            machine.submit(request(str(index)), seed=0, now=0.0)
        with pytest.raises(Overloaded):
            machine.submit(request("late"), seed=0, now=0.0)
        machine.schedule(0.0)
        assert (machine.running, machine.waiting, machine.capacity) == (8, most, 8 + most)


def test_a_pool_with_a_queue_does_not_starve_another():
    machine = scheduler(Pool(2, 64), Pool(1, 128), policy=Policy(2, 50, 60, 600, 0))
    device, flight = HashDevice(), []
    for index in range(20):
        machine.submit(request(f"short-{index}", max_tokens=3), seed=0, now=index / 100)
        if index == 3:
            machine.submit(request("long", prompt=60, max_tokens=20), seed=0, now=0.035)
    order = []
    for turn in range(200):
        tick = machine.schedule(1.0 + turn / 100)
        order += [running.request.id for work in tick.runs for running in work.admitted]
        before, flight = flight, device.run(tick)
        for work, given in before:
            machine.deliver(work, given, 1.0 + turn / 100)
    assert not machine.has_work
    assert order.index("long") <= 6


def test_times_run_out():
    machine = scheduler(Pool(1, 64), policy=Policy(1, 8, queue_timeout=5, request_timeout=50, batch_window=0))
    machine.submit(request("runs"), seed=0, now=0.0)
    machine.submit(request("waits"), seed=0, now=0.0)
    machine.submit(Request("hurries", (1, 2), SamplingParams(max_tokens=4), deadline=2.0), seed=0, now=0.0)
    machine.schedule(0.0)
    ended = {running.request.id: delta.error for running, delta in machine.schedule(2.0).ended}
    assert [type(error) for error in ended.values()] == [DeadlineExceeded]
    assert isinstance(machine.schedule(5.0).ended[0][1].error, QueueTimeout)
    assert isinstance(machine.schedule(50.0).ended[0][1].error, DeadlineExceeded)
    assert not machine.has_work


def test_an_idle_engine_waits_for_company():
    machine = scheduler(Pool(3, 64), policy=Policy(3, 8, 60, 600, batch_window=0.5))
    machine.submit(request("a"), seed=0, now=0.0)
    assert not machine.schedule(0.1)
    machine.submit(request("b"), seed=0, now=0.2)
    tick = machine.schedule(0.5)
    assert [work.running.request.id for work in tick.prefills] == ["a", "b"]
    full = scheduler(Pool(1, 64), policy=Policy(1, 8, 60, 600, batch_window=0.5))
    full.submit(request("a"), seed=0, now=0.0)
    assert full.schedule(0.0)  # no room for company: nothing to wait for


def test_concurrency_is_capped():
    machine = scheduler(Pool(4, 64), policy=Policy(2, 8, 60, 600, 0))
    for name in "abc":
        machine.submit(request(name), seed=0, now=0.0)
    machine.schedule(0.0)
    assert (machine.running, machine.waiting) == (2, 1)


def test_newcomers_are_not_kept_waiting_by_long_dispatches():
    machine = scheduler(Pool(2, 64))
    machine.submit(request("a", max_tokens=30), seed=0, now=0.0)
    steps = [machine.schedule(0.0).runs[0].steps for _ in range(2)]
    machine.submit(request("b"), seed=0, now=0.1)
    steps += [machine.schedule(0.1).runs[0].steps for _ in range(2)]
    assert steps == [1, 4, 1, 4]


def test_long_prompts_leave_room_between_their_chunks():
    machine = scheduler(Pool(2, 128))
    machine.submit(request("short", prompt=1, max_tokens=20), seed=0, now=0.0)
    machine.schedule(0.0)
    machine.submit(Request("long", (8,) * 101, SamplingParams(max_tokens=2)), seed=0, now=0.1)
    ticks = [machine.schedule(0.1) for _ in range(4)]
    assert [[work.chunk.bucket for work in tick.prefills] for tick in ticks] == [[32], [32], [32], [16]]
    assert [len(tick.runs[0].slots) for tick in ticks] == [1, 1, 1, 2]


def test_a_stop_token_ends_the_text_unless_ignored():
    for ignore in (False, True):
        machine = scheduler()
        machine.submit(request("a", ignore_eos=ignore), seed=0, now=0.0)
        (work,) = machine.schedule(0.0).runs
        ((_, delta),) = machine.deliver(work, {0: Emitted((9, EOS), (), True)}, 0.1)
        assert delta.finish_reason == (None if ignore else FinishReason.STOP)
        machine.cancel("a")


def test_a_row_of_nonsense_ends_with_an_error():
    machine = scheduler()
    machine.submit(request("a"), seed=0, now=0.0)
    (work,) = machine.schedule(0.0).runs
    ((_, delta),) = machine.deliver(work, {0: Emitted((), (), finite=False)}, 0.1)
    assert isinstance(delta.error, NumericalError)
    assert not machine.has_work


def test_nothing_to_generate_is_done_at_once():
    machine = scheduler()
    machine.submit(request("a", max_tokens=0), seed=0, now=0.0)
    ((running, delta),) = machine.schedule(0.0).ended
    assert (running.request.id, delta.finish_reason) == ("a", FinishReason.LENGTH)
    assert not machine.has_work


def test_ids_are_unique_and_the_context_is_finite():
    machine = scheduler()
    machine.submit(request("a"), seed=0, now=0.0)
    with pytest.raises(InvalidRequest, match="in use"):
        machine.submit(request("a"), seed=0, now=0.0)
    with pytest.raises(ContextLengthExceeded, match="make 70"):
        machine.submit(request("b", prompt=10, max_tokens=60), seed=0, now=0.0)


BAD = {
    "max_tokens": (-1, 64),
    "min_tokens": (-1, 7),
    "temperature": (-0.1, float("nan"), float("inf")),
    "top_k": (-1, 2**31),
    "top_p": (0.0, 1.1, float("nan")),
    "min_p": (-0.1, 1.1),
    "repetition_penalty": (0.0, float("inf")),
    "presence_penalty": (-101.0, float("nan")),
    "frequency_penalty": (101.0,),
    "logprobs": (-1, 21),
    "seed": (-1, 2**63),
    "stop_token_ids": ((-1,), (200,), tuple(range(17))),
    "logit_bias": (((200, 1.0),), ((-1, 1.0),), ((3, float("nan")),), tuple((token, 0.0) for token in range(40)) * 8),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_what_the_device_would_get_wrong_silently_is_refused(name, value):
    with pytest.raises(InvalidRequest) as caught:
        check(request("a", **{name: value}), scheduler().limits)
    assert caught.value.param == name


@pytest.mark.parametrize("prompt", [(), (-1,), (200,), (2**31,), (1,) * 64])
def test_wrong_prompts_are_refused(prompt):
    with pytest.raises(InvalidRequest) as caught:
        check(Request("a", prompt), scheduler().limits)
    assert caught.value.param == "prompt"
