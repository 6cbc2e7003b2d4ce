"""A thread that looks at what is true, says when something stands still, and ends a process that can't go on.

Knows limits and what to do when they pass. What is true is for ``vitals`` to say, how a process ends for whoever starts
it.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable

from jaxserve.errors import JaxserveError
from jaxserve.server.service import Service
from jaxserve.server.vitals import LOOK_SECONDS, Check, Part

EX_SOFTWARE = 70  # sysexits.h
LEAVE_SECONDS = 4.0  # for streams to hear of it; then it ends, whoever still runs

logger = logging.getLogger(__name__)


class Watchdog:
    """Looks ten times a second.

    Args:
        give_up: told once, why, when the engine can serve no more; has ``LEAVE_SECONDS`` to end the process in order.
        leave: ends the process, whatever it does.
    """

    def __init__(
        self,
        service: Service,
        give_up: Callable[[JaxserveError], None],
        leave: Callable[[int], None] = os._exit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service = service
        self._give_up = give_up
        self._leave = leave
        self._clock = clock
        self._stalled: set[Part] = set()
        self._dumped: set[Part] = set()
        self._leave_at: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Looks from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Looks no more."""
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            try:
                self.look()
            except Exception:
                logger.exception("the watchdog could not look")

    def look(self) -> None:
        """One look, and what follows from it."""
        vitals = self._service.vitals
        vitals.look()
        self._note_stalls()
        self._dump_stacks()
        self._service.memory.relieve()
        failure = vitals.failure()
        if failure is not None and self._leave_at is None:
            self._leave_at = self._clock() + LEAVE_SECONDS
            logger.error("the engine has failed", extra={"fields": {"error": failure.code, "reason": failure.message}})
            self._give_up(failure)
        if self._leave_at is not None and self._clock() >= self._leave_at:
            logging.shutdown()
            self._leave(EX_SOFTWARE)

    def _note_stalls(self) -> None:
        """A line and a count when a part begins to stand still, a line when it goes on; while it serves."""
        if not self._service.readiness.is_ready():
            return
        checks = self._service.vitals.checks()
        for part in (Part.ENGINE, Part.EVENT_LOOP):
            stalled = checks[part] is Check.STALLED
            if stalled and part not in self._stalled:
                self._stalled.add(part)
                if self._service.metrics is not None:
                    self._service.metrics.observe_stall(part)
                logger.warning("stalled", extra={"fields": {"part": str(part)}})
            elif not stalled and part in self._stalled:
                self._stalled.discard(part)
                logger.info("goes on", extra={"fields": {"part": str(part)}})

    def _dump_stacks(self) -> None:
        """What every thread does, once for each time that a part has stood still up to its limit."""
        vitals = self._service.vitals
        for part in Part:
            still = vitals.still(part)
            if still < vitals.limit(part) or math.isinf(still):  # what is gone does not stand still
                self._dumped.discard(part)
            elif part not in self._dumped:
                self._dumped.add(part)
                fields = {"part": str(part), "seconds": round(still, 1), "limit": vitals.limit(part)}
                logger.error("stands still", extra={"fields": fields, "stacks": stacks()})


def stacks() -> str:
    """What every thread does at this moment, in Python's own words.

    Not by ``faulthandler``: that writes to standard error itself, and would hang for ever, all threads with it, when
    nobody reads there.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        parts.append(f"Thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame)))
    return "\n".join(parts)
