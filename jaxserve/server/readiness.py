"""How far the process has come on its way from the first breath to the last.

One state machine, moved by the thread that loads the model and by the server's signal handler, read by the probes.
Knows neither model nor engine: what is true of those is for ``vitals`` to say.
"""

from __future__ import annotations

import dataclasses
import enum
import threading
import time
from collections.abc import Callable


class Phase(enum.StrEnum):
    """Where the process is between its first breath and its last, in this order."""

    STARTING = "starting"
    LOADING = "loading"
    VERIFYING = "verifying"
    COMPILING = "compiling"
    SELFTEST = "selftest"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True, slots=True)
class Status:
    """One moment of the state machine.

    Attributes:
        phase: the phase itself.
        done, total: progress within the phase, in its own unit (files, programs); 0 of 0 where there is none.
        since: when the phase began, in seconds of the Unix epoch.
        moved: when it last came any further, in seconds of the monotonic clock.
        message: why it failed, empty otherwise; for the log and the operator, so no probe shows it.
        started: whether it has been ready before, whatever came after.
    """

    phase: Phase
    done: int
    total: int
    since: float
    moved: float
    message: str = ""
    started: bool = False

    def __str__(self) -> str:
        return f"{self.phase} {self.done}/{self.total}" if self.total else str(self.phase)


class Readiness:
    """The state machine. Every method may be called from any thread.

    A process goes forwards or fails: nothing leads out of ``failed``, and only that leads out of ``draining``.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._status = Status(Phase.STARTING, 0, 0, time.time(), clock())

    @property
    def status(self) -> Status:
        """The present moment."""
        return self._status

    def advance(self, phase: str, done: int, total: int) -> None:
        """Reports progress while starting; has the shape of every ``Progress`` callback of the house."""
        self._move(Phase(phase), done, total)

    def ready(self) -> None:
        """Everything is verified, compiled and tested: requests may come."""
        self._move(Phase.READY)

    def drain(self) -> None:
        """Not ready any more, though requests are still served: load balancers look away first."""
        self._move(Phase.DRAINING)

    def fail(self, message: str) -> None:
        """Cannot serve, now or later."""
        self._move(Phase.FAILED, message=message)

    def is_ready(self) -> bool:
        """Whether everything has passed and nothing has ended it."""
        return self._status.phase is Phase.READY

    def standstill(self) -> float:
        """Seconds without progress of a process that is still starting; 0 before and after that."""
        status = self._status
        starting = not status.started and status.phase not in (Phase.DRAINING, Phase.FAILED)
        return self._clock() - status.moved if starting else 0.0

    def _move(self, phase: Phase, done: int = 0, total: int = 0, message: str = "") -> None:
        with self._lock:
            old = self._status
            last = old.phase is Phase.FAILED or (old.phase is Phase.DRAINING and phase is not Phase.FAILED)
            if last:
                return
            since = old.since if phase is old.phase else time.time()
            still = (phase, done) == (old.phase, old.done)  # the same report again is no progress
            moved = old.moved if still else self._clock()
            started = old.started or phase is Phase.READY
            self._status = Status(phase, done, total, since, moved, message, started)
