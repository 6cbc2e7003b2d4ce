"""Who waits, and whose turn it is: the tenant that got least goes first, and within a tenant who came first.

Service is counted in tokens as in Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): a token read
costs one, a token written two, and a tenant that comes back starts level with the least served of those who are here,
so that silence earns no credit. Knows no slot and no clock.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator

from jaxserve.engine.work import Running

READ, WRITTEN = 1, 2


class Queue:
    """Requests without a slot, and what each tenant has had."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Running]] = {}
        self._service: dict[str, int] = {}
        self._here: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[Running]:
        for line in self._waiting.values():
            yield from line

    # --- coming and going ---------------------------------------------------------------------------------------------

    def push(self, running: Running) -> None:
        """A new request joins its tenant's line."""
        tenant = running.request.tenant
        if not self._here[tenant]:
            present = [self._service[other] for other, count in self._here.items() if count and other != tenant]
            if not present:
                self._service.clear()  # nobody to be level with
            self._service[tenant] = max(self._service.get(tenant, 0), min(present, default=0))
        self._here[tenant] += 1
        self._waiting.setdefault(tenant, deque()).append(running)

    def take(self, running: Running) -> None:
        """It has a slot now."""
        self._leave_line(running)

    def read(self, running: Running) -> None:
        """Its tenant has its prompt read."""
        self._service[running.request.tenant] += READ * len(running.request.prompt)

    def written(self, running: Running, count: int) -> None:
        """Its tenant has had ``count`` tokens written."""
        self._service[running.request.tenant] += WRITTEN * count

    def forget(self, running: Running) -> None:
        """A request has ended, whether it had a slot or not."""
        if running.slot < 0:
            self._leave_line(running)
        tenant = running.request.tenant
        self._here[tenant] -= 1
        if not self._here[tenant]:
            del self._here[tenant]  # what it has had stays known while others are here

    def _leave_line(self, running: Running) -> None:
        line = self._waiting[running.request.tenant]
        line.remove(running)
        if not line:
            del self._waiting[running.request.tenant]

    # --- questions ----------------------------------------------------------------------------------------------------

    def next(self, may: Callable[[Running], bool]) -> Running | None:
        """Whose turn it is among those who may have a slot; the others go on waiting."""
        firsts = [first for line in self._waiting.values() if (first := next(filter(may, line), None)) is not None]
        return min(firsts, key=lambda one: (self._service[one.request.tenant], one.arrived), default=None)
