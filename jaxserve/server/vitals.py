"""What is true of the process at this moment: does its event loop turn, does its engine step, may requests come.

Knows how long each part may stand still, and that a process which was stopped as a whole is not a broken one. Knows no
HTTP. The engine is asked, never trusted: a flag that somebody set once would still be set when its thread is gone.
"""

from __future__ import annotations

import enum
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from jaxserve.config import ServerConfig
from jaxserve.errors import EngineError, JaxserveError
from jaxserve.server.readiness import Phase, Readiness

LOOK_SECONDS = 0.1  # between two looks of the watchdog
LOOP_LIMIT_SECONDS = 0.75  # a loop that was away for longer takes no requests
LAG_WINDOW_SECONDS = 15.0  # how long a lag is remembered: one interval of Prometheus


class Part(enum.StrEnum):
    """What may stand still."""

    ENGINE = "engine"
    EVENT_LOOP = "event_loop"
    STARTUP = "startup"


class Check(enum.StrEnum):
    """How a part is, in the words that a probe shows."""

    OK = "ok"
    ABSENT = "absent"
    STALLED = "stalled"
    DEGRADED = "degraded"
    FAILED = "failed"


class Model(Protocol):
    """What a served model tells about itself."""

    @property
    def heartbeat(self) -> Callable[[], float]:
        """Seconds without a step while there is work; without end when there will be none."""

    @property
    def step_limit(self) -> Callable[[], float]:
        """Seconds from which on that is suspicious."""

    @property
    def failure(self) -> Callable[[], JaxserveError | None]:
        """Why it has given up, if it has."""

    @property
    def degraded(self) -> Callable[[], bool]:
        """Whether its numbers can't be trusted."""


class Process(Protocol):
    """What there is to look at."""

    @property
    def config(self) -> ServerConfig:
        """The section ``server``."""

    @property
    def readiness(self) -> Readiness:
        """How far it has come."""

    @property
    def model(self) -> Model | None:
        """What it serves, once it is there."""


class Pulse:
    """The event loop's heartbeat. ``beat`` belongs to the loop, the rest to anybody."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._lags: deque[tuple[float, float]] = deque()  # when and how long, each longer than all that came after it
        self._worst = 0.0

    def beat(self, lag: float) -> None:
        """The loop turns; it came ``lag`` seconds later than it wanted to."""
        now = self._last = self._clock()
        while self._lags and self._lags[-1][1] <= lag:
            self._lags.pop()
        self._lags.append((now, lag))
        while self._lags[0][0] <= now - LAG_WINDOW_SECONDS:
            self._lags.popleft()
        self._worst = self._lags[0][1]

    def age(self) -> float:
        """Seconds since the last beat."""
        return self._clock() - self._last

    def lag(self) -> float:
        """The longest delay of the last fifteen seconds, in seconds."""
        return self._worst


class Stillness:
    """For how long something has stood still while this process itself ran.

    A process that was stopped and goes on (a debugger, a paused container, a migrated machine) finds every age as long
    as the pause was. Nothing is wrong with it, and it must not be ended for it: so between two looks no more time is
    counted than looks are apart.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._looked: float | None = None

    def look(self, age: float, now: float) -> None:
        """Takes the seconds since the last sign of life; without end if there will be none."""
        passed = 0.0 if self._looked is None else min(now - self._looked, 3 * LOOK_SECONDS)
        self._looked = now
        self.seconds = age if math.isinf(age) else min(age, self.seconds + passed)


class Vitals:
    """What is true. Every method but ``look`` may be called from any thread; that one belongs to the watchdog."""

    def __init__(self, process: Process, clock: Callable[[], float] = time.monotonic) -> None:
        self._process = process
        self._clock = clock
        self._still = {part: Stillness() for part in Part}
        self.pulse = Pulse(clock)

    def look(self) -> None:
        """Measures what stands still; call it every ``LOOK_SECONDS``."""
        model, now = self._process.model, self._clock()
        self._still[Part.ENGINE].look(0.0 if model is None else model.heartbeat(), now)
        self._still[Part.EVENT_LOOP].look(self.pulse.age(), now)
        self._still[Part.STARTUP].look(self._process.readiness.standstill(), now)

    def still(self, part: Part) -> float:
        """Seconds for which a part has stood still, as of the last look."""
        return self._still[part].seconds

    def limit(self, part: Part) -> float:
        """Seconds after which a part that stands still counts as dead."""
        config = self._process.config
        limits = {Part.ENGINE: config.heartbeat_limit_s, Part.EVENT_LOOP: config.loop_limit_s}
        return limits.get(part, config.stall_limit_s)

    def failure(self) -> JaxserveError | None:
        """Why the engine can serve no more: it says so itself, or it has stood still for twice its limit."""
        model = self._process.model
        failure = None if model is None else model.failure()
        if failure is None and self.still(Part.ENGINE) >= 2 * self.limit(Part.ENGINE):
            return EngineError("The engine stands still.")
        return failure

    # --- verdicts -----------------------------------------------------------------------------------------------------

    def checks(self) -> dict[str, Check]:
        """Each thing that readiness rests on."""
        model = self._process.model
        loop = Check.OK if self.pulse.age() < LOOP_LIMIT_SECONDS else Check.STALLED
        return {
            "model": Check.ABSENT if model is None else Check.OK,
            "engine": Check.ABSENT if model is None else _engine(model),
            "event_loop": loop,
        }

    def ready(self) -> bool:
        """Whether new requests should be sent here. How many are here plays no part."""
        return self._process.readiness.is_ready() and all(check is Check.OK for check in self.checks().values())

    def started(self) -> bool:
        """Whether it has been ready before."""
        return self._process.readiness.status.started

    def alive(self) -> bool:
        """Whether a restart would not help."""
        if self._process.readiness.status.phase is Phase.FAILED or self.failure() is not None:
            return False
        return all(self.still(part) < self.limit(part) for part in Part)

    def state(self) -> str:
        """Where it is, in a word: the phase, or ``degraded`` when all has passed and yet no requests should come."""
        phase = self._process.readiness.status.phase
        return "degraded" if phase is Phase.READY and not self.ready() else str(phase)


def _engine(model: Model) -> Check:
    if model.failure() is not None:
        return Check.FAILED
    if model.heartbeat() >= model.step_limit():
        return Check.STALLED
    return Check.DEGRADED if model.degraded() else Check.OK
