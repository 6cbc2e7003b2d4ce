"""What the C library does with large buffers that are no longer needed. Knows glibc; elsewhere it does nothing."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Final

_TRIM_THRESHOLD: Final = -1  # parameters of mallopt(3)
_MMAP_THRESHOLD: Final = -3
_LARGE_BYTES: Final = 4 << 20
_USUAL_BYTES: Final = 32 << 20  # where glibc's own adjustment ends; it is off once anything has been set


@contextlib.contextmanager
def returned_at_once() -> Iterator[None]:
    """Inside of it, buffers of 4 MiB and more go back to the system when they are freed.

    By itself glibc keeps those below 32 MiB once it has seen some, for each thread: hundreds of megabytes that nobody
    uses. Afterwards they are kept again, as they are in any process that has run for a while: programs on a CPU take
    and free the same ones at every step.
    """
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    if option is None:
        yield
        return
    option(_MMAP_THRESHOLD, _LARGE_BYTES)
    try:
        yield
    finally:
        option(_MMAP_THRESHOLD, _USUAL_BYTES)
        option(_TRIM_THRESHOLD, 2 * _USUAL_BYTES)
