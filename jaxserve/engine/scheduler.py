"""Who runs when: a pure state machine. Time, ids and what the device gave come in as arguments.

Knows pools, slots, queues, chunks and deadlines. Knows no device, no thread, no clock and no JAX: it runs the same in
a test that simulates a thousand hours.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from jaxserve.engine.request import MAX_SEED, Delta, FinishReason, Limits, Request, TokenLogprob
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
from jaxserve.plan import MODEL_STOP_TOKENS, Chunk, Plan


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """What an operator tunes; seconds throughout.

    Attributes:
        max_concurrency: requests that hold a slot at once.
        max_waiting: requests that wait for one; one more is refused.
        queue_timeout: longest wait.
        request_timeout: longest life from arrival to last token.
        batch_window: how long an idle engine waits for company.
    """

    max_concurrency: int
    max_waiting: int
    queue_timeout: float
    request_timeout: float
    batch_window: float


@dataclasses.dataclass(slots=True, eq=False)
class Running:
    """A request and all that is needed to start it again from nothing: its tokens and its seed."""

    request: Request
    pool: int
    arrived: float
    seed: int
    slot: int = -1
    started: float | None = None
    chunks: deque[Chunk] = dataclasses.field(default_factory=deque)
    decoding: bool = False
    generated: list[int] = dataclasses.field(default_factory=list)
    first_token: float | None = None
    last_token: float | None = None

    @property
    def tokens(self) -> int:
        """Known tokens, prompt and output."""
        return len(self.request.prompt) + len(self.generated)


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillWork:
    """One chunk of one prompt."""

    running: Running
    chunk: Chunk


@dataclasses.dataclass(frozen=True, slots=True)
class RunWork:
    """Decode steps of one pool: who holds which slot, and who of them starts now."""

    pool: int
    steps: int
    slots: tuple[tuple[int, Running], ...]
    admitted: tuple[Running, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Tick:
    """What is dispatched at once, in this order, and the requests that ended without being dispatched."""

    prefills: tuple[PrefillWork, ...]
    runs: tuple[RunWork, ...]
    ended: tuple[tuple[Running, Delta], ...]

    def __bool__(self) -> bool:
        return bool(self.prefills or self.runs)


@dataclasses.dataclass(frozen=True, slots=True)
class Emitted:
    """What a dispatch gave one slot; ``finite`` is false where the model produced a number that is none."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finite: bool


class _Pool:
    def __init__(self, slots: int) -> None:
        self.free = list(range(slots))
        self.waiting: deque[Running] = deque()
        self.running: dict[int, Running] = {}


