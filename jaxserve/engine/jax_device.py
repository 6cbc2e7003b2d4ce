"""The device as it is: the plan's compiled programs, the states they work on, and the rows beside them.

Knows how a dispatch is put together and how its log is read. Knows no queue and no time but that of a warm-up call.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jaxserve.decode.speculative import price_of
from jaxserve.decode.step import Emission
from jaxserve.decode.tally import COLUMNS
from jaxserve.engine.device import Admission, Flight, Progress
from jaxserve.engine.programs import CompileWatch, Programs
from jaxserve.engine.request import Account, Pass, Request, SamplingParams, TokenLogprob
from jaxserve.engine.rows import RowTable
from jaxserve.engine.work import Emitted
from jaxserve.plan import Chunk, Plan

# Passes of each width that are timed at the start; the fastest counts.
WEIGHED = 3


@dataclasses.dataclass(frozen=True, slots=True)
class JaxLog:
    """An emission on the host: arrays ``[steps, rows, width]``."""

    emission: Emission

    def of(self, slot: int, logprobs: int | None) -> Emitted:
        """One slot's part."""
        log = self.emission
        tokens: list[int] = []
        scores: list[TokenLogprob] = []
        for step in range(log.count.shape[0]):
            for index in range(int(log.count[step, slot])):
                token = int(log.tokens[step, slot, index])
                tokens.append(token)
                if logprobs is None:
                    continue
                ids = log.scores.top_ids[step, slot, index, :logprobs].tolist()
                values = log.scores.top[step, slot, index, :logprobs].tolist()
                chosen = float(log.scores.chosen[step, slot, index])
                scores.append(TokenLogprob(token, chosen, tuple(zip(ids, values, strict=True))))
        account = _account(log.tally[:, slot].sum(axis=0))
        finite = bool(log.finite[:, slot].all())
        return Emitted(tuple(tokens), tuple(scores), finite, account, self._canvas(slot, account.passes - 1))

    def passes(self, slot: int) -> tuple[Pass, ...]:
        """What each of the slot's passes did."""
        log, found = self.emission, []
        # One step after the other, from the first on.
        for step in range(_account(log.tally[:, slot].sum(axis=0)).passes):
            tokens = tuple(log.tokens[step, slot, : log.count[step, slot]].tolist())
            found.append(Pass(tokens, _account(log.tally[step, slot]), self._canvas(slot, step)))
        return tuple(found)

    def _canvas(self, slot: int, step: int) -> tuple[int, ...]:
        """What a block looks like behind a pass, if that one finished none."""
        log = self.emission
        if step < 0 or log.tokens.shape[2] == 1 or log.count[step, slot]:
            return ()
        return tuple(log.tokens[step, slot].tolist())


def _account(tally: Any) -> Account:
    """Counts by name."""
    return Account(**dict(zip(COLUMNS, tally.tolist(), strict=True)))


@dataclasses.dataclass(frozen=True, slots=True)
class JaxFlight:
    """An emission under way."""

    emission: Emission

    def read(self) -> JaxLog:
        """Waits for it."""
        return JaxLog(jax.device_get(self.emission))


