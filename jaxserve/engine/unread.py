"""What waits for its readers, all streams together: bounded, at the expense of whoever has left most of it.

One stream is bounded by its own ``max_tokens``. But one who asks for long answers with many log-probabilities, reads
none of them and comes again would fill the memory all the same, since an answer that is finished holds no slot. Knows
sizes in bytes, roughly; knows no stream.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from jaxserve.engine.request import Delta

Owner = TypeVar("Owner", bound=Hashable)

MOST_BYTES = 16 * 2**20
_DELTA, _TOKEN, _LOGPROB, _ALTERNATIVE, _PASS = 128, 64, 224, 112, 512  # as CPython keeps them


def size_of(delta: Delta) -> int:
    """Bytes that a delta takes while it waits."""
    logprobs = sum(_LOGPROB + _ALTERNATIVE * len(entry.top) for entry in delta.logprobs)
    passes = sum(_PASS + _TOKEN * (len(one.tokens) + len(one.canvas)) for one in delta.passes)
    return _DELTA + _TOKEN * (len(delta.tokens) + len(delta.canvas)) + logprobs + passes


class Unread(Generic[Owner]):
    """An account in bytes. Not safe in threads.

    Args:
        most: bytes that may wait in all.
    """

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._most = most
        self._total = 0
        self._by_owner: dict[Owner, int] = {}

    def add(self, owner: Owner, size: int) -> None:
        """So much more waits for ``owner``."""
        self._total += size
        self._by_owner[owner] = self._by_owner.get(owner, 0) + size

    def clear(self, owner: Owner) -> None:
        """Nothing waits for ``owner`` any more."""
        self._total -= self._by_owner.pop(owner, 0)

    def slowest(self) -> Owner | None:
        """Who has to give way: for whom most waits, if more waits than may."""
        if self._total <= self._most:
            return None
        return max(self._by_owner, key=lambda owner: self._by_owner[owner])
