"""Who may be prepared: a bounded number of requests between their heads and the engine's queue, shared among tenants.

A request holds a place while its body is received, rendered and tokenised, the last two in one of a few threads. Places
bound memory and waiting; that they are shared keeps one tenant's long texts, and clients that send slowly, from taking
them all. Knows tenants, places and threads. Knows no HTTP, no text and no engine. Used from one event loop.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxserve.errors import DeadlineExceeded, Overloaded


class Place:
    """One request's place: first it receives, then it waits for its turn, then it runs in a thread."""

    def __init__(self, admission: Admission, tenant: str, limit: asyncio.Timeout) -> None:
        self.tenant = tenant
        self.limit = limit
        self.receiving = True
        self.evicted = False
        self.holds_thread = False
        self.granted: asyncio.Future[None] | None = None
        self._admission = admission

    async def turn(self) -> None:
        """Waits for a thread; everything has been received."""
        await self._admission.turn(self)

    async def run(self, work: Callable[..., Any], *args: Any) -> Any:
        """Runs ``work(*args)`` in the thread that ``turn`` has waited for.

        Whoever is cancelled meanwhile leaves at once; the thread is free for others when the work has ended.
        """
        return await self._admission.run(self, work, *args)


class Admission:
    """All places of a service.

    Args:
        places: requests that are received, rendered or tokenised at once; one more takes a place away or is refused.
        threads: how many of them are rendered or tokenised at once.
        retry_after: what those are told that get no place, in seconds.
    """

    def __init__(self, places: int, threads: int, retry_after: float) -> None:
        self._most = places
        self._retry_after = retry_after
        self._places: dict[Place, None] = {}  # in order of arrival
        self._waiting: dict[str, collections.deque[Place]] = {}  # by tenant; the first tenant is the next
        self._idle_threads = threads
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="prepare")

    def __len__(self) -> int:
        return len(self._places)

    @contextlib.asynccontextmanager
    async def place(self, tenant: str, deadline: float | None = None) -> AsyncIterator[Place]:
        """A place for as long as the block lasts.

        Args:
            tenant: who asks; tenants share the places evenly when there are too few.
            deadline: on the monotonic clock; time spent in the block counts.

        Raises:
            Overloaded: there is no place, or it was taken back for somebody who needs it more.
            DeadlineExceeded: the deadline passed within the block.
        """
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise _too_late()
        if len(self._places) >= self._most:
            self._make_room(tenant)
        place = Place(self, tenant, asyncio.timeout(left))
        self._places[place] = None
        try:
            async with place.limit:
                yield place
        except TimeoutError:
            if not place.limit.expired():
                raise
            raise (self._refusal() if place.evicted else _too_late()) from None
        finally:
            self._leave(place)

    async def turn(self, place: Place) -> None:
        """See ``Place.turn``."""
        place.receiving = False
        if self._idle_threads:
            self._idle_threads -= 1
            place.holds_thread = True
            return
        place.granted = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(place.tenant, collections.deque()).append(place)
        await place.granted

    async def run(self, place: Place, work: Callable[..., Any], *args: Any) -> Any:
        """See ``Place.run``."""
        loop = asyncio.get_running_loop()
        job = self._threads.submit(work, *args)
        place.holds_thread = False  # the job does, until it ends

        def ended(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._release_thread)

        job.add_done_callback(ended)
        return await asyncio.wrap_future(job)

    def _make_room(self, tenant: str) -> None:
        """Takes a place from the tenant that has the most, the newcomer's own if it is among them.

        The one that has been receiving the longest goes first: it costs nothing yet but its place. A tenant that has
        clearly more than the newcomer also loses the last that waits for a thread.
        """
        held = collections.Counter(place.tenant for place in self._places)
        greediest = max(held, key=lambda name: (held[name], name == tenant))
        victim = next((place for place in self._places if place.tenant == greediest and place.receiving), None)
        if victim is None and held[greediest] > held[tenant] + 1 and self._waiting.get(greediest):
            victim = self._waiting[greediest][-1]
        if victim is None:
            raise self._refusal()
        victim.evicted = True
        self._forget(victim)
        if not victim.limit.expired():
            victim.limit.reschedule(asyncio.get_running_loop().time())

    def _leave(self, place: Place) -> None:
        self._forget(place)
        if place.holds_thread:
            self._release_thread()

    def _forget(self, place: Place) -> None:
        self._places.pop(place, None)
        queue = self._waiting.get(place.tenant)
        if queue is not None and place in queue:
            queue.remove(place)
            if not queue:
                del self._waiting[place.tenant]

    def _release_thread(self) -> None:
        """Gives a thread to the next: tenants take turns, and each has its own order of arrival."""
        if not self._waiting:
            self._idle_threads += 1
            return
        tenant = next(iter(self._waiting))
        queue = self._waiting.pop(tenant)
        place = queue.popleft()
        if queue:
            self._waiting[tenant] = queue
        place.holds_thread = True
        if place.granted is not None and not place.granted.done():
            place.granted.set_result(None)

    def _refusal(self) -> Overloaded:
        return Overloaded("Too many requests are being read.", retry_after=self._retry_after)


def _too_late() -> DeadlineExceeded:
    return DeadlineExceeded("The request's deadline passed before it could be run.")
