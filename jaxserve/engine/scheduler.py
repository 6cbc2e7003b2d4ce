"""Who runs when: a pure state machine. Time, ids and what the device gave come in as arguments.

Knows pools, slots, chunks and deadlines. Knows no device, no thread, no clock and no JAX: it runs the same in a test
that simulates a thousand hours.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Iterable, Iterator

from jaxserve.engine import sharing
from jaxserve.engine.queue import Queue
from jaxserve.engine.request import NOTHING, Account, Delta, FinishReason, Limits, Request, check
from jaxserve.engine.seats import Seats, Slots
from jaxserve.engine.work import Emitted, PrefillWork, Running, RunWork, Tick
from jaxserve.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    JaxserveError,
    NumericalError,
    Overloaded,
    PlanError,
    QueueTimeout,
)
from jaxserve.plan import MODEL_STOP_TOKENS, Plan

# How much a new measurement changes an estimate.
NEW_SHARE = 0.2
LONGEST_RETRY = 60.0

Ended = tuple[Running, Delta]


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """What an operator tunes; seconds throughout.

    Attributes:
        max_concurrency: requests that hold a slot at once.
        max_waiting: requests that wait for one; one more is refused.
        queue_timeout: longest wait.
        request_timeout: longest life from arrival to last token.
        batch_window: how long an idle engine waits for company.
        max_tenant_share: share of each pool, and of ``max_concurrency``, that one tenant may hold.
        quarantine: how long a request that made a step fail is refused.
    """

    max_concurrency: int
    max_waiting: int
    queue_timeout: float
    request_timeout: float
    batch_window: float
    max_tenant_share: float = 1.0
    quarantine: float = 600.0

    def share_of(self, slots: int) -> int:
        """How many of so many slots one tenant may hold."""
        return max(1, int(slots * self.max_tenant_share))


class Scheduler:
    """Queues, slots and ticks."""

    def __init__(self, plan: Plan, policy: Policy, eos: Iterable[int] = ()) -> None:
        self._plan = plan
        self._policy = policy
        self._eos = frozenset(eos)
        if len(self._eos) > MODEL_STOP_TOKENS:
            raise PlanError(f"the model has {len(self._eos)} end tokens, more than {MODEL_STOP_TOKENS}")
        self._pools = [Slots(pool.slots) for pool in plan.pools]
        self._budget = max(pool.buckets[-1] for pool in plan.pools)
        self._at_once = min(policy.max_concurrency, sum(pool.slots for pool in plan.pools))
        self._queue = Queue()
        self._by_id: dict[str, Running] = {}
        self._seconds_per_turn = 0.0  # of reading a prompt
        self._seconds_per_slot = 0.0
        self.limits = Limits(
            vocab_size=plan.model.vocab_size,
            max_length=plan.max_length,
            max_input_tokens=plan.max_input_tokens,
            max_output_tokens=plan.max_output_tokens,
            max_logit_bias=plan.max_logit_bias,
            max_stop_token_ids=plan.max_stop_token_ids,
            max_logprobs=plan.max_logprobs,
        )

    # --- facts --------------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Requests with a slot."""
        return sum(len(pool.running) for pool in self._pools)

    @property
    def has_work(self) -> bool:
        """Whether any request is here."""
        return bool(self._by_id)

    @property
    def has_room(self) -> bool:
        """Whether one more request would have a slot at once."""
        return not self._queue and self.running < self._at_once

    @property
    def cache_usage(self) -> float:
        """Share of all cache positions that hold a known token."""
        return sum(running.known for running in self._held()) / sum(
            pool.slots * pool.length for pool in self._plan.pools
        )

    @property
    def arrivals(self) -> int:
        """Requests that are here, with a slot or without."""
        return len(self._by_id)

    @property
    def capacity(self) -> int:
        """Requests that may be here at once."""
        return self._at_once + self._policy.max_waiting

    def stop_ids(self, request: Request) -> tuple[int, ...]:
        """Tokens that end this request."""
        own = set(request.sampling.stop_token_ids)
        return tuple(sorted(own if request.sampling.ignore_eos else own | self._eos))

    def has(self, running: Running) -> bool:
        """Whether a request is still here."""
        return self._by_id.get(running.request.id) is running

    def retry_after(self) -> float:
        """Seconds until a slot should be free for one more, at the present pace."""
        return min(LONGEST_RETRY, max(0.1, (self.waiting + 1) * self._seconds_per_slot / self._at_once))

    # --- events -------------------------------------------------------------------------------------------------------

    def submit(self, request: Request, *, seed: int, now: float, exempt: bool = False) -> list[Ended]:
        """Takes a request into the queue, or refuses it at once; one that is ``exempt`` is taken even if it is full.

        Returns:
            Who had to give way: the last of the longest line when the queue is full and a tenant comes who has less
            in it.

        Raises:
            InvalidRequest: an id in use, a token outside the vocabulary, or parameters past the limits.
            ContextLengthExceeded: prompt and output fit into no pool.
            Overloaded: the queue is full.
        """
        if request.id in self._by_id:
            raise InvalidRequest(f"request id {request.id} is in use", param="id")
        check(request, self.limits)
        length = len(request.prompt) + request.sampling.max_tokens
        pool = self._plan.pool_for(length)
        if pool is None:
            raise ContextLengthExceeded(
                f"{len(request.prompt)} prompt tokens and max_tokens of {request.sampling.max_tokens} make {length}; "
                f"the longest request served here has {self.limits.max_length} tokens",
                param="max_tokens",
            )
        running = Running(request, pool, arrived=now, seed=seed)
        self._by_id[request.id] = running
        self._queue.push(running)
        unseated = [] if exempt else self._unseated()
        if len(unseated) <= self._policy.max_waiting:
            return []
        counts = Counter(one.request.tenant for one in unseated)
        longest = max(counts.values())
        full = Overloaded(f"{self._policy.max_waiting} requests are waiting already", retry_after=self.retry_after())
        if counts[request.tenant] == longest:
            self._remove(running)
            raise full
        return [self.end(next(one for one in reversed(unseated) if counts[one.request.tenant] == longest), full)]

    def cancel(self, request_id: str) -> Running | None:
        """Forgets a request; its slot is free at once. Unknown ids are ignored: it may just have ended."""
        running = self._by_id.get(request_id)
        if running is not None:
            self._remove(running)
        return running

    def end(self, running: Running, error: JaxserveError) -> Ended:
        """Ends a request that is here with an error."""
        self._remove(running)
        return running, _failed(error)

    def end_tenant(self, tenant: str, error: JaxserveError) -> list[Ended]:
        """Ends every request of a tenant."""
        return [self.end(one, error) for one in list(self._by_id.values()) if one.request.tenant == tenant]

    def end_all(self, error: JaxserveError) -> list[Ended]:
        """Ends every request, those that wait too."""
        return [self.end(one, error) for one in list(self._by_id.values())]

    def schedule(self, now: float) -> Tick:
        """What to dispatch now."""
        ended = [self.end(running, error) for running, error in tuple(self._expired(now))]
        ended += self._admit(now)
        prefills = tuple(self._prefills())
        forks = sharing.due(self._held())  # of all that is read by then
        return Tick(prefills, forks, tuple(self._runs()), tuple(ended))

    def deliver(self, work: RunWork, emitted: dict[int, Emitted], now: float) -> list[Ended]:
        """Takes what a dispatch gave each slot; requests that left meanwhile get nothing."""
        deltas = []
        for slot, running in work.slots:
            if not self.has(running):
                continue
            given = emitted[slot]
            running.generated.extend(given.tokens)
            running.account += given.account
            if given.tokens:
                self._note_tokens(running, len(given.tokens), now)
            delta = self._delta(running, given)
            if delta is None:
                continue
            deltas.append((running, delta))
            if delta.finish_reason is not None:
                self._seconds_per_slot = _blend(self._seconds_per_slot, now - running.began)
                self._remove(running)
        return deltas

    def restart(self) -> list[Running]:
        """The cache is gone: everyone who holds a slot reads their tokens again and goes on where they were."""
        held = list(self._held())
        for running in held:
            pool = self._plan.pools[running.pool]
            again = pool.chunks_again(len(running.request.prompt), running.known)
            running.chunks = deque(again if running.source is None else ())
            running.decoding = False
            running.restarts += 1
        return held

    # --- rules --------------------------------------------------------------------------------------------------------

    def _held(self) -> Iterator[Running]:
        return (running for pool in self._pools for running in pool.running.values())

    def _unseated(self) -> list[Running]:
        """Those who would still wait after the next admission, in order of arrival."""
        if not self._queue:
            return []
        seats, unseated = Seats(self._policy.max_concurrency, self._policy.share_of, self._pools), []
        for one in sorted(self._queue, key=lambda one: one.arrived):
            if seats.open(one):
                seats.take(one)
            else:
                unseated.append(one)
        return unseated

    def _expired(self, now: float) -> Iterator[tuple[Running, JaxserveError]]:
        for running in self._by_id.values():
            deadline, age = running.request.deadline, now - running.arrived
            if deadline is not None and now >= deadline:
                yield running, DeadlineExceeded("the request's deadline passed before it was done")
            elif age >= self._policy.request_timeout:
                yield running, DeadlineExceeded(f"the request took longer than {self._policy.request_timeout:g} s")
            elif running.slot < 0 and age >= self._policy.queue_timeout:
                error = QueueTimeout(f"no slot came free within {self._policy.queue_timeout:g} s")
                error.retry_after = self.retry_after()
                yield running, error

    def _admit(self, now: float) -> Iterator[Ended]:
        if not self._queue or self._gathers(now):
            return
        seats = Seats(self._policy.max_concurrency, self._policy.share_of, self._pools)
        while (running := self._queue.next(seats.open)) is not None:
            if running.request.sampling.max_tokens == 0:
                self._remove(running)
                yield running, Delta(finish_reason=FinishReason.LENGTH)
                continue
            first_token = now + self._seconds_per_turn * self._turns(running)
            # On an idle engine anybody is tried: an estimate that turns all away would never be mended.
            if self.running and running.request.deadline is not None and first_token > running.request.deadline:
                yield self.end(running, DeadlineExceeded("the request's deadline would pass before its first token"))
                continue
            self._queue.take(running)
            seats.take(running)
            running.started = now
            self._seat(running)

    def _seat(self, running: Running) -> None:
        """Gives it a slot, and what is to be read there: nothing, if another one reads it just now."""
        slots = self._pools[running.pool]
        source = sharing.reader(running, slots.running.values())
        slots.take(running)
        if source is not None and self._plan.pools[running.pool].read(len(running.request.prompt)):
            running.source = source
        else:
            self._read(running)

    def _read(self, running: Running) -> None:
        """It reads its prompt itself."""
        pool = self._plan.pools[running.pool]
        running.chunks = deque(pool.chunks(pool.read(len(running.request.prompt))))
        self._queue.read(running)

    def _gathers(self, now: float) -> bool:
        """Whether an idle engine still waits for company."""
        if self._policy.batch_window <= 0 or self.running:
            return False
        room = min(sum(len(pool.free) for pool in self._pools), self._policy.max_concurrency)
        oldest = min((running.arrived for running in self._queue), default=now)
        return self.waiting < room and now - oldest < self._policy.batch_window

    def _prefills(self) -> Iterator[PrefillWork]:
        """Chunks in order of arrival, as many a tick as one of the largest: who decodes is not held up for longer."""
        budget = self._budget
        filling = [running for running in self._held() if not running.decoding]
        for running in sorted(filling, key=lambda running: running.arrived):
            while running.chunks:
                if running.chunks[0].bucket > budget:
                    return
                chunk = running.chunks.popleft()
                budget -= chunk.bucket
                yield PrefillWork(running, chunk)

    def _turns(self, running: Running) -> int:
        """Ticks that its prompt takes at least. Not tokens: a short prompt's time says nothing of a long one's."""
        return -(-len(running.request.prompt) // self._budget)

    def _runs(self) -> Iterator[RunWork]:
        for index, pool in enumerate(self._pools):
            ready = [running for running in pool.running.values() if running.ready]
            for running in ready:
                running.decoding = True
            slots = tuple((slot, running) for slot, running in pool.running.items() if running.decoding)
            if not slots:
                continue
            # Newcomers get their first token at once, and prompts that are still being read are not held up.
            hurry = ready or len(slots) < len(pool.running)
            yield RunWork(index, 1 if hurry else self._plan.steps_per_dispatch, slots, tuple(ready))

    def _note_tokens(self, running: Running, count: int, now: float) -> None:
        self._queue.written(running, count)
        if running.first_token is None:
            running.first_token = now
            taken = (now - running.began) / self._turns(running)
            self._seconds_per_turn = _blend(self._seconds_per_turn, taken)
        running.last_token = now

    def _delta(self, running: Running, given: Emitted) -> Delta | None:
        sampling = running.request.sampling
        if not given.finite:
            return _failed(NumericalError("the model produced a number that is not finite"), running.account)
        reason = None
        if given.tokens and given.tokens[-1] in self.stop_ids(running.request):
            reason = FinishReason.STOP
        elif len(running.generated) >= sampling.max_tokens:
            reason = FinishReason.LENGTH
        canvas = given.canvas if running.request.provisional else ()  # nobody else is woken for it
        if not (given.tokens or canvas or given.passes) and reason is None:
            return None
        logprobs = given.logprobs if sampling.logprobs is not None else ()
        return Delta(given.tokens, logprobs, reason, None, running.account, canvas, given.passes)

    def _remove(self, running: Running) -> None:
        del self._by_id[running.request.id]
        self._queue.forget(running)
        if running.slot >= 0:
            slots = self._pools[running.pool]
            slots.give_back(running)
            reader = sharing.heir(running, slots.running.values())
            if reader is not None:
                self._read(reader)


def _failed(error: JaxserveError, account: Account = NOTHING) -> Delta:
    return Delta(finish_reason=FinishReason.ERROR, error=error, account=account)


def _blend(old: float, new: float) -> float:
    return new if old == 0 else old + NEW_SHARE * (new - old)
