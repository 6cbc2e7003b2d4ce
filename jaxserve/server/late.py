"""Streams that begin when there is room for them. Knows the engine's refusals, and nothing of what is asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from jaxserve.engine.request import Delta, FinishReason, Request
from jaxserve.errors import DeadlineExceeded, Overloaded
from jaxserve.server.service import Engine, Stream

LOOK_AGAIN = 0.25  # seconds after which one that found no room tries again


class LateStream:
    """A stream that begins when there is room for it, in its turn among those of the same request.

    That there is none the engine may find only after it has taken the request: nothing has come of it then, and it is
    tried again.
    """

    def __init__(self, request: Request, engine: Engine, turn: asyncio.Lock, stream: Stream | None = None) -> None:
        self._request = request
        self._engine = engine
        self._turn = turn
        self._stream = stream
        self._deltas: AsyncIterator[Delta] | None = None
        self._cancelled = False

    @property
    def generated(self) -> int:
        """See ``Stream``."""
        return 0 if self._stream is None else self._stream.generated

    def cancel(self, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """See ``Stream``."""
        self._cancelled = True
        if self._stream is not None:
            self._stream.cancel(reason)

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        while True:
            if self._deltas is None:
                self._deltas = aiter(await self._begin())
            delta = await anext(self._deltas)
            if self.generated or not isinstance(delta.error, Overloaded):
                return delta
            self._stream = self._deltas = None
            await asyncio.sleep(min(delta.error.retry_after, LOOK_AGAIN))

    async def _begin(self) -> Stream:
        """Waits for room."""
        deadline = self._request.deadline
        async with self._turn:
            while self._stream is None:
                if self._cancelled:
                    raise StopAsyncIteration
                if deadline is not None and time.monotonic() >= deadline:
                    raise DeadlineExceeded("The request's deadline passed before it was done.")
                try:
                    self._stream = self._engine.submit(self._request, patient=True)
                except Overloaded as full:
                    await asyncio.sleep(min(full.retry_after, LOOK_AGAIN))
        return self._stream
