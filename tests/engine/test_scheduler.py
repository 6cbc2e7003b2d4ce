"""The scheduler's rules, one by one; `tests/rigs/simulate.py` tries them all together."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from jaxserve.config import Pool
from jaxserve.engine.request import Account, FinishReason, Pass, Request, SamplingParams, check
from jaxserve.engine.scheduler import Policy, Scheduler
from jaxserve.engine.work import Emitted
from jaxserve.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    NumericalError,
    Overloaded,
    QueueTimeout,
)
from jaxserve.testing import hash_plan

EOS = 7
POLICY = Policy(max_concurrency=100, max_waiting=8, queue_timeout=60, request_timeout=600, batch_window=0)


def scheduler(*pools: Pool, policy: Policy = POLICY, steps: int = 4) -> Scheduler:
    return Scheduler(hash_plan(*pools, steps_per_dispatch=steps), policy, (EOS,))


def request(name: str, prompt: int = 5, **sampling) -> Request:
    return Request(name, tuple(range(48, 48 + prompt)), SamplingParams(**{"max_tokens": 6, **sampling}))


def play(machine: Scheduler, ticks: int = 300, start: float = 0.0) -> list[str]:
    """Ticks until nothing is left, each step giving one token; returns ids in the order of admission."""
    order = []
    for turn in range(ticks):
        now = start + turn / 100
        tick = machine.schedule(now)
        for work in tick.runs:
            order += [running.request.id for running in work.admitted]
            given = {
                slot: Emitted((9,) * min(work.steps, one.request.sampling.max_tokens - len(one.generated)), (), True)
                for slot, one in work.slots
            }
            machine.deliver(work, given, now)
    assert not machine.has_work
    return order


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
    for index in range(20):
        machine.submit(request(f"short-{index}", max_tokens=3), seed=0, now=index / 100)
        if index == 3:
            machine.submit(request("long", prompt=60, max_tokens=20), seed=0, now=0.035)
    assert play(machine, start=1.0).index("long") <= 6


def of(tenant: str, name: str, **sampling) -> Request:
    return dataclasses.replace(request(name, **sampling), tenant=tenant)


def test_who_had_least_is_next():
    machine = scheduler(Pool(2, 64), policy=Policy(2, 100, 60, 600, 0))
    for index in range(20):
        machine.submit(of("greedy", f"g{index}"), seed=0, now=0.0)
    for index in range(4):
        machine.submit(of("quiet", f"q{index}"), seed=0, now=1.0)
    first = play(machine, start=1.0)[:10]
    assert Counter(name[0] for name in first)["q"] == 4


def test_when_the_queue_is_full_the_longest_line_gives_way():
    machine = scheduler(Pool(1, 64), policy=Policy(1, 4, 60, 600, 0))
    for index in range(5):
        machine.submit(of("greedy", f"g{index}"), seed=0, now=float(index))
    with pytest.raises(Overloaded):
        machine.submit(of("greedy", "g5"), seed=0, now=6.0)
    ((gone, delta),) = machine.submit(of("quiet", "q0"), seed=0, now=7.0)
    assert (gone.request.id, type(delta.error)) == ("g4", Overloaded)
    machine.submit(of("quiet", "q1"), seed=0, now=8.0)
    with pytest.raises(Overloaded):
        machine.submit(of("quiet", "q2"), seed=0, now=9.0)
    assert machine.waiting == 5  # one of them has a free slot


def test_a_share_leaves_slots_for_others():
    machine = scheduler(Pool(4, 64), policy=Policy(4, 100, 60, 600, 0, max_tenant_share=0.75))
    for index in range(9):
        machine.submit(of("greedy", f"g{index}"), seed=0, now=0.0)
    machine.schedule(0.0)
    assert (machine.running, machine.waiting) == (3, 6)
    machine.submit(of("quiet", "q"), seed=0, now=0.1)
    tick = machine.schedule(0.1)
    assert machine.running == 4
    assert "q" in [work.running.request.id for work in tick.prefills]


def test_a_share_is_one_of_each_pool():
    machine = scheduler(Pool(4, 64), Pool(4, 128), policy=Policy(8, 100, 60, 600, 0, max_tenant_share=0.75))
    for index in range(9):
        machine.submit(of("greedy", f"g{index}"), seed=0, now=0.0)
    machine.schedule(0.0)
    assert machine.running == 3


def test_a_deadline_that_cannot_be_met_costs_nothing():
    machine = scheduler(Pool(2, 64))
    machine.submit(request("slow", max_tokens=9), seed=0, now=0.0)
    (work,) = machine.schedule(0.0).runs
    machine.deliver(work, {0: Emitted((9,), (), True)}, 5.0)  # for a prompt that fits into one tick's reading
    machine.submit(dataclasses.replace(request("late"), deadline=9.0), seed=0, now=5.0)
    machine.submit(dataclasses.replace(request("fine", prompt=30), deadline=11.0), seed=0, now=5.0)
    machine.submit(dataclasses.replace(request("long", prompt=40), deadline=11.0), seed=0, now=5.0)
    tick = machine.schedule(5.0)
    assert [(running.request.id, type(delta.error)) for running, delta in tick.ended] == [("late", DeadlineExceeded)]
    assert [work.running.request.id for work in tick.prefills] == ["fine"]
    machine.cancel("fine")
    tick = machine.schedule(5.0)
    assert [(running.request.id, type(delta.error)) for running, delta in tick.ended] == [("long", DeadlineExceeded)]


def test_one_slow_moment_does_not_turn_deadlines_away_for_ever():
    machine = scheduler(Pool(2, 64))
    machine.submit(request("slow"), seed=0, now=0.0)
    (work,) = machine.schedule(0.0).runs
    machine.deliver(work, {0: Emitted((9,) * 6, (), True)}, 5.0)
    machine.submit(dataclasses.replace(request("next"), deadline=7.0), seed=0, now=5.0)
    assert [running.request.id for running in machine.schedule(5.0).runs[0].admitted] == ["next"]


def test_the_wait_is_estimated():
    machine = scheduler(Pool(2, 64), policy=Policy(2, 100, 60, 600, 0))
    assert machine.retry_after() == pytest.approx(0.1)
    machine.submit(request("a"), seed=0, now=0.0)
    (work,) = machine.schedule(0.0).runs
    machine.deliver(work, {0: Emitted((9,) * 6, (), True)}, 4.0)
    for index in range(9):
        machine.submit(request(str(index)), seed=0, now=4.0)
    assert machine.retry_after() == pytest.approx(10 * 4.0 / 2)


def test_a_restart_reads_everything_again_and_the_prompt_as_before():
    machine = scheduler(Pool(2, 64))
    machine.submit(request("a", prompt=20, max_tokens=30), seed=0, now=0.0)
    before = machine.schedule(0.0)
    machine.deliver(before.runs[0], {0: Emitted((9,) * 17, (), True)}, 0.1)
    (running,) = machine.restart()
    tick = machine.schedule(0.2)
    chunks = [work.chunk for work in tick.prefills]
    while not tick.runs:
        tick = machine.schedule(0.2)
        chunks += [work.chunk for work in tick.prefills]
    own = [work.chunk for work in before.prefills]
    assert chunks[-len(own) :] == own
    assert {at for chunk in chunks for at in range(chunk.start, chunk.start + chunk.bucket)} >= set(range(37))
    assert tick.runs[0].admitted == (running,)


def test_a_tenant_ends_alone():
    machine = scheduler(Pool(1, 64))
    for tenant in "abab":
        machine.submit(of(tenant, f"{tenant}{machine.arrivals}"), seed=0, now=0.0)
    machine.schedule(0.0)
    gone = machine.end_tenant("a", EngineError("no"))
    assert [running.request.id for running, _ in gone] == ["a0", "a2"]
    assert (machine.running, machine.waiting) == (0, 2)


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


def in_group(tenant: str, name: str, prompt: int = 40) -> Request:
    return dataclasses.replace(of(tenant, name, prompt=prompt), group=f"{tenant}-group")


def test_a_prompt_that_another_one_reads_is_copied_and_costs_its_tenant_nothing():
    machine = scheduler(Pool(4, 64), policy=Policy(4, 100, 60, 600, 0))
    for index in range(3):
        machine.submit(in_group("ann", f"a{index}"), seed=index, now=float(index))
    machine.submit(of("bob", "b", prompt=40), seed=0, now=3.0)
    ticks = [machine.schedule(4.0 + turn) for turn in range(4)]
    read = [[work.running.request.id for work in tick.prefills] for tick in ticks]
    assert {name for names in read for name in names} == {"a0", "b"}
    copies = [[(work.source.request.id, work.running.request.id) for work in tick.forks] for tick in ticks]
    (turn,) = [turn for turn, copied in enumerate(copies) if copied]
    assert copies[turn] == [("a0", "a1"), ("a0", "a2")]
    (run,) = ticks[turn].runs
    assert [one.request.id for one in run.admitted] == ["a0", "a1", "a2"]
    assert machine._queue._service == {"ann": 40, "bob": 40}


def test_who_inherits_the_reading_pays_for_it():
    machine = scheduler(Pool(4, 64), policy=Policy(4, 100, 60, 600, 0))
    for index in range(3):
        machine.submit(in_group("ann", f"a{index}"), seed=index, now=float(index))
    machine.submit(of("bob", "b"), seed=0, now=3.0)
    machine.schedule(4.0)
    machine.cancel("a0")
    tick = machine.schedule(5.0)
    assert {work.running.request.id for work in tick.prefills} >= {"a1"}
    assert machine._queue._service == {"ann": 80, "bob": 5}
    while not tick.forks:
        tick = machine.schedule(6.0)
    assert [(work.source.request.id, work.running.request.id) for work in tick.forks] == [("a1", "a2")]


def test_who_waits_for_a_reader_has_deadlines_of_its_own():
    machine = scheduler(Pool(4, 64))
    machine.submit(in_group("ann", "a0"), seed=0, now=0.0)
    machine.submit(dataclasses.replace(in_group("ann", "a1"), deadline=2.0), seed=0, now=0.0)
    machine.schedule(1.0)
    ended = machine.schedule(3.0).ended
    assert [(one.request.id, type(delta.error)) for one, delta in ended] == [("a1", DeadlineExceeded)]
    assert not any(machine.schedule(4.0).forks for _ in range(3))


def test_nobody_is_woken_for_a_canvas_but_who_asked():
    machine = scheduler(Pool(3, 64))
    for name, more in (("plain", {}), ("asks", {"provisional": True}), ("traced", {"traced": True})):
        machine.submit(dataclasses.replace(request(name, prompt=1), **more), seed=0, now=0.0)
    (work,) = machine.schedule(0.0).runs
    one = Pass((), Account(passes=1), (5, 6))
    given = {
        slot: Emitted((), (), True, Account(passes=1), (5, 6), (one,) if running.request.traced else ())
        for slot, running in work.slots
    }
    told = {running.request.id: delta for running, delta in machine.deliver(work, given, 0.0)}
    assert set(told) == {"asks", "traced"}
    assert (told["asks"].canvas, told["asks"].passes) == ((5, 6), ())
    assert (told["traced"].canvas, told["traced"].passes) == ((), (one,))
    after = machine.deliver(work, {slot: Emitted((9,), (), True, Account(passes=2)) for slot, _ in work.slots}, 0.0)
    assert {delta.account.passes for _, delta in after} == {3}
