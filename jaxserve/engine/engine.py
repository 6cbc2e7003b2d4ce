"""The tick: schedule, dispatch, deliver what the dispatch before gave.

Joins the scheduler (who), the programs (how) and the row tables (with what parameters). It runs in one thread; the
notebook's synchronous ``generate`` and the server's thread both call ``tick``.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

from jaxserve.decode.step import Emission
from jaxserve.engine.metrics import Metrics
from jaxserve.engine.programs import CompileWatch, Programs, Progress
from jaxserve.engine.request import Delta, FinishReason, Limits, Request, TokenLogprob
from jaxserve.engine.rows import RowTable
from jaxserve.engine.scheduler import Emitted, Policy, PrefillWork, Running, RunWork, Scheduler
from jaxserve.errors import EngineError, JaxserveError

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer of the synchronous ``generate``."""

    request: Request
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    error: JaxserveError | None = None


@dataclasses.dataclass(slots=True)
class _Answer:
    """A completion in the making."""

    request: Request
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: JaxserveError | None = None

    def add(self, delta: Delta) -> None:
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.finish_reason, self.error = delta.finish_reason, delta.error

    def whole(self) -> Completion:
        reason = self.finish_reason or FinishReason.ERROR
        return Completion(self.request, tuple(self.tokens), tuple(self.logprobs), reason, self.error)


def _ignore(phase: str, done: int, total: int) -> None:
    """Progress that nobody watches."""


