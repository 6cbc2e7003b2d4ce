"""The crossing between the event loop and the engine's thread: requests one way, deltas the other.

Knows threads and asyncio. Knows nothing of what a tick does.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

from jaxserve.engine.engine import Engine
from jaxserve.engine.request import Delta, FinishReason, Limits, Request
from jaxserve.engine.scheduler import check
from jaxserve.errors import EngineError, InvalidRequest, JaxserveError, Overloaded, ShuttingDown

IDLE_SECONDS = 0.001
JOIN_SECONDS = 10.0


class Stream:
    """The deltas of one request, for one reader on the event loop. Those that wait for a slow reader are merged."""

    def __init__(self, request: Request, cancel: Callable[[str, FinishReason], None]) -> None:
        self.request = request
        self._cancel = cancel
        self._deltas: deque[Delta] = deque()
        self._arrived = asyncio.Event()
        self._done = False

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        while not self._deltas:
            if self._done:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        deltas = tuple(self._deltas)
        self._deltas.clear()
        last = deltas[-1]
        return Delta(
            tokens=tuple(token for delta in deltas for token in delta.tokens),
            logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
            finish_reason=last.finish_reason,
            error=last.error,
        )

    def cancel(self, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Frees the slot. Does nothing when the request has ended; may be called more than once.

        ``reason`` is what it counts as: ``STOP`` if its reader has found a stop string.
        """
        if not self._done:
            self._done = True
            self._deltas.clear()
            self._cancel(self.request.id, reason)
            self._arrived.set()

    def put(self, delta: Delta) -> None:
        """Takes a delta; called on the event loop."""
        if self._done:
            return
        self._deltas.append(delta)
        self._done = delta.finish_reason is not None
        self._arrived.set()


class AsyncEngine:
    """An engine in a thread of its own, used from one event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._streams: dict[str, Stream] = {}
        self._wake = threading.Condition()
        self._arrivals: deque[Request] = deque()
        self._cancels: deque[tuple[str, FinishReason]] = deque()
        self._closing: JaxserveError | None = None
        self._stopped = False
        self._last_tick = time.monotonic()
        self._busy = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    @property
    def limits(self) -> Limits:
        """What a request may ask for."""
        return self._engine.limits

    def submit(self, request: Request) -> Stream:
        """Hands a request over; call on the event loop.

        Raises:
            InvalidRequest, ContextLengthExceeded: the request is wrong.
            Overloaded: the queue is full.
            ShuttingDown: the engine takes no more. EngineError: its thread has died.
        """
        if self._closing is not None:
            raise self._closing
        if request.id in self._streams:
            raise InvalidRequest(f"request id {request.id} is in use", param="id")
        check(request, self.limits)
        if len(self._streams) >= self._engine.capacity:
            self._engine.metrics.refused.inc()
            raise Overloaded(f"the queue is full: {len(self._streams)} requests are here", retry_after=1.0)
        self._loop = asyncio.get_running_loop()
        stream = Stream(request, self._cancel)
        self._streams[request.id] = stream
        with self._wake:
            self._arrivals.append(request)
            self._wake.notify()
        return stream

    def heartbeat(self) -> float:
        """Seconds since the last tick while there is work, else 0; without end when the thread has died."""
        if not self.alive and not self._stopped:
            return math.inf
        return time.monotonic() - self._last_tick if self._busy else 0.0

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
        self._closing = self._closing or ShuttingDown("the server is shutting down")
        while self._streams and time.monotonic() < deadline and self.alive:
            time.sleep(0.01)
        with self._wake:
            self._stopped = True
            self._wake.notify()
        self._thread.join(JOIN_SECONDS)
        return not self.alive

    # --- the engine's thread ------------------------------------------------------------------------------------------

    def _cancel(self, request_id: str, reason: FinishReason) -> None:
        self._streams.pop(request_id, None)
        with self._wake:
            self._cancels.append((request_id, reason))
            self._wake.notify()

    def _work(self) -> None:
        try:
            self._serve_until_stopped()
        except BaseException as fault:
            # A mistake of ours, not of a step: nobody may wait for a thread that is gone.
            self._closing = EngineError(f"the engine's thread ended: {type(fault).__name__}")
            lost = Delta(finish_reason=FinishReason.ERROR, error=self._closing)
            self._tell([(request_id, lost) for request_id in tuple(self._streams)])
            raise

    def _serve_until_stopped(self) -> None:
        while True:
            with self._wake:
                while not (self._arrivals or self._cancels or self._stopped or self._engine.has_work):
                    self._busy = False
                    self._wake.wait()
                if not self._busy:
                    self._last_tick = time.monotonic()
                    self._busy = True
                arrivals, cancels = tuple(self._arrivals), tuple(self._cancels)
                self._arrivals.clear()
                self._cancels.clear()
                stopped = self._stopped
            said = self._take(arrivals)
            for request_id, reason in cancels:  # after the arrivals: one may have come and gone in between
                self._engine.cancel(request_id, reason)
            if stopped:
                self._tell(said + self._engine.abandon(ShuttingDown("the server is shutting down")))
                return
            self._tell(said + self._engine.tick())
            self._last_tick = time.monotonic()
            if self._engine.idle:
                with self._wake:
                    self._wake.wait(IDLE_SECONDS)  # for company, see Policy.batch_window

    def _take(self, arrivals: tuple[Request, ...]) -> list[tuple[str, Delta]]:
        refused = []
        for request in arrivals:
            try:
                self._engine.submit(request)
            except JaxserveError as error:
                if isinstance(error, Overloaded):
                    self._engine.metrics.refused.inc()
                refused.append((request.id, Delta(finish_reason=FinishReason.ERROR, error=error)))
        return refused

    def _tell(self, said: list[tuple[str, Delta]]) -> None:
        if said and self._loop is not None and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # closed just now: nobody listens any more
                self._loop.call_soon_threadsafe(self._publish, said)

    def _publish(self, said: list[tuple[str, Delta]]) -> None:
        for request_id, delta in said:
            stream = self._streams.get(request_id)
            if stream is None:
                continue
            stream.put(delta)
            if delta.finish_reason is not None:
                del self._streams[request_id]