class Scheduler:
    """Queues, slots and ticks."""

    def __init__(self, plan: Plan, policy: Policy, eos: Iterable[int] = ()) -> None:
        self._plan = plan
        self._policy = policy
        self._eos = frozenset(eos)
        if len(self._eos) > MODEL_STOP_TOKENS:
            raise PlanError(f"the model has {len(self._eos)} end tokens, more than {MODEL_STOP_TOKENS}")
        self._pools = [_Pool(pool.slots) for pool in plan.pools]
        self._by_id: dict[str, Running] = {}
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
        return sum(len(pool.waiting) for pool in self._pools)

    @property
    def running(self) -> int:
        """Requests with a slot."""
        return sum(len(pool.running) for pool in self._pools)

    @property
    def has_work(self) -> bool:
        """Whether any request is here."""
        return bool(self._by_id)

    @property
    def cache_usage(self) -> float:
        """Share of all cache positions that hold a known token."""
        held = sum(running.tokens for pool in self._pools for running in pool.running.values())
        return held / sum(pool.slots * pool.length for pool in self._plan.pools)

    def stop_ids(self, request: Request) -> tuple[int, ...]:
        """Tokens that end this request."""
        own = set(request.sampling.stop_token_ids)
        return tuple(sorted(own if request.sampling.ignore_eos else own | self._eos))

    @property
    def arrivals(self) -> int:
        """Requests that are here, with a slot or without."""
        return len(self._by_id)

    @property
    def capacity(self) -> int:
        """Requests that may be here at once."""
        slots = sum(pool.slots for pool in self._plan.pools)
        return min(slots, self._policy.max_concurrency) + self._policy.max_waiting

    # --- events -------------------------------------------------------------------------------------------------------

    def submit(self, request: Request, *, seed: int, now: float) -> None:
        """Takes a request into the queue, or refuses it at once.

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
        self._pools[pool].waiting.append(running)
        if self._left_waiting() > self._policy.max_waiting:
            self._pools[pool].waiting.pop()
            raise Overloaded(f"{self._policy.max_waiting} requests are waiting already", retry_after=1.0)
        self._by_id[request.id] = running

    def cancel(self, request_id: str) -> Running | None:
        """Forgets a request; its slot is free at once. Unknown ids are ignored: it may just have ended."""
        running = self._by_id.get(request_id)
        if running is not None:
            self._remove(running)
        return running

    def schedule(self, now: float) -> Tick:
        """What to dispatch now."""
        ended = tuple((running, _failed(error)) for running, error in self._expired(now))
        for running, _ in ended:
            self._remove(running)
        finished = tuple(self._admit(now))
        prefills = tuple(self._prefills())
        return Tick(prefills, tuple(self._runs()), ended + finished)

    def deliver(self, work: RunWork, emitted: dict[int, Emitted], now: float) -> list[tuple[Running, Delta]]:
        """Takes what a dispatch gave each slot; requests that left meanwhile get nothing."""
        deltas = []
        for slot, running in work.slots:
            if self._by_id.get(running.request.id) is not running:
                continue
            given = emitted[slot]
            running.generated.extend(given.tokens)
            if given.tokens:
                running.first_token = running.first_token or now
                running.last_token = now
            delta = self._delta(running, given)
            if delta is None:
                continue
            deltas.append((running, delta))
            if delta.finish_reason is not None:
                self._remove(running)
        return deltas

    def fail_all(self, error: JaxserveError) -> list[tuple[Running, Delta]]:
        """Ends every request that holds a slot: their cache is gone."""
        lost = [running for pool in self._pools for running in pool.running.values()]
        for running in lost:
            self._remove(running)
        return [(running, _failed(error)) for running in lost]

    def drop_all(self, error: JaxserveError) -> list[tuple[Running, Delta]]:
        """Ends every request, those that wait too."""
        lost = list(self._by_id.values())
        for running in lost:
            self._remove(running)
        return [(running, _failed(error)) for running in lost]

    # --- rules --------------------------------------------------------------------------------------------------------

    def _left_waiting(self) -> int:
        """Requests that would still wait after the next admission."""
        seated = sum(min(len(pool.waiting), len(pool.free)) for pool in self._pools)
        return self.waiting - min(seated, self._policy.max_concurrency - self.running)

    def _expired(self, now: float) -> Iterator[tuple[Running, JaxserveError]]:
        for running in list(self._by_id.values()):
            deadline, age = running.request.deadline, now - running.arrived
            if deadline is not None and now >= deadline:
                yield running, DeadlineExceeded("the request's deadline passed before it was done")
            elif age >= self._policy.request_timeout:
                yield running, DeadlineExceeded(f"the request took longer than {self._policy.request_timeout:g} s")
            elif running.slot < 0 and age >= self._policy.queue_timeout:
                yield running, QueueTimeout(f"no slot came free within {self._policy.queue_timeout:g} s")

    def _admit(self, now: float) -> Iterator[tuple[Running, Delta]]:
        if self._gathers(now):
            return
        while self.running < self._policy.max_concurrency:
            open_pools = [pool for pool in self._pools if pool.waiting and pool.free]
            if not open_pools:
                return
            pool = min(open_pools, key=lambda pool: pool.waiting[0].arrived)
            running = pool.waiting.popleft()
            if running.request.sampling.max_tokens == 0:
                del self._by_id[running.request.id]
                yield running, Delta(finish_reason=FinishReason.LENGTH)
                continue
            running.slot = pool.free.pop(0)
            running.started = now
            running.chunks = deque(self._plan.pools[running.pool].chunks(len(running.request.prompt) - 1))
            pool.running[running.slot] = running

    def _gathers(self, now: float) -> bool:
        """Whether an idle engine still waits for company."""
        if self._policy.batch_window <= 0 or self.running:
            return False
        waiting = [running for pool in self._pools for running in pool.waiting]
        room = min(sum(len(pool.free) for pool in self._pools), self._policy.max_concurrency)
        oldest = min((running.arrived for running in waiting), default=now)
        return len(waiting) < room and now - oldest < self._policy.batch_window

    def _prefills(self) -> Iterator[PrefillWork]:
        """Chunks in order of arrival, as many a tick as one of the largest: who decodes is not held up for longer."""
        budget = max(pool.buckets[-1] for pool in self._plan.pools)
        filling = [running for pool in self._pools for running in pool.running.values() if not running.decoding]
        for running in sorted(filling, key=lambda running: running.arrived):
            while running.chunks:
                if running.chunks[0].bucket > budget:
                    return
                chunk = running.chunks.popleft()
                budget -= chunk.bucket
                yield PrefillWork(running, chunk)

    def _runs(self) -> Iterator[RunWork]:
        for index, pool in enumerate(self._pools):
            ready = [running for running in pool.running.values() if not running.decoding and not running.chunks]
            for running in ready:
                running.decoding = True
            slots = tuple((slot, running) for slot, running in pool.running.items() if running.decoding)
            if not slots:
                continue
            # Newcomers get their first token at once, and prompts that are still being read are not held up.
            hurry = ready or len(slots) < len(pool.running)
            yield RunWork(index, 1 if hurry else self._plan.steps_per_dispatch, slots, tuple(ready))

    def _delta(self, running: Running, given: Emitted) -> Delta | None:
        sampling = running.request.sampling
        if not given.finite:
            return _failed(NumericalError("the model produced a number that is not finite"))
        reason = None
        if given.tokens and given.tokens[-1] in self.stop_ids(running.request):
            reason = FinishReason.STOP
        elif len(running.generated) >= sampling.max_tokens:
            reason = FinishReason.LENGTH
        if not given.tokens and reason is None:
            return None
        return Delta(given.tokens, given.logprobs if sampling.logprobs is not None else (), reason)

    def _remove(self, running: Running) -> None:
        del self._by_id[running.request.id]
        pool = self._pools[running.pool]
        if running.slot < 0:
            pool.waiting.remove(running)
        else:
            del pool.running[running.slot]
            pool.free.append(running.slot)
            pool.free.sort()


def _failed(error: JaxserveError) -> Delta:
    return Delta(finish_reason=FinishReason.ERROR, error=error)


def check(request: Request, limits: Limits) -> None:
    """Refuses what the compiled programs would get wrong silently: JAX clamps ids and positions out of range.

    Raises:
        InvalidRequest: naming the parameter.
        ContextLengthExceeded: the prompt is too long.
    """
    sampling, prompt = request.sampling, request.prompt
    if not prompt:
        raise InvalidRequest("the prompt holds no token", param="prompt")
    if len(prompt) > limits.max_input_tokens:
        raise ContextLengthExceeded(
            f"the prompt has {len(prompt)} tokens, the limit is {limits.max_input_tokens}", param="prompt"
        )
    _check_ids("prompt", prompt, limits.vocab_size)
    _check_ids("stop_token_ids", sampling.stop_token_ids, limits.vocab_size)
    _check_ids("logit_bias", [token for token, _ in sampling.logit_bias], limits.vocab_size)
    bounds: tuple[tuple[str, float, float, float], ...] = (
        ("max_tokens", sampling.max_tokens, 0, limits.max_output_tokens),
        ("min_tokens", sampling.min_tokens, 0, sampling.max_tokens),
        ("temperature", sampling.temperature, 0, 100),
        ("top_k", sampling.top_k, 0, 2**31 - 1),
        ("top_p", sampling.top_p, 1e-9, 1),
        ("min_p", sampling.min_p, 0, 1),
        ("repetition_penalty", sampling.repetition_penalty, 1e-3, 1e3),
        ("presence_penalty", sampling.presence_penalty, -100, 100),
        ("frequency_penalty", sampling.frequency_penalty, -100, 100),
        ("seed", sampling.seed or 0, 0, MAX_SEED),
        ("logprobs", sampling.logprobs or 0, 0, limits.max_logprobs),
        ("stop_token_ids", len(sampling.stop_token_ids), 0, limits.max_stop_token_ids),
        ("logit_bias", len(sampling.logit_bias), 0, limits.max_logit_bias),
        *(("logit_bias", value, -1e4, 1e4) for _, value in sampling.logit_bias),
    )
    for name, value, low, high in bounds:
        if not low <= value <= high:  # NaN is in no interval
            raise InvalidRequest(f"{name} must be from {low:g} to {high:g}, not {value:g}", param=name)


def _check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise InvalidRequest(f"token id {wrong} is outside the vocabulary of {vocab_size}", param=name)
