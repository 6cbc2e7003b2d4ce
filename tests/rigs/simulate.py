"""The engine in a simulated world: one seed is one history, and a history that goes wrong can be played again.

Real: scheduler, engine, recovery, quarantine, crossing and streams. Simulated: clock, ids, seeds, the clients, the
order in which the two sides of the crossing get their turn, and the device, whose next token is a hash of what stands
in the slot. Each seed draws its own plan, policy and mixture of faults. There is no disk on this way.

Whenever the engine has had its turn the slots and the queue must add up; at the end every request must have ended
exactly once, and with the tokens that it would have been given alone.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import os
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any
from unittest import mock

from jaxserve.config import Pool
from jaxserve.engine import sharing
from jaxserve.engine.canary import Canary
from jaxserve.engine.crossing import Crossing, Stream
from jaxserve.engine.engine import Engine
from jaxserve.engine.request import Delta, FinishReason, Request, SamplingParams
from jaxserve.engine.scheduler import Policy
from jaxserve.engine.work import ForkWork, Running
from jaxserve.errors import (
    DeadlineExceeded,
    DeviceFault,
    EngineError,
    Forbidden,
    JaxserveError,
    NumericalError,
    Overloaded,
    Quarantined,
    QueueTimeout,
    ShuttingDown,
)
from jaxserve.plan import Plan, PoolPlan
from jaxserve.testing import HashDevice, hash_plan, hash_tokens
from tests.rigs.verdict import arguments, report

VOCABULARY, EOS = 211, 7
POISON, POISON_PREFILL, NONE = 1, 2, 3  # tokens that make a step fail, a chunk fail, a number that is none
EVENTS = 300
USUAL = {"submit": 2.0, "turn": 6.0, "hear": 5.0, "read": 4.0}
RARE = {"drain": 0.01, "revoke": 0.05, "nap": 0.02, "cancel": 0.5, "pause": 0.5, "shake": 0.1, "break": 0.02}
EVENTS_OF_A_SWARM = (*USUAL, *RARE)
TENANTS = ("", "ann", "bob", "cat")


class Violation(AssertionError):
    """Something that must never be so."""


def must(condition: object, what: str) -> None:
    """Holds, or the history is a finding."""
    if not condition:
        raise Violation(what)


@dataclasses.dataclass
class Client:
    """Somebody who asked, and what they have heard."""

    request: Request
    stream: Stream
    seed: int
    poisoned: bool
    slow: bool
    tokens: list[int] = dataclasses.field(default_factory=list)
    last: Delta | None = None
    gone: bool = False

    def read(self) -> None:
        """Takes what is there."""
        delta = self.stream.take()
        if delta is None or self.gone:
            return
        must(self.last is None, f"{self.request.id} hears something after its end")
        self.tokens += delta.tokens
        if delta.finish_reason is not None:
            self.last = delta


class World:
    """One history.

    Args:
        dice: what decides everything: a seed's generator, or one that hypothesis can shrink.
        device: what stands in for a device.
    """

    def __init__(self, dice: random.Random, device: type[HashDevice] = HashDevice) -> None:
        self.dice = dice
        self.now = dice.uniform(0, 1e6)
        self.plan = _plan(dice)
        self.policy = _policy(dice, sum(pool.slots for pool in self.plan.pools))
        self.device = device(self.plan, self._fault, lambda text: NONE not in text)
        self.engine = Engine(
            self.device, self.policy, eos=(EOS,), clock=lambda: self.now, draw_seed=lambda: dice.getrandbits(63)
        )
        self.crossing = Crossing(self.engine, lambda: None)
        self.wire: deque[list[tuple[str, Delta]]] = deque()  # said, but not heard yet
        self.ended: set[str] = set()  # ids whose end was said
        self.clients: list[Client] = []
        self.seen: Counter[str] = Counter()
        self.shaken = False  # a fault that nobody is to blame for has just happened, and none follows at once
        self.breaks = dice.random() < 0.03
        self.broken = False
        self.revoked = ""
        self.closed = False  # the engine's side is over
        self.weights = [*USUAL.values(), *(often * dice.choice((0, 1, 2)) for often in RARE.values())]
        self.transient = False
        probe = Request("canary", (9, 8), SamplingParams(max_tokens=3, temperature=0.0))
        self.engine.canary = Canary(probe, tuple(hash_tokens(probe, 0, VOCABULARY, (EOS,))))

    def play(self) -> Counter[str]:
        """The whole history; returns how often what happened."""
        for _ in range(EVENTS):
            self.happen(self.dice.choices(EVENTS_OF_A_SWARM, self.weights)[0])
        self.settle()
        return self.seen

    def happen(self, kind: str) -> None:
        """One event, and what must hold after it."""
        getattr(self, "_" + kind)()
        if kind == "turn" and not self.closed:  # nothing else touches the engine: what is asked lies in letters
            self._check()

    # --- events -------------------------------------------------------------------------------------------------------

    def _submit(self) -> None:
        """One request, or several in a group: of the same prompt or nearly the same."""
        request, marker = self._drawn()
        dice = self.dice
        if dice.random() < 0.8:
            self._send(request, marker)
            return
        group = f"g{len(self.clients)}"
        for _ in range(dice.randint(2, 4)):
            sampling, prompt = request.sampling, request.prompt
            if dice.random() < 0.1:
                sampling = dataclasses.replace(sampling, max_tokens=min(1, sampling.max_tokens))
            if not marker and dice.random() < 0.1:
                prompt = (*prompt[:-1], 10 + dice.randrange(10))
            sampling = dataclasses.replace(sampling, seed=dice.getrandbits(40))
            self._send(dataclasses.replace(request, prompt=prompt, sampling=sampling, group=group), marker)

    def _drawn(self) -> tuple[Request, bool]:
        """A request, and whether something goes wrong with it."""
        dice = self.dice
        longest = max(pool.length for pool in self.plan.pools)
        prompt = [dice.randrange(10, VOCABULARY) for _ in range(dice.randint(1, longest * 2 // 3))]
        marker = dice.choices((0, POISON, POISON_PREFILL, NONE), (40, 1, 1, 1))[0]
        if marker == POISON_PREFILL and len(prompt) == 1:
            marker = POISON  # the last token of a prompt is read by a step
        if marker:
            prompt[dice.randrange(max(1, len(prompt) - 1))] = marker
        sampling = SamplingParams(
            max_tokens=min(longest - len(prompt), dice.choice((0, 1, 5, 5, 10, 20, 99))),
            seed=dice.getrandbits(40),
            logprobs=dice.choice((None, 0)),
            ignore_eos=dice.random() < 0.3,
            stop_token_ids=(11,) if dice.random() < 0.2 else (),
        )
        deadline = self.now + dice.uniform(0.01, 2) if dice.random() < 0.1 else None
        tenant = dice.choice(TENANTS) if dice.random() < 0.5 else TENANTS[-1]
        return Request("", tuple(prompt), sampling, deadline, tenant), bool(marker)

    def _send(self, request: Request, marker: bool) -> None:
        dice, number, sampling = self.dice, len(self.clients) + self.seen["refused"], request.sampling
        request = dataclasses.replace(request, id=f"r{number}")
        try:
            stream = self.crossing.submit(request)
        except (Overloaded, ShuttingDown, Quarantined, EngineError) as error:
            self.seen["refused"] += 1
            self.seen[type(error).__name__] += 1
            must(not isinstance(error, Quarantined) or marker, "an innocent request is in quarantine")
            must(not isinstance(error, ShuttingDown) or self.crossing.closing, "refused by an open engine")
            return
        assert sampling.seed is not None
        self.clients.append(Client(request, stream, sampling.seed, marker, slow=dice.random() < 0.1))

    def _turn(self) -> None:
        """The engine's side of the crossing."""
        if self.closed:
            return
        self.now += self.dice.uniform(0.0005, 0.02)
        self._say(self.crossing.deliver_letters())
        try:
            self._say(self.engine.tick())
        except DeviceFault as error:
            must(self.broken, "the engine gives up a device that works")
            self.crossing.closing = error
            self._say([line for line in self.crossing.everyone(error) if line[0] not in self.ended])
            self.closed = True
            self.seen["gave up"] += 1

    def _say(self, said: list[tuple[str, Delta]]) -> None:
        if said:
            self.wire.append(said)
        for request_id, delta in said:
            must(request_id not in self.ended, f"{request_id} is told something after its end")
            if delta.tokens and self.device.lost is None:
                self.shaken = False
            if delta.finish_reason is not None:
                self.ended.add(request_id)
                self.seen[type(delta.error).__name__ if delta.error else str(delta.finish_reason)] += 1

    def _hear(self) -> None:
        if self.wire:
            self.crossing.publish(self.wire.popleft())

    def _hear_all(self) -> None:
        while self.wire:
            self._hear()

    def _read(self) -> None:
        for client in self.clients:
            if not client.slow or self.dice.random() < 0.05:
                client.read()

    def _cancel(self) -> None:
        if self.clients:
            client = self.dice.choice(self.clients)
            if client.last is None:
                client.gone = True
                client.stream.cancel(self.dice.choice((FinishReason.CANCELLED, FinishReason.STOP)))
                self.seen["cancelled"] += 1

    def _revoke(self) -> None:
        self.revoked = self.dice.choice(TENANTS[1:])
        self.crossing.cancel_tenant(self.revoked, Forbidden("the key was revoked"))
        self.seen["revoked"] += 1

    def _drain(self) -> None:
        self.crossing.closing = self.crossing.closing or ShuttingDown("the server is shutting down")
        self.seen["drained"] += 1

    def _pause(self) -> None:
        self.now += self.dice.uniform(0, 0.5)

    def _nap(self) -> None:
        self.now += self.dice.uniform(0, 2 * self.policy.queue_timeout)

    def _shake(self) -> None:
        self.transient = True

    def _break(self) -> None:
        self.broken = self.broken or self.breaks

    # --- the device's faults ------------------------------------------------------------------------------------------

    def _fault(self, kind: str, texts: Sequence[Sequence[int]]) -> Exception | None:
        if self.broken:
            return RuntimeError("INTERNAL: the device is gone")
        if kind == "run" and any(POISON in text for text in texts):
            return RuntimeError("INTERNAL: poisoned")
        if kind == "prefill" and any(POISON_PREFILL in text for text in texts):
            return ValueError("INTERNAL: poisoned chunk")
        if self.transient and not self.shaken:
            self.transient, self.shaken = False, True
            self.seen["transient"] += 1
            return RuntimeError("RESOURCE_EXHAUSTED: once")
        return None

    # --- what must hold -----------------------------------------------------------------------------------------------

    def _check(self) -> None:
        scheduler = self.engine._scheduler
        held = []
        for index, (pool, plan) in enumerate(zip(scheduler._pools, self.plan.pools, strict=True)):
            must(sorted([*pool.free, *pool.running]) == list(range(plan.slots)), "slots are lost or given twice")
            must(all(one.slot == slot and one.pool == index for slot, one in pool.running.items()), "a slot is wrong")
            held += pool.running.values()
        waiting = list(scheduler._queue)
        must(len(held) <= self.policy.max_concurrency, "more run than may")
        must(all(one.slot < 0 for one in waiting), "somebody waits with a slot")
        here = sorted(one.request.id for one in (*held, *waiting))
        must(here == sorted(scheduler._by_id), "a request is in two places, or in none")
        extra = sum(name.startswith("canary") for name in here)
        must(len(scheduler._unseated()) <= self.policy.max_waiting + extra, "the queue is longer than it may be")
        must(not set(here) & self.ended, "a request that has ended is still here")
        for tenant, count in Counter(one.request.tenant for one in held).items():
            most = self.policy.share_of(self.policy.max_concurrency)
            must(count <= most, f"tenant {tenant!r} holds more than its share")
        must(not self.engine.degraded or self.broken, "the numbers are doubted, but they are right")

    def settle(self) -> None:
        """Nothing new comes; everything here must end."""
        for _ in range(3000):
            if not (self.engine.has_work or self.crossing.has_letters or self.wire) or self.closed:
                break
            self._turn()
            if not self.closed:
                self._check()
            self._hear_all()
        self._hear_all()
        must(self.closed or not self.engine.has_work, "work is left that never ends")
        must(self.crossing.streams == 0, "a stream is left over")
        must(not self.crossing._tenants, "a tenant is still counted")
        for client in self.clients:
            client.read()
            self._check_client(client)

    def _check_client(self, client: Client) -> None:
        name, request = client.request.id, client.request
        stop_ids = self.engine._scheduler.stop_ids(request)
        expected = list(hash_tokens(request, client.seed, VOCABULARY, stop_ids))
        must(client.tokens == expected[: len(client.tokens)], f"{name} got tokens that are not its own")
        if client.gone:
            return
        must(client.last is not None, f"{name} never ended")
        assert client.last is not None
        error = client.last.error
        if error is None:
            must(client.tokens == expected, f"{name} ended before its time")
            must(not client.poisoned or not expected, f"{name} is poisoned and survived")
            return
        may: tuple[type[JaxserveError], ...] = (Overloaded, QueueTimeout, DeadlineExceeded, ShuttingDown, Forbidden)
        if client.poisoned:
            may += (EngineError, Quarantined)
        if self.closed:
            may += (DeviceFault,)
        must(isinstance(error, may), f"{name} ended with {type(error).__name__} and nothing was wrong with it")
        must(not isinstance(error, Forbidden) or self.seen["revoked"], f"{name} was thrown out")
        must(not isinstance(error, NumericalError) or NONE in request.prompt, f"{name} has a number that is none")