class JaxDevice:
    """``engine.device.Device`` over compiled programs.

    Attributes:
        programs: the executables.
        compile_watch: counts compilations after the warm-up.
    """

    def __init__(self, programs: Programs) -> None:
        self.programs = programs
        self.compile_watch = CompileWatch()
        self._pools = range(len(programs.plan.pools))
        self._rows = [RowTable(programs.plan, pool, programs.whole) for pool in programs.plan.pools]
        self._controls = [programs.idle(pool) for pool in self._pools]
        self._states = [programs.empty(pool) for pool in self._pools]
        self._prices: list[dict[str, float]] = [{} for _ in self._pools]

    @property
    def plan(self) -> Plan:
        """Every static shape."""
        return self.programs.plan

    def warm_up(self, progress: Progress, on_compile: Callable[[], None]) -> float:
        """Compiles every program and calls each twice: the first call allocates and links, the second is timed."""
        self.programs.compile(progress)
        for pool in self._pools:
            self._call_all(pool)
        slowest = max(self._call_all(pool) for pool in self._pools)
        for pool in self._pools:
            self._prices[pool] = self._weigh(pool)
        self.compile_watch.arm(on_compile)
        return slowest

    def reset(self) -> None:
        """Every pool empty. The old states go first, to leave the new ones their room."""
        self._states.clear()
        self._states += [self.programs.empty(pool) for pool in self._pools]
        self._controls = [self.programs.idle(pool) for pool in self._pools]

    def prefill(self, pool: int, slot: int, chunk: Chunk, tokens: Sequence[int]) -> None:
        """Reads a chunk."""
        padded = np.zeros(chunk.bucket, np.int32)
        known = tokens[chunk.start : chunk.start + chunk.bucket]
        padded[: len(known)] = known
        self._states[pool] = self.programs.prefill(
            pool, chunk.bucket, self._states[pool], slot, padded, chunk.start, chunk.count
        )

    def fork(self, pool: int, source: int, target: int) -> None:
        """Copies a slot."""
        self._states[pool] = self.programs.fork(pool, self._states[pool], source, target)

    def admit(self, pool: int, slot: int, admission: Admission) -> None:
        """Fills the slot's rows."""
        request = admission.request
        self._rows[pool].set(slot, request, admission.stop_ids, admission.seed)
        if self.plan.hands:
            hint = self.programs.hint(pool, request.draft, self._prices[pool] | dict(request.settings))
            self._states[pool] = self.programs.hand(pool, self._states[pool], slot, hint)
        control, pending = self._controls[pool], admission.tokens[admission.length :]
        width = min(len(pending), control.pending.shape[1])
        control.pending[slot, :width] = pending[:width]
        control.pending_count[slot] = len(pending)
        control.length[slot] = admission.length
        control.admit[slot] = True

    def run(self, pool: int, slots: Iterable[int], steps: int) -> Flight:
        """Dispatches a run."""
        control, self._controls[pool] = self._controls[pool], self.programs.idle(pool)
        for slot in slots:
            control.keep[slot] = True
        rows = self._rows[pool].snapshot()
        self._states[pool], emission = self.programs.run(pool, self._states[pool], control, rows, steps)
        return JaxFlight(emission)

    def clear(self, pool: int, slot: int) -> None:
        """Empties the slot's row, so that what it asked for costs nothing any more."""
        self._rows[pool].clear(slot)
        self._controls[pool].admit[slot] = False

    def scrub(self, pool: int, slot: int) -> None:
        """Zeroes the slot."""
        self._states[pool] = self.programs.scrub(pool, self._states[pool], slot)

    def wait(self, pools: Iterable[int]) -> None:
        """Until the states are there."""
        jax.block_until_ready([self._states[pool].length for pool in pools])

    def _call_all(self, pool: int) -> float:
        """Calls each of a pool's programs at its dearest, every slot full; returns the seconds of the slowest call."""
        shape, steps, times = self.plan.pools[pool], self.plan.steps_per_dispatch, []
        for bucket in shape.buckets:
            began = time.monotonic()
            self.prefill(pool, 0, Chunk(shape.positions - bucket, 1, bucket), ())
            self.wait((pool,))
            times.append(time.monotonic() - began)
        prompt = (0,) * max(1, shape.length - steps)
        self._fill(pool, Request("warm-up", prompt, SamplingParams(max_tokens=steps, temperature=0.0)))
        began = time.monotonic()
        self.run(pool, range(shape.slots), steps).read()
        times.append(time.monotonic() - began)
        if shape.slots > 1:
            began = time.monotonic()
            self.fork(pool, 0, shape.slots - 1)
            self.wait((pool,))
            times.append(time.monotonic() - began)
        self._clean(pool)
        self.wait((pool,))
        return max(times)

    def _fill(self, pool: int, request: Request) -> None:
        """Admits the same request to every slot."""
        shape, prompt = self.plan.pools[pool], request.prompt
        for slot in range(shape.slots):
            self.admit(pool, slot, Admission(request, prompt, (), 0, shape.read(len(prompt))))

    def _clean(self, pool: int) -> None:
        """Leaves nothing of it."""
        for slot in range(self.plan.pools[pool].slots):
            self.clear(pool, slot)
            self.scrub(pool, slot)

    def _weigh(self, pool: int) -> dict[str, float]:
        """What passes of several drafts cost, in passes without any, every slot full; by the strategy's own names."""
        widths = self.plan.widths
        if len(widths) == 1 or price_of(widths[-1]) not in self.programs.strategy.settings:
            return {}
        times = {width: min(self._pass_of(pool, width - 1) for _ in range(WEIGHED)) for width in widths}
        return {price_of(width): times[width] / times[1] for width in widths[1:]}

    def _pass_of(self, pool: int, drafts: int) -> float:
        """Seconds of a pass in which each slot has so many drafts."""
        shape = self.plan.pools[pool]
        prompt = (0,) * max(1, shape.length - drafts - 2)
        settings = (("drafts", float(drafts)), *((price_of(width), 1e-3) for width in self.plan.widths[1:]))
        greedy = SamplingParams(max_tokens=drafts + 2, temperature=0.0)
        self._fill(pool, Request("warm-up", prompt, greedy, draft=(0,) * drafts, settings=settings))
        self.wait((pool,))
        began = time.monotonic()
        self.run(pool, range(shape.slots), 1).read()
        taken = time.monotonic() - began
        self._clean(pool)
        return taken
