"""What the process must not run out of: file descriptors and memory. It refuses newcomers before there are none left.

Knows Linux: the limits of a process, control groups of both versions, resident memory. Knows no HTTP.
"""

from __future__ import annotations

import ctypes
import enum
import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

# A tenth of the descriptors, half of it for saying no: an answer needs a connection, too.
DESCRIPTOR_SHARE = 0.1
LEAST_RESERVE = 16

READ_SECONDS = 0.1  # how long a reading of the memory is good for
RELIEF_SECONDS = 5.0  # between two attempts to give memory back
_UNLIMITED = 2**60  # version 1 writes the largest number of pages for "no limit"


class Room(enum.Enum):
    """What can be done with a new connection."""

    SERVE = "serve"
    REFUSE = "refuse"
    CLOSE = "close"


def room_for(descriptor: int) -> Room:
    """What can be done with a connection that got this descriptor.

    The kernel gives the lowest number that is free, so a high one says that all below are taken: no count is needed.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return Room.SERVE
    reserve = max(LEAST_RESERVE, int(limit * DESCRIPTOR_SHARE))
    if descriptor < limit - reserve:
        return Room.SERVE
    return Room.REFUSE if descriptor < limit - reserve // 2 else Room.CLOSE


class Memory:
    """How near the process is to the end of its memory.

    Args:
        limit: bytes that it may take; ``None``: as many as there are, and nothing is refused.
        share: of the limit, from which on it is short.
        resident: bytes that it takes now.
    """

    def __init__(
        self,
        limit: int | None,
        share: float,
        resident: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = None if limit is None else int(limit * share)
        self._resident = resident or resident_bytes
        self._clock = clock
        self._short = False
        self._read_at = -READ_SECONDS
        self._relieved_at = -RELIEF_SECONDS

    def short(self) -> bool:
        """Whether it takes more than its share; as of a tenth of a second ago at most."""
        now = self._clock()
        if self._most is not None and now - self._read_at >= READ_SECONDS:
            self._short, self._read_at = self._resident() >= self._most, now
        return self._short

    def relieve(self) -> None:
        """Gives back to the system what is free, if it is short; may take a while, so not on the event loop.

        The C library keeps what was freed: after one bad moment it would be refused for ever.
        """
        now = self._clock()
        if self.short() and now - self._relieved_at >= RELIEF_SECONDS:
            self._relieved_at = now
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
            if trim is not None:
                trim(0)


def resident_bytes() -> int:
    """Bytes of this process that are in memory."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def cgroup_limit(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The least memory limit of the control groups that this process is in, in bytes; ``None`` if there is none."""
    found = []
    for path in _limit_files(proc, root):
        try:
            limit = int(path.read_text(encoding="ascii"))
        except (OSError, ValueError):  # another namespace's path, or "max"
            continue
        found += [limit] if limit < _UNLIMITED else []
    return min(found, default=None)


def _limit_files(proc: Path, root: Path) -> Iterator[Path]:
    """Where a limit may stand: the process's own group and every group around it."""
    try:
        lines = proc.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            folder, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            folder, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        place = folder / group.lstrip("/")
        while True:
            yield place / name
            if place == folder or folder not in place.parents:
                break
            place = place.parent