def _plan(dice: random.Random) -> Plan:
    pools = tuple(Pool(dice.randint(1, 6), dice.choice((16, 32, 64))) for _ in range(dice.randint(1, 3)))
    buckets = dice.choice(((8,), (8, 16), (16, 32)))
    return hash_plan(*pools, vocab_size=VOCABULARY, prefill_buckets=buckets, steps_per_dispatch=dice.randint(1, 5))


def _policy(dice: random.Random, slots: int) -> Policy:
    return Policy(
        max_concurrency=dice.choice((slots, slots, dice.randint(1, slots))),
        max_waiting=dice.choice((0, 2, 8, 100)),
        queue_timeout=dice.choice((0.3, 60.0)),
        request_timeout=dice.choice((1.0, 600.0)),
        batch_window=dice.choice((0.0, 0.0, 0.05)),
        max_tenant_share=dice.choice((1.0, 1.0, 0.5)),
        quarantine=dice.choice((0.0, 600.0)),
    )


# --- planted mistakes: the simulator must see them --------------------------------------------------------------------


class Leaky(HashDevice):
    """One token of a slot's last tenant stays in the next one's cache."""

    def prefill(self, pool, slot, chunk, tokens):  # type: ignore[no-untyped-def]
        """Skips the first entry of a chunk."""
        before = list(self.pools[pool][slot].entries)
        super().prefill(pool, slot, chunk, tokens)
        if before[chunk.start]:
            self.pools[pool][slot].entries[chunk.start : chunk.start + chunk.count] = before[
                chunk.start : chunk.start + chunk.count
            ]