class Engine:
    """Continuous batching over compiled programs.

    Args:
        programs: of one model under one plan; compiled here by ``warm_up``.
        policy: what an operator tunes.
        eos: tokens that end every request that does not ignore them.
        clock: seconds, monotonic.
        draw_seed: a seed for each request that brings none.

    Attributes:
        metrics: where everything is counted; may be exchanged between ticks.
        idle: the last tick neither dispatched nor delivered anything; what is here waits for time to pass.
    """

    def __init__(
        self,
        programs: Programs,
        policy: Policy,
        *,
        eos: Iterable[int] = (),
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(63),
    ) -> None:
        self.plan = programs.plan
        self.metrics = metrics or Metrics()
        self._programs = programs
        self._scheduler = Scheduler(programs.plan, policy, eos)
        self._clock = clock
        self._draw_seed = draw_seed
        self._rows = [RowTable(self.plan, pool) for pool in self.plan.pools]
        self._states = [programs.empty(pool) for pool in range(len(self.plan.pools))]
        self._in_flight: list[tuple[RunWork, Emission]] = []
        self.idle = True
        self._watch = CompileWatch(self._count_recompile)

    @property
    def limits(self) -> Limits:
        """What a request may ask for."""
        return self._scheduler.limits

    @property
    def capacity(self) -> int:
        """Requests that may be here at once, running and waiting."""
        return self._scheduler.capacity

    @property
    def has_work(self) -> bool:
        """Whether a tick would do anything."""
        return self._scheduler.has_work or bool(self._in_flight)

    @property
    def recompiles(self) -> int:
        """Compilations in this process since the warm-up; must stay 0 while it serves."""
        return self._watch.count

    def warm_up(self, progress: Progress = _ignore) -> None:
        """Compiles every program of the plan, calls each once, and watches from then on that nothing compiles."""
        self._programs.compile(progress)
        for pool, state in enumerate(self._states):
            self._states[pool] = self._programs.call_once(pool, state)
        self._watch.arm()

    # --- requests -----------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queues a request.

        Raises:
            InvalidRequest, ContextLengthExceeded, Overloaded: at once, see ``Scheduler.submit``.
        """
        seed = request.sampling.seed
        seed = self._draw_seed() if seed is None else seed
        self._scheduler.submit(request, seed=seed, now=self._clock())
        self._observe()

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Ends a request; its slot is free for the next tick. Nothing more is said about it.

        ``reason`` is what it counts as: ``STOP`` if its reader found a stop string.
        """
        running = self._scheduler.cancel(request_id)
        if running is not None:
            self._account(running, reason)

    def abandon(self, error: JaxserveError) -> list[tuple[str, Delta]]:
        """Ends every request with an error."""
        self._in_flight = []
        return self._report(self._scheduler.drop_all(error))

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Runs requests to their end, together, in this thread; the answers come in the order of the requests.

        Raises:
            InvalidRequest, ContextLengthExceeded: one of them is wrong; then none of them is left behind.
        """
        answers = {request.id: _Answer(request) for request in requests}
        ahead = deque(requests)
        try:
            while ahead or any(answer.finish_reason is None for answer in answers.values()):
                while ahead and self._scheduler.arrivals < self._scheduler.capacity:
                    self.submit(ahead[0])
                    ahead.popleft()
                for request_id, delta in self.tick():
                    if request_id in answers:
                        answers[request_id].add(delta)
        finally:
            for request_id, answer in answers.items():
                if answer.finish_reason is None:
                    self.cancel(request_id)
            if not self._scheduler.has_work:
                self._in_flight = []  # what was dispatched ahead gives nothing to anybody
        return [answer.whole() for answer in answers.values()]

    # --- the tick -----------------------------------------------------------------------------------------------------

    def tick(self) -> list[tuple[str, Delta]]:
        """One round; returns what became known about which request.

        The next dispatch starts before the last one's tokens are read: the device never waits for the host.
        """
        tick = self._scheduler.schedule(self._clock())
        said = self._report(tick.ended)
        before = self._in_flight
        self.idle = not (tick or before)
        try:
            self._in_flight = self._dispatch(tick.prefills, tick.runs)
            for work, emission in before:
                said += self._deliver(work, emission)
            if tick.prefills and not (tick.runs or before):
                # Nothing else waits for the device here, and a long prompt must not run ahead of who comes next.
                jax.block_until_ready([self._states[work.running.pool].length for work in tick.prefills])
        except Exception as fault:  # noqa: BLE001 - whatever a device throws, the requests must hear of it
            said += self._recover(fault)
        self._observe()
        return said

    def _dispatch(self, prefills: Iterable[PrefillWork], runs: Iterable[RunWork]) -> list[tuple[RunWork, Emission]]:
        for work in prefills:
            running, chunk = work.running, work.chunk
            tokens = np.zeros(chunk.bucket, np.int32)
            tokens[: chunk.count] = running.request.prompt[chunk.start : chunk.start + chunk.count]
            self._states[running.pool] = self._programs.prefill(
                running.pool, chunk.bucket, self._states[running.pool], running.slot, tokens, chunk.start, chunk.count
            )
            self.metrics.dispatches.labels("prefill").inc()
            self.metrics.prompt_tokens.inc(chunk.count)
        return [(work, self._run(work)) for work in runs]

    def _run(self, work: RunWork) -> Emission:
        pool, table = work.pool, self._rows[work.pool]
        control = self._programs.idle(pool)
        for slot, _ in work.slots:
            control.keep[slot] = True
        for running in work.admitted:
            slot, prompt = running.slot, running.request.prompt
            table.set(slot, running.request, self._scheduler.stop_ids(running.request), running.seed)
            control.admit[slot] = True
            control.length[slot] = len(prompt) - 1
            control.pending[slot, 0] = prompt[-1]
            self.metrics.prompt_tokens.inc()
            self.metrics.queue_time.observe((running.started or running.arrived) - running.arrived)
        state, emission = self._programs.run(pool, self._states[pool], control, table.snapshot(), work.steps)
        self._states[pool] = state
        self.metrics.dispatches.labels("run").inc()
        return emission

    def _deliver(self, work: RunWork, emission: Emission) -> list[tuple[str, Delta]]:
        given = jax.device_get(emission)
        now = self._clock()
        since = {slot: running.last_token for slot, running in work.slots}
        emitted = {slot: _emitted(given, slot, running) for slot, running in work.slots}
        deltas = self._scheduler.deliver(work, emitted, now)
        for running, delta in deltas:
            self._measure(running, delta, since[running.slot], now)
        return self._report(deltas)

    def _recover(self, fault: Exception) -> list[tuple[str, Delta]]:
        """A failed step has eaten the donated cache: everyone who held a slot loses it, everyone who waits goes on."""
        logger.error("a step failed", exc_info=fault)
        error = EngineError(f"a step failed: {type(fault).__name__}")
        error.__cause__ = fault
        self._in_flight = []
        pools = range(len(self._states))
        self._states.clear()  # before the new ones take their room
        self._states += [self._programs.empty(pool) for pool in pools]
        return self._report(self._scheduler.fail_all(error))

    # --- accounts -----------------------------------------------------------------------------------------------------

    def _report(self, deltas: Iterable[tuple[Running, Delta]]) -> list[tuple[str, Delta]]:
        said = []
        for running, delta in deltas:
            if delta.finish_reason is not None:
                self._account(running, delta.finish_reason)
            said.append((running.request.id, delta))
        return said

    def _account(self, running: Running, reason: FinishReason) -> None:
        self.metrics.finished.labels(reason.value).inc()
        self.metrics.request_time.observe(self._clock() - running.arrived)
        if running.slot >= 0:
            self._rows[running.pool].clear(running.slot)

    def _measure(self, running: Running, delta: Delta, since: float | None, now: float) -> None:
        count = len(delta.tokens)
        self.metrics.generated_tokens.inc(count)
        if since is None and count:
            self.metrics.first_token.observe(now - running.arrived)
        elif since is not None:
            for _ in range(count):
                self.metrics.inter_token.observe((now - since) / count)

    def _count_recompile(self) -> None:
        self.metrics.recompiles.inc()

    def _observe(self) -> None:
        self.metrics.running.set(self._scheduler.running)
        self.metrics.waiting.set(self._scheduler.waiting)
        self.metrics.cache_usage.set(self._scheduler.cache_usage)


def _emitted(log: Emission, slot: int, running: Running) -> Emitted:
    """One slot's part of a dispatch's log ``[steps, rows, width]``."""
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    wanted = running.request.sampling.logprobs
    for step in range(log.count.shape[0]):
        for index in range(int(log.count[step, slot])):
            token = int(log.tokens[step, slot, index])
            tokens.append(token)
            if wanted is None:
                continue
            ids = log.scores.top_ids[step, slot, index, :wanted].tolist()
            values = log.scores.top[step, slot, index, :wanted].tolist()
            chosen = float(log.scores.chosen[step, slot, index])
            logprobs.append(TokenLogprob(token, chosen, tuple(zip(ids, values, strict=True))))
    return Emitted(tuple(tokens), tuple(logprobs), bool(log.finite[:, slot].all()))
