"""Files that are read anew when they change, while what they said before holds until the new text is known to be good.

A thread looks at them twice a second. It follows links, because orchestrators swap a link to a folder of new files, and
it compares contents, because a clock's grain can hide a change. Knows no format: what a file means is its reader's.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxserve.errors import ConfigError

logger = logging.getLogger(__name__)

INTERVAL = 0.5  # seconds between two looks
_QUIET = 0.05  # seconds for which a file must not change before it is read: half of it may not be written yet
_GRAIN = 2.0  # seconds within which a second change may leave a file's times as they are
_PATIENCE = 10  # times that a file may still have changed before it is read all the same


@dataclasses.dataclass(slots=True)
class _Watch:
    """Files that belong together; ``seen`` are their times and sizes, ``digest`` is what stood in them."""

    name: str
    paths: tuple[Path, ...]
    renew: Callable[[], None]
    seen: tuple[object, ...] = ()
    digest: bytes = b""


class Watcher:
    """Looks at files and has them read anew; ``start`` begins, ``stop`` ends it.

    Args:
        failed: called with a watch's name whenever its new text was of no use.
    """

    def __init__(self, failed: Callable[[str], None] | None = None, interval: float = INTERVAL) -> None:
        self._failed = failed
        self._interval = interval
        self._watches: list[_Watch] = []
        self._wake = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None

    def watch(self, name: str, paths: Sequence[Path], renew: Callable[[], None]) -> None:
        """Has ``renew`` called, in the watching thread, when one of ``paths`` is not what it is now.

        ``renew`` raises ``ConfigError`` if the new text is of no use; what was before must then still hold. Whoever
        watches first and reads then misses no change.
        """
        watch = _Watch(name, tuple(paths), renew)
        watch.seen, watch.digest = _seen(watch.paths), _digest(watch.paths)
        self._watches.append(watch)

    def __bool__(self) -> bool:
        """Whether there is anything to look at."""
        return bool(self._watches)

    def start(self) -> None:
        """Looks from now on; if there is nothing to look at, there is no thread."""
        if self._watches and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="watching", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(self._interval + 1)

    def look_soon(self) -> None:
        """Looks at once instead of at the next turn; a signal handler may call it, but must not meet ``stop``."""
        if not self._stopped:
            self._wake.set()

    def look(self) -> None:
        """Looks at every file once."""
        for watch in self._watches:
            if self._changed(watch):
                self._renew(watch)

    def _run(self) -> None:
        while not self._stopped:
            self._wake.wait(self._interval)
            self._wake.clear()
            if not self._stopped:
                self.look()

    def _changed(self, watch: _Watch) -> bool:
        """Whether something else stands in the files, and for long enough to be all of it."""
        seen = _seen(watch.paths)
        if seen == watch.seen and not _fresh(watch.paths):
            return False
        digest = _digest(watch.paths)
        for _ in range(_PATIENCE if digest != watch.digest else 0):
            time.sleep(_QUIET)
            before, seen, digest = digest, _seen(watch.paths), _digest(watch.paths)
            if digest == before:
                break
        changed = digest != watch.digest
        watch.seen, watch.digest = seen, digest
        return changed

    def _renew(self, watch: _Watch) -> None:
        try:
            watch.renew()
        except ConfigError as error:
            self._note(watch, error.message)
        except Exception as error:  # noqa: BLE001 - a mistake of ours must not end the watch
            self._note(watch, f"unexpected {type(error).__name__}")
        else:
            logger.info("reloaded", extra={"fields": {"file": watch.name}})

    def _note(self, watch: _Watch, reason: str) -> None:
        logger.error("reload failed; what was before holds", extra={"fields": {"file": watch.name, "reason": reason}})
        if self._failed is not None:
            self._failed(watch.name)


def _seen(paths: tuple[Path, ...]) -> tuple[object, ...]:
    """What tells that a file was written or replaced, without reading it; links are followed."""
    return tuple(_times(path) for path in paths)


def _times(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _fresh(paths: tuple[Path, ...]) -> bool:
    """Whether one was written so lately that it may have been written again in the same grain of its times."""
    now = time.time()
    return any(times is not None and now - times[3] / 1e9 < _GRAIN for times in map(_times, paths))


def _digest(paths: tuple[Path, ...]) -> bytes:
    digest = hashlib.sha256()
    for path in paths:
        try:
            content = path.read_bytes() if path.is_file() else b""  # a pipe would be waited for
            digest.update(b"%d " % len(content) + content)
        except OSError as error:
            digest.update(b"- %d " % (error.errno or 0))
    return digest.digest()
