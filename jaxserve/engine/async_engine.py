"""An engine in a thread of its own, used from one event loop; ``crossing`` lies between the two.

Knows threads and asyncio. Knows nothing of what a tick does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time

from jaxserve.engine.crossing import Crossing, Said, Stream
from jaxserve.engine.engine import Engine
from jaxserve.engine.request import Limits, Request
from jaxserve.errors import DeviceFault, EngineError, JaxserveError, ShuttingDown

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.001
JOIN_SECONDS = 10.0


class AsyncEngine:
    """An engine in a thread of its own.

    Attributes:
        failure: why it has given up for good, if it has.
    """

    def __init__(self, engine: Engine) -> None:
        self.failure: JaxserveError | None = None
        self._engine = engine
        self._wake = threading.Condition()
        self._crossing = Crossing(engine, self._notify)
        self._stopped = False
        self._busy_since = math.inf
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    # --- the event loop's side ----------------------------------------------------------------------------------------

    @property
    def limits(self) -> Limits:
        """What a request may ask for."""
        return self._engine.limits

    def submit(self, request: Request, *, patient: bool = False) -> Stream:
        """Hands a request over; call on the event loop. See ``Crossing.submit``.

        Raises:
            InvalidRequest, ContextLengthExceeded: the request is wrong. Quarantined: it made a step fail.
            Overloaded: the queue is full.
            ShuttingDown: the engine takes no more. EngineError: it has given up.
        """
        self._loop = asyncio.get_running_loop()
        return self._crossing.submit(request, patient=patient)

    def room(self, tenant: str = "") -> None:
        """Raises what ``submit`` would raise, whatever the request; costs nothing."""
        self._crossing.room(tenant)

    def cancel_tenant(self, tenant: str, error: JaxserveError) -> int:
        """Ends every request of a tenant with an error; returns how many there are."""
        return self._crossing.cancel_tenant(tenant, error)

    # --- its health, for any thread -----------------------------------------------------------------------------------

    def heartbeat(self) -> float:
        """Seconds since anything moved while there is work, else 0; without end when the thread has died."""
        if not self.alive and not self._stopped:
            return math.inf
        now = self._engine.clock()
        return max(0.0, now - max(self._engine.beat, self._busy_since))

    @property
    def step_limit(self) -> float:
        """Seconds without a beat that are too long for a step."""
        return self._engine.step_limit

    @property
    def degraded(self) -> bool:
        """Whether the numbers went wrong."""
        return self._engine.degraded

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self._thread.is_alive()

    def close(self, drain: float = 0.0) -> bool:
        """Takes no more requests, gives the running ones ``drain`` seconds, ends the rest with an error.

        Returns:
            Whether the thread has ended; false if the device holds it.
        """
        deadline = time.monotonic() + drain
        self._crossing.closing = self._crossing.closing or ShuttingDown("the server is shutting down")
        while self._crossing.streams and time.monotonic() < deadline and self.alive:
            time.sleep(0.01)
        with self._wake:
            self._stopped = True
            self._wake.notify()
        self._thread.join(JOIN_SECONDS)
        return not self.alive

    # --- the engine's thread ------------------------------------------------------------------------------------------

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def _work(self) -> None:
        try:
            self._serve_until_stopped()
        except BaseException as fault:
            # A broken device or a mistake of ours: nobody may wait for a thread that is gone.
            ours = EngineError(f"the engine's thread ended: {type(fault).__name__}")
            failure = fault if isinstance(fault, DeviceFault) else ours
            logger.critical("the engine has given up", exc_info=fault)
            self.failure = self._crossing.closing = failure
            self._tell(self._crossing.everyone(failure))
            if not isinstance(fault, Exception):
                raise

    def _serve_until_stopped(self) -> None:
        engine, crossing = self._engine, self._crossing
        while True:
            with self._wake:
                while not (crossing.has_letters or self._stopped or engine.has_work):
                    self._busy_since = math.inf
                    self._wake.wait()
                if self._busy_since == math.inf:
                    self._busy_since = engine.clock()
                while not self._stopped and (spare := engine.spare) > 0:
                    self._wake.wait(spare)
            self._tell(crossing.deliver_letters())
            if self._stopped:
                self._tell(engine.abandon(ShuttingDown("the server is shutting down")))
                return
            self._tell(engine.tick())
            if engine.idle:
                with self._wake:
                    self._wake.wait(IDLE_SECONDS)  # for company, see Policy.batch_window

    def _tell(self, said: Said) -> None:
        if said and self._loop is not None and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # closed just now: nobody listens any more
                self._loop.call_soon_threadsafe(self._crossing.publish, said)
