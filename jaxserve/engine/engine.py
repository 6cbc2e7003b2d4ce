"""The tick: schedule, dispatch, deliver what the dispatch before gave; and what happens when a step fails.

Joins the scheduler (who) and the device (how). It runs in one thread; the notebook's synchronous ``generate`` and the
server's thread both call ``tick``. Knows no JAX: the device comes in as an argument, and so do clock and randomness.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from jaxserve.engine.canary import Canary
from jaxserve.engine.completion import Answer, Completion
from jaxserve.engine.device import Admission, Device, Flight, Progress
from jaxserve.engine.metrics import Metrics
from jaxserve.engine.quarantine import Quarantine
from jaxserve.engine.recovery import NothingFinite, Recovery
from jaxserve.engine.request import Delta, FinishReason, Limits, Request
from jaxserve.engine.scheduler import Ended, Policy, Scheduler
from jaxserve.engine.work import ForkWork, PrefillWork, Running, RunWork, Tick
from jaxserve.errors import DeviceFault, EngineError, JaxserveError, NumericalError

logger = logging.getLogger(__name__)

# Failed steps in a row that nobody can be blamed for, before the device is.
PATIENCE = 3
# A step is suspicious when it takes this many times as long as the slowest call of the warm-up, and never before that
# many seconds: readiness follows within a second, and a busy machine's hiccups pass.
SLOWER, SOONEST = 10.0, 0.75
# A dispatch is made this long before the device should be done with the one before, and as long before as the host's
# part of the last ticks took, twice over.
MARGIN = 0.002
RECENT = 8


def _ignore(phase: str, done: int, total: int) -> None:
    """Progress that nobody watches."""


class Engine:
    """Continuous batching over a device.

    Args:
        device: of one model under one plan; compiled here by ``warm_up``.
        policy: what an operator tunes.
        eos: tokens that end every request that does not ignore them.
        clock: seconds, monotonic.
        draw_seed: a seed for each request that brings none.

    Attributes:
        metrics: where everything is counted; may be exchanged between ticks.
        idle: the last tick neither dispatched nor delivered anything; what is here waits for time to pass.
        beat: when anything last moved, on the engine's clock.
        step_limit: seconds without a beat that are too long for a step.
        retry_after: seconds until there should be room for one more, as of the last tick; any thread may read it.
        quarantine: requests that made a step fail.
        canary: watches the numbers; set it to one with a known answer.
        recompiles: compilations in this process since the warm-up; must stay 0 while it serves.
    """

    def __init__(
        self,
        device: Device,
        policy: Policy,
        *,
        eos: Iterable[int] = (),
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(63),
    ) -> None:
        self.device = device
        self.plan = device.plan
        self.metrics = metrics or Metrics()
        self.clock = clock
        self.quarantine = Quarantine(policy.quarantine)
        self.canary = Canary()
        self.idle = True
        self.beat = clock()
        self.step_limit = SOONEST
        self.recompiles = 0
        self._scheduler = Scheduler(device.plan, policy, eos)
        self.retry_after = self._scheduler.retry_after()
        self._recovery = Recovery(device, self._scheduler.stop_ids, self._move)
        self._draw_seed = draw_seed
        self._in_flight: list[tuple[RunWork, Flight]] = []
        self._read_at = self.beat
        # Between two reads of late, by how many steps were in flight.
        self._device_times: defaultdict[int, deque[float]] = defaultdict(partial(deque, maxlen=RECENT))
        self._host_times: deque[float] = deque(maxlen=RECENT)  # to schedule and dispatch, of late
        self._unclean: list[tuple[int, int]] = []  # (pool, slot) left by who did not end in a delivery
        self._unexplained = 0

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
    def degraded(self) -> bool:
        """Whether the known request was answered wrongly."""
        return self.canary.sick

    @property
    def spare(self) -> float:
        """Seconds that the next tick may wait without leaving the device idle.

        While nobody would be seated it is 0 and dispatches are made one ahead. With a free slot they are made at the
        last moment: who comes meanwhile is part of the next one, not of the one after it.
        """
        times = self._device_times[_steps(self._in_flight)]
        if not self._in_flight or not self._scheduler.has_room or len(times) < RECENT:
            return 0.0
        last_moment = self._read_at + min(times) - 2 * max(self._host_times) - MARGIN
        return max(0.0, last_moment - self.clock())

    def warm_up(self, progress: Progress = _ignore) -> None:
        """Compiles every program of the plan, calls each, and watches from then on that nothing compiles."""
        slowest = self.device.warm_up(progress, self._count_recompile)
        self.step_limit = max(SOONEST, SLOWER * slowest)

    # --- requests -----------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> list[tuple[str, Delta]]:
        """Queues a request.

        Returns:
            What is to be said to another request that had to give way, see ``Scheduler.submit``.

        Raises:
            InvalidRequest, ContextLengthExceeded, Overloaded: at once, see ``Scheduler.submit``.
            Quarantined: the like of it made a step fail.
        """
        now = self.clock()
        self.quarantine.check(request, now)
        seed = request.sampling.seed
        seed = self._draw_seed() if seed is None else seed
        gone = self._scheduler.submit(request, seed=seed, now=now)
        self._observe()
        return self._report(gone)

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Ends a request; its slot is free for the next tick. Nothing more is said about it.

        ``reason`` is what it counts as: ``STOP`` if its reader found a stop string.
        """
        running = self._scheduler.cancel(request_id)
        if running is not None:
            self._account(running, reason)

    def end_tenant(self, tenant: str, error: JaxserveError) -> list[tuple[str, Delta]]:
        """Ends every request of a tenant with an error."""
        return self._report(self._scheduler.end_tenant(tenant, error))

    def abandon(self, error: JaxserveError) -> list[tuple[str, Delta]]:
        """Ends every request with an error."""
        self._in_flight = []
        return self._report(self._scheduler.end_all(error))

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Runs requests to their end, together, in this thread; the answers come in the order of the requests.

        Raises:
            InvalidRequest, ContextLengthExceeded: one of them is wrong; then none of them is left behind.
            DeviceFault: steps fail whoever is in them.
        """
        answers = {request.id: Answer(request) for request in requests}
        ahead = deque(requests)
        try:
            while ahead or any(answer.finish_reason is None for answer in answers.values()):
                said = []
                while ahead and self._scheduler.arrivals < self._scheduler.capacity:
                    said += self.submit(ahead[0])
                    ahead.popleft()
                for request_id, delta in said + self.tick():
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

        Raises:
            DeviceFault: steps fail whoever is in them; the engine cannot go on.
        """
        self._move()
        tick = self._scheduler.schedule(self.beat)
        said = self._report(tick.ended)
        before, self._in_flight = self._in_flight, []
        self.idle = not (tick or before)
        try:
            self._dispatch(tick, said)
            self._host_times.append(self.clock() - self.beat)
            for work, flight in before:
                said += self._deliver(work, flight)
            if before:
                self._device_times[_steps(before)].append(self.beat - self._read_at)
                self._read_at = self.beat
            if tick.prefills and not (tick.runs or before):
                # Nothing else waits for the device here, and a long prompt must not run ahead of who comes next.
                self.device.wait({work.running.pool for work in tick.prefills})
        except Exception as fault:  # noqa: BLE001 - whatever a device throws, the requests must hear of it
            said += self._recover(fault)
        self._observe()
        return said

    def _dispatch(self, tick: Tick, said: list[tuple[str, Delta]]) -> None:
        while self._unclean:
            self.device.scrub(*self._unclean.pop())
        for chunk in tick.prefills:
            self._prefill(chunk)
        for fork in tick.forks:
            self._fork(fork)
        for work in tick.runs:
            said += self._admit(work)
            slots = [slot for slot, running in work.slots if self._scheduler.has(running)]
            self._in_flight.append((work, self.device.run(work.pool, slots, work.steps)))
            self.metrics.dispatches.labels("run").inc()

    def _prefill(self, work: PrefillWork) -> None:
        running, chunk = work.running, work.chunk
        self.device.prefill(running.pool, running.slot, chunk, running.tokens)
        self.metrics.dispatches.labels("prefill").inc()
        if not running.restarts:
            self.metrics.prompt_tokens.inc(chunk.count)

    def _fork(self, work: ForkWork) -> None:
        running = work.running
        self.device.fork(running.pool, work.source.slot, running.slot)
        self.metrics.dispatches.labels("fork").inc()
        if not running.restarts:
            self.metrics.shared_tokens.inc(self.plan.pools[running.pool].read(len(running.request.prompt)))

    def _admit(self, work: RunWork) -> list[tuple[str, Delta]]:
        said = []
        for running in work.admitted:
            request = running.request
            try:
                stop_ids = self._scheduler.stop_ids(request)
                read = self.plan.pools[work.pool].read(len(request.prompt))
                admission = Admission(request, running.tokens, stop_ids, running.seed, read)
                self.device.admit(work.pool, running.slot, admission)
            except Exception as fault:  # noqa: BLE001 - nothing was dispatched: it is this request's own fault
                said += self._blame(running, fault)
                continue
            if not running.restarts:
                self.metrics.prompt_tokens.inc(len(request.prompt) - read)
                self.metrics.queue_time.observe(running.began - running.arrived)
        return said

    def _deliver(self, work: RunWork, flight: Flight) -> list[tuple[str, Delta]]:
        log = flight.read()
        self._move()
        said, emitted = [], {}
        for slot, running in work.slots:
            if self._scheduler.has(running):
                try:
                    emitted[slot] = log.of(slot, running.request.sampling.logprobs)
                    if running.request.traced:
                        emitted[slot] = dataclasses.replace(emitted[slot], passes=log.passes(slot))
                except Exception as fault:  # noqa: BLE001 - the step itself went well
                    said += self._blame(running, fault)
        if len(emitted) > 1 and not any(one.finite for one in emitted.values()):
            raise NothingFinite
        self.metrics.count_passes(self.plan.decodes, [one.account for one in emitted.values()])
        since = {slot: running.last_token for slot, running in work.slots}
        deltas = self._scheduler.deliver(work, emitted, self.beat)
        for running, delta in deltas:
            self._measure(running, delta, since[running.slot])
            if delta.tokens:
                self._unexplained = 0
        return said + self._report(deltas)

    # --- when it fails ------------------------------------------------------------------------------------------------

    def _blame(self, running: Running, fault: Exception) -> list[tuple[str, Delta]]:
        """A fault of this request alone, on the host: nobody else is touched."""
        logger.error("a request failed", exc_info=fault, extra={"fields": {"request": running.request.id}})
        error = EngineError(f"this request failed: {type(fault).__name__}")
        error.__cause__ = fault
        return self._report([self._scheduler.end(running, error)])

    def _recover(self, fault: Exception) -> list[tuple[str, Delta]]:
        """A failed step has eaten the donated cache: its culprit ends, everybody else goes on where they were.

        Tokens that were in flight are lost and written once more: a draw depends on seed and position alone.
        """
        logger.error("a step failed", exc_info=fault)
        self.metrics.step_failures.inc()
        self._in_flight = []
        held = self._scheduler.restart()
        found = self._recovery.culprit(held)
        said = []
        if found is None:
            self._unexplained += 1
            if self._unexplained >= PATIENCE:
                raise DeviceFault(f"{PATIENCE} steps in a row failed and no request is to blame") from fault
        else:
            running, error = found
            error.__cause__ = fault
            if not isinstance(error, NumericalError):
                self.quarantine.add(running.request, self.clock())
            said = self._report([self._scheduler.end(running, error)])
        self.device.reset()
        self._unclean.clear()
        restored = len(held) - len(said)
        self.metrics.restored.inc(restored)
        logger.warning("recovered", extra={"fields": {"restored": restored, "ended": len(said)}})
        return said

    # --- accounts -----------------------------------------------------------------------------------------------------

    def _move(self) -> None:
        self.beat = self.clock()

    def _report(self, ended: Iterable[Ended]) -> list[tuple[str, Delta]]:
        said = []
        for running, delta in ended:
            if delta.finish_reason is not None:
                self._account(running, delta.finish_reason, clean=delta.error is None)
            if isinstance(delta.error, NumericalError):
                self._doubt()
            if self.canary.is_asked(running.request.id):
                self.canary.hear(delta)
            else:
                said.append((running.request.id, delta))
        return said

    def _doubt(self) -> None:
        """Numbers that are none, and too often: is it the requests or the device?"""
        self.metrics.numerical_errors.inc()
        now = self.clock()
        question = self.canary.error(now)
        if question is not None:
            logger.warning("non-finite numbers come often: asking the known request")
            self._scheduler.submit(question, seed=0, now=now, exempt=True)

    def _account(self, running: Running, reason: FinishReason, *, clean: bool = False) -> None:
        self.metrics.finished.labels(reason.value).inc()
        if clean and running.account.passes:
            each = len(running.generated) / running.account.passes
            self.metrics.tokens_per_pass.labels(self.plan.decodes).observe(each)
        self.metrics.request_time.observe(self.clock() - running.arrived)
        if running.slot >= 0:
            self.device.clear(running.pool, running.slot)
            if not clean:
                # What is in flight for it may yet leave a number that is none, and nobody will look.
                self._unclean.append((running.pool, running.slot))

    def _measure(self, running: Running, delta: Delta, since: float | None) -> None:
        count, now = len(delta.tokens), self.beat
        self.metrics.generated_tokens.inc(count)
        if since is None and count:
            self.metrics.first_token.observe(now - running.arrived)
        elif since is not None:
            for _ in range(count):
                self.metrics.inter_token.observe((now - since) / count)

    def _count_recompile(self) -> None:
        self.recompiles += 1
        self.metrics.recompiles.inc()

    def _observe(self) -> None:
        self.retry_after = self._scheduler.retry_after()
        self.metrics.running.set(self._scheduler.running)
        self.metrics.waiting.set(self._scheduler.waiting)
        self.metrics.cache_usage.set(self._scheduler.cache_usage)


def _steps(flights: Iterable[tuple[RunWork, Flight]]) -> int:
    return sum(work.steps for work, _ in flights)
