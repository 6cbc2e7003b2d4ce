"""The slots of a pool: who has them, and who may have one.

Knows counts and shares. Knows no queue and no time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from jaxserve.engine.work import Running


class Slots:
    """One pool's slots.

    Attributes:
        free: those that nobody has, ascending.
        running: who has which.
    """

    def __init__(self, slots: int) -> None:
        self.free = list(range(slots))
        self.running: dict[int, Running] = {}

    def take(self, running: Running) -> None:
        """Gives it the first slot that is free."""
        running.slot = self.free.pop(0)
        self.running[running.slot] = running

    def give_back(self, running: Running) -> None:
        """It needs its slot no more."""
        del self.running[running.slot]
        self.free.append(running.slot)
        self.free.sort()


class Seats:
    """Who may still have a slot: one must be free in the pool, and the tenant must not hold its whole share.

    Args:
        most: requests that may hold one at once.
        share: how many of so many slots one tenant may hold.
    """

    def __init__(self, most: int, share: Callable[[int], int], pools: Sequence[Slots]) -> None:
        held = [running for pool in pools for running in pool.running.values()]
        self._room = most - len(held)
        self._free = [len(pool.free) for pool in pools]
        self._most = share(most)
        self._most_of = [share(len(pool.free) + len(pool.running)) for pool in pools]
        self._held = Counter(running.request.tenant for running in held)
        self._held_of = Counter((running.request.tenant, running.pool) for running in held)

    def open(self, running: Running) -> bool:
        """Whether there is a slot for it."""
        tenant, pool = running.request.tenant, running.pool
        within_share = self._held[tenant] < self._most and self._held_of[tenant, pool] < self._most_of[pool]
        return self._room > 0 and self._free[pool] > 0 and within_share

    def take(self, running: Running) -> None:
        """It gets one."""
        self._room -= 1
        self._free[running.pool] -= 1
        self._held[running.request.tenant] += 1
        self._held_of[running.request.tenant, running.pool] += 1