class Short(HashDevice):
    """A copy lacks its last position."""

    def fork(self, pool, source, target):  # type: ignore[no-untyped-def]
        """Leaves what stood there before."""
        before = list(self.pools[pool][target].entries)
        super().fork(pool, source, target)
        held = self.pools[pool][target]
        held.entries[held.length - 1] = before[held.length - 1]


class Unscrubbed(HashDevice):
    """What is no number stays in the slot."""

    def scrub(self, pool, slot):  # type: ignore[no-untyped-def]
        """Forgets to."""


def _forgetful(self: PoolPlan, prompt: int, known: int) -> tuple[object, ...]:
    """A restart that reads the prompt only: what was generated is not put back."""
    return self.chunks(prompt - 1)


def _mute(self: Stream, delta: Delta) -> None:
    """A stream that loses what comes while something else waits for its reader."""
    if not self._deltas:
        Stream_put(self, delta)
    elif delta.finish_reason is not None:
        self._deltas.clear()
        Stream_put(self, delta)


Stream_put = Stream.put


def _late(held: Iterable[Running]) -> tuple[ForkWork, ...]:
    """Copies of who has begun to write already."""
    works = [ForkWork(one.source, one) for one in held if one.source is not None and one.source.generated]
    for work in works:
        work.running.source = None
    return tuple(works)


