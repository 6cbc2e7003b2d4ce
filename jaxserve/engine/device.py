"""What the engine asks of a device: read a chunk, copy a slot, admit, run, hand over what came out. Knows no JAX.

``jax_device`` keeps this promise with compiled programs; ``jaxserve.testing`` with a hash, so that the engine can be
tried for thousands of hours in seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from jaxserve.engine.request import Pass, Request
from jaxserve.engine.work import Emitted
from jaxserve.plan import Chunk, Plan

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Admission:
    """A request that starts to decode in its slot.

    Attributes:
        tokens: all that are known; those before ``length`` have their cache entries, the others are read again.
        stop_ids: tokens that end it.
        seed: of its draws.
        length: positions whose cache entries are final, below ``len(tokens)``.
    """

    request: Request
    tokens: Sequence[int]
    stop_ids: Sequence[int]
    seed: int
    length: int


class Log(Protocol):
    """What one dispatch of a pool gave, on the host."""

    def of(self, slot: int, logprobs: int | None) -> Emitted:
        """One slot's part; ``logprobs`` alternatives a token, or no log-probabilities at all."""

    def passes(self, slot: int) -> tuple[Pass, ...]:
        """The same, pass by pass."""


class Flight(Protocol):
    """A dispatch under way."""

    def read(self) -> Log:
        """Waits for it; raises whatever the device threw."""


class Device(Protocol):
    """All pools of one plan. A call that raises has lost every slot: nothing may be used before ``reset``."""

    @property
    def plan(self) -> Plan:
        """Every static shape."""

    def warm_up(self, progress: Progress, on_compile: Callable[[], None]) -> float:
        """Compiles and calls everything once; from then on reports each compilation.

        Returns:
            Seconds that the slowest call took.
        """

    def reset(self) -> None:
        """Every pool empty."""

    def prefill(self, pool: int, slot: int, chunk: Chunk, tokens: Sequence[int]) -> None:
        """Reads ``tokens[chunk.start : chunk.start + chunk.count]``; the padding is filled with what follows."""

    def fork(self, pool: int, source: int, target: int) -> None:
        """Copies what was read into a slot that has not decoded since, into another one."""

    def admit(self, pool: int, slot: int, admission: Admission) -> None:
        """Lets a request decode from the pool's next run on; touches nothing but its own row."""

    def run(self, pool: int, slots: Iterable[int], steps: int) -> Flight:
        """Decodes ``steps`` steps of those slots; others stop."""

    def clear(self, pool: int, slot: int) -> None:
        """A slot's request has gone."""

    def scrub(self, pool: int, slot: int) -> None:
        """Zeroes a slot in which a non-finite number stood."""

    def wait(self, pools: Iterable[int]) -> None:
        """Until everything dispatched to these pools is done."""
