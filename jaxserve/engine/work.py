"""What scheduler, engine and device tell each other about one tick. Knows no rule, no device and no clock."""

from __future__ import annotations

import dataclasses
from collections import deque

from jaxserve.engine.request import NOTHING, Account, Delta, Pass, Request, TokenLogprob
from jaxserve.plan import Chunk


@dataclasses.dataclass(slots=True, eq=False)
class Running:
    """A request and all that is needed to start it again from nothing: its tokens and its seed.

    Attributes:
        pool: where it belongs; ``slot`` is its place there, -1 while it waits.
        arrived, started, first_token, last_token: seconds on the engine's clock.
        chunks: what is still to be read before it decodes.
        decoding: its rows are in the device's run.
        source: who reads its prompt for it, until that is done.
        generated: its tokens so far.
        restarts: how often its cache was lost.
        account: what decoding it took so far.
    """

    request: Request
    pool: int
    arrived: float
    seed: int
    slot: int = -1
    started: float | None = None
    chunks: deque[Chunk] = dataclasses.field(default_factory=deque)
    decoding: bool = False
    source: Running | None = None
    generated: list[int] = dataclasses.field(default_factory=list)
    first_token: float | None = None
    last_token: float | None = None
    restarts: int = 0
    account: Account = NOTHING

    @property
    def began(self) -> float:
        """When it got its slot; when it came, if it has none."""
        return self.arrived if self.started is None else self.started

    @property
    def ready(self) -> bool:
        """Whether everything before its first step is done."""
        return not self.decoding and not self.chunks and self.source is None

    @property
    def known(self) -> int:
        """How many tokens are known, prompt and output."""
        return len(self.request.prompt) + len(self.generated)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Known tokens, prompt and output."""
        return (*self.request.prompt, *self.generated)


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillWork:
    """One chunk of one prompt."""

    running: Running
    chunk: Chunk


@dataclasses.dataclass(frozen=True, slots=True)
class ForkWork:
    """A copy of a slot whose prompt is read, for a request with the same one."""

    source: Running
    running: Running


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
    forks: tuple[ForkWork, ...]
    runs: tuple[RunWork, ...]
    ended: tuple[tuple[Running, Delta], ...]

    def __bool__(self) -> bool:
        return bool(self.prefills or self.runs)


@dataclasses.dataclass(frozen=True, slots=True)
class Emitted:
    """What a dispatch gave one slot; ``finite`` is false where the model produced a number that is none.

    The others are as in ``Delta``.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finite: bool
    account: Account = NOTHING
    canvas: tuple[int, ...] = ()
    passes: tuple[Pass, ...] = ()