PLANTED = {
    "a copy of a slot is a position short": lambda seed: World(random.Random(seed), Short).play(),
    "a slot is copied too late": lambda seed: _patched(seed, sharing, "due", _late),
    "a token of the last tenant stays in the slot": lambda seed: World(random.Random(seed), Leaky).play(),
    "a slot is not scrubbed": lambda seed: World(random.Random(seed), Unscrubbed).play(),
    "a restart forgets what was generated": lambda seed: _patched(seed, PoolPlan, "chunks_again", _forgetful),
    "a slow reader loses tokens": lambda seed: _patched(seed, Stream, "put", _mute),
}


def _patched(seed: int, owner: Any, name: str, value: object) -> Counter[str]:
    with mock.patch.object(owner, name, value):
        return World(random.Random(seed)).play()


# --- many histories ---------------------------------------------------------------------------------------------------


def run(seeds: Sequence[int], planted: str = "") -> tuple[Counter[str], list[tuple[int, str]]]:
    """Plays histories; returns what happened in all of them, and the seeds that went wrong."""
    import logging

    logging.disable(logging.CRITICAL)
    seen: Counter[str] = Counter()
    wrong = []
    for seed in seeds:
        try:
            seen += PLANTED[planted](seed) if planted else World(random.Random(seed)).play()
        except Exception as error:  # noqa: BLE001 - any exception is a finding
            wrong.append((seed, f"{type(error).__name__}: {error}"))
    return seen, wrong


