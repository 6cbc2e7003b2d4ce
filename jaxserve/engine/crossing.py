"""What lies between the readers of streams and the engine: letters one way, deltas the other.

Two sides that may be two threads: the readers' side (an event loop) and the engine's side. Knows no thread and no loop
itself, so that a simulator can play both sides in turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from functools import partial

from jaxserve.engine.engine import Engine
from jaxserve.engine.request import Delta, FinishReason, Request, check
from jaxserve.engine.unread import Unread, size_of
from jaxserve.errors import EngineError, InvalidRequest, JaxserveError, Overloaded

logger = logging.getLogger(__name__)

Said = list[tuple[str, Delta]]


class Stream:
    """The deltas of one request, for one reader. Those that wait for a slow reader are merged.

    What waits is bounded by the request's own ``max_tokens``, however slow the reader is; ``unread`` is the account of
    all streams together.

    Attributes:
        generated: tokens that have come, read or not, until it ended.
    """

    def __init__(
        self,
        request: Request,
        cancel: Callable[[Request, FinishReason], None],
        unread: Unread[Stream] | None = None,
    ) -> None:
        self.request = request
        self.generated = 0
        self._cancel = cancel
        self._unread: Unread[Stream] = Unread() if unread is None else unread
        self._deltas: deque[Delta] = deque()
        self._arrived = asyncio.Event()
        self._done = False

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        while (delta := self.take()) is None:
            if self._done:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return delta

    def take(self) -> Delta | None:
        """What is there, as one delta, without waiting."""
        if not self._deltas:
            return None
        deltas = tuple(self._deltas)
        self._deltas.clear()
        self._unread.clear(self)
        last = deltas[-1]
        return Delta(
            tokens=tuple(token for delta in deltas for token in delta.tokens),
            logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
            finish_reason=last.finish_reason,
            error=last.error,
            account=last.account,
            canvas=last.canvas,
            passes=tuple(one for delta in deltas for one in delta.passes),
        )

    def cancel(self, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Frees the slot. Does nothing when the request has ended; may be called more than once.

        ``reason`` is what it counts as: ``STOP`` if its reader has found a stop string.
        """
        self._unread.clear(self)
        if not self._done:
            self._done = True
            self._deltas.clear()
            self._cancel(self.request, reason)
            self._arrived.set()

    def put(self, delta: Delta) -> None:
        """Takes a delta; called on the readers' side."""
        if self._done:
            return
        self._deltas.append(delta)
        self._unread.add(self, size_of(delta))
        self.generated += len(delta.tokens)
        self._done = delta.finish_reason is not None
        self._arrived.set()

    def fail(self, error: JaxserveError) -> None:
        """Frees the slot and tells the reader why, and nothing else; called on the readers' side."""
        self.cancel(FinishReason.ERROR)
        self._deltas.clear()
        self._deltas.append(Delta(finish_reason=FinishReason.ERROR, error=error))


class Crossing:
    """The streams of an engine.

    Args:
        engine: nothing but ``deliver_letters`` changes it.
        wake: tells the engine's side that there are letters; called on the readers' side.

    Attributes:
        closing: once set, raised for every new request.
    """

    def __init__(self, engine: Engine, wake: Callable[[], None]) -> None:
        self.closing: JaxserveError | None = None
        self._engine = engine
        self._wake = wake
        self._streams: dict[str, Stream] = {}
        self._unread: Unread[Stream] = Unread()
        self._tenants: Counter[str] = Counter()
        self._letters: deque[Callable[[], Said]] = deque()

    # --- the readers' side --------------------------------------------------------------------------------------------

    @property
    def streams(self) -> int:
        """Requests that are here or on their way."""
        return len(self._streams)

    def room(self, tenant: str = "", *, patient: bool = False) -> None:
        """Whether one more request of a tenant would be taken; one that is ``patient`` will ask again if not.

        Raises:
            Overloaded: the queue is full, and no other tenant has more in it.
            ShuttingDown, EngineError: nothing is taken any more.
        """
        self._refuse_when_closing()
        if len(self._streams) < self._engine.capacity:
            return
        # A little above the capacity the engine may decide who gives way, see ``Scheduler.submit``.
        greedier = self._tenants[tenant] + 1 < max(self._tenants.values(), default=0)
        if not greedier or len(self._streams) >= 2 * self._engine.capacity:
            self._count_refused(patient)
            message = f"the queue is full: {len(self._streams)} requests are here"
            raise Overloaded(message, retry_after=self._engine.retry_after)

    def submit(self, request: Request, *, patient: bool = False) -> Stream:
        """Sends a request over; one that is ``patient`` comes again if there is no room, and is not counted as refused.

        Raises:
            InvalidRequest, ContextLengthExceeded: the request is wrong. Quarantined: it made a step fail.
            Overloaded, ShuttingDown, EngineError: see ``room``.
        """
        self._refuse_when_closing()
        if request.id in self._streams:
            raise InvalidRequest(f"request id {request.id} is in use", param="id")
        check(request, self._engine.limits)
        self._engine.quarantine.check(request, self._engine.clock())
        self.room(request.tenant, patient=patient)
        stream = Stream(request, self._send_cancel, self._unread)
        self._streams[request.id] = stream
        self._tenants[request.tenant] += 1
        try:
            self._refuse_when_closing()  # it may close just now, from the other side, and have missed this one
        except JaxserveError:
            self._forget(request)
            raise
        self._send(partial(self._submit, request, patient))
        return stream

    def cancel_tenant(self, tenant: str, error: JaxserveError) -> int:
        """Ends every request of a tenant with an error; returns how many there are."""
        self._send(partial(self._engine.end_tenant, tenant, error))
        return self._tenants[tenant]

    def publish(self, said: Said) -> None:
        """Hands deltas to their streams."""
        for request_id, delta in said:
            stream = self._streams.get(request_id)
            if stream is None:
                continue
            try:
                stream.put(delta)
            except Exception as fault:  # noqa: BLE001 - the deltas behind this one are for others
                stream.fail(_failed(stream.request, fault))
                continue
            if delta.finish_reason is not None:
                self._forget(stream.request)
        while (slowest := self._unread.slowest()) is not None:
            self._engine.metrics.shortages.labels("unread").inc()
            logger.warning("a reader is too slow", extra={"fields": {"request": slowest.request.id}})
            slowest.fail(Overloaded("too much of what was written is unread", retry_after=self._engine.retry_after))

    def everyone(self, error: JaxserveError) -> Said:
        """What to publish when the engine's side is gone; may be called from there."""
        lost = Delta(finish_reason=FinishReason.ERROR, error=error)
        return [(request_id, lost) for request_id in tuple(self._streams)]

    def _refuse_when_closing(self) -> None:
        if self.closing is not None:
            raise self.closing

    def _forget(self, request: Request) -> None:
        if self._streams.pop(request.id, None) is not None:
            self._tenants[request.tenant] -= 1
            if not self._tenants[request.tenant]:
                del self._tenants[request.tenant]

    def _send_cancel(self, request: Request, reason: FinishReason) -> None:
        self._forget(request)
        self._send(partial(self._cancel, request.id, reason))

    def _send(self, letter: Callable[[], Said]) -> None:
        self._letters.append(letter)
        self._wake()

    # --- the engine's side --------------------------------------------------------------------------------------------

    @property
    def has_letters(self) -> bool:
        """Whether ``deliver_letters`` would do anything."""
        return bool(self._letters)

    def deliver_letters(self) -> Said:
        """Does what was asked, in order; returns what is to be published."""
        said: Said = []
        while self._letters:
            said += self._letters.popleft()()
        return said

    def _submit(self, request: Request, patient: bool) -> Said:
        try:
            return self._engine.submit(request)
        except JaxserveError as error:
            if isinstance(error, Overloaded):
                self._count_refused(patient)
            return [(request.id, Delta(finish_reason=FinishReason.ERROR, error=error))]
        except Exception as fault:  # noqa: BLE001 - a mistake of ours that this request met, and nobody else
            return [(request.id, Delta(finish_reason=FinishReason.ERROR, error=_failed(request, fault)))]

    def _cancel(self, request_id: str, reason: FinishReason) -> Said:
        self._engine.cancel(request_id, reason)
        return []

    def _count_refused(self, patient: bool) -> None:
        if not patient:
            self._engine.metrics.refused.inc()


def _failed(request: Request, fault: Exception) -> EngineError:
    logger.error("a request failed", exc_info=fault, extra={"fields": {"request": request.id}})
    error = EngineError(f"this request failed: {type(fault).__name__}")
    error.__cause__ = fault
    return error