def run_all(count: int, first: int, planted: str = "") -> tuple[Counter[str], list[tuple[int, str]]]:
    """The same on all cores, with progress."""
    batches = [range(at, min(at + 100, first + count)) for at in range(first, first + count, 100)]
    seen: Counter[str] = Counter()
    wrong: list[tuple[int, str]] = []
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), context) as workers:
        for done, (part, found) in enumerate(workers.map(run, batches, [planted] * len(batches)), 1):
            seen += part
            wrong += found
            if sys.stderr.isatty() or done % 10 == 0:
                print(f"\r{done * 100:,} of {count:,} seeds, {len(wrong)} violations", end="", file=sys.stderr)
    print(file=sys.stderr)
    return seen, wrong


def main() -> None:
    """``--seeds`` histories, or one with ``--replay``."""
    number = {"type": int}
    args = arguments(__doc__, seeds=number | {"default": 10_000}, first=number | {"default": 0}, replay=number)
    if args.replay is not None:
        print(World(random.Random(args.replay)).play())
        return
    count = 200 if args.quick else args.seeds
    began = time.monotonic()
    seen, wrong = run_all(count, args.first)
    for seed, what in wrong[:10]:
        print(f"seed {seed}: {what}   (python -m tests.rigs.simulate --replay {seed})")
    caught = {name: len(run_all(200, 0, name)[1]) for name in PLANTED}
    for name, found in caught.items():
        print(f"planted: {name}: found by {found} of 200 seeds")
    for what, often in sorted(seen.items()):
        print(f"{often:>9,} {what}")
    details = {
        "seeds": [args.first, args.first + count],
        "violations": len(wrong),
        "planted_found_by_of_200": caught,
        "seen": dict(sorted(seen.items())),
        "seconds": round(time.monotonic() - began),
    }
    planted = f"{sum(map(bool, caught.values()))} of {len(caught)} planted mistakes found"
    figure = f"{count:,} seeds, {len(wrong)} violations; {planted}"
    report("simulate", figure=figure, held=not wrong and all(caught.values()), details=details, save=args.save)


if __name__ == "__main__":
    main()
