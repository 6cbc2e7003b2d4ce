"""The audit log: who asked for what, and what became of it; one JSON object a line, appended, never rewritten.

Lines go through a bounded queue to a thread of their own, so that a slow or full disk holds up no request; what finds
no place is counted. Knows files and lines. No line holds a key, a prompt or an output.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.types import Message, Receive, Scope

from jaxserve.config import AuditConfig
from jaxserve.errors import ConfigError

logger = logging.getLogger(__name__)

_WAITING = 10_000  # lines
_END = None


class AuditLog:
    """An open audit log; ``close`` writes what is waiting.

    Args:
        path: the file; made if it is not there, and opened anew if it is moved away.
        fsync: whether lines are forced to the disk.
        body_digest: whether entries shall hold the digest of a request's body; for those who make them.
        dropped: called for each line that could not be kept.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(
        self,
        path: Path,
        *,
        fsync: bool = False,
        body_digest: bool = False,
        dropped: Callable[[], None] = lambda: None,
    ) -> None:
        self.body_digest = body_digest
        self._path = path
        self._fsync = fsync
        self._dropped = dropped
        self._lines: queue.Queue[bytes | None] = queue.Queue(_WAITING)
        self._failing = False
        self._torn = False
        try:
            self._file = self._open()
        except OSError as error:
            message = f"`audit.file`: {path} cannot be written: {error.strerror}."
            raise ConfigError(message, param="audit.file") from None
        self._thread = threading.Thread(target=self._work, name="audit", daemon=True)
        self._thread.start()

    def write(self, entry: dict[str, Any]) -> None:
        """Notes an entry, with the time; never waits."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        try:
            # In ASCII: what turns text around or breaks lines for one reader or another is escaped.
            self._lines.put_nowait(json.dumps({"time": now} | entry).encode("ascii") + b"\n")
        except queue.Full:
            self._dropped()

    def close(self, seconds: float = 5.0) -> None:
        """Writes what is waiting, for so long at most."""
        try:
            self._lines.put(_END, timeout=seconds)
        except queue.Full:
            return  # the disk holds the thread
        self._thread.join(seconds)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (line := self._lines.get()) is not _END:
            lines = [line]
            while len(lines) < 256 and not self._lines.empty():
                more = self._lines.get()
                if more is _END:
                    self._write(lines)
                    return
                lines.append(more)
            self._write(lines)

    def _write(self, lines: list[bytes]) -> None:
        failure: OSError | None = None
        for line in lines:
            try:
                self._follow()
                self._append(line)
            except OSError as error:
                failure = error
                self._dropped()
        try:
            if self._fsync:
                os.fsync(self._file)
        except OSError as error:
            failure = error
        if failure is not None and not self._failing:
            logger.error("audit log cannot be written", extra={"fields": {"reason": failure.strerror}})
        self._failing = failure is not None

    def _append(self, line: bytes) -> None:
        """One write a line, so that several processes may share the file; half a line is ended before the next."""
        data = b"\n" + line if self._torn else line
        written = os.write(self._file, data)
        self._torn = written < len(data)
        if self._torn:
            raise OSError(None, "half a line was written")

    def _follow(self) -> None:
        """Goes on in a new file if the old one was moved away or removed."""
        try:
            there = self._path.stat()
            here = os.fstat(self._file)
            moved = (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino)
        except FileNotFoundError:
            moved = True
        if moved:
            before, self._file = self._file, self._open()
            os.close(before)

    def _open(self) -> int:
        # Without waiting: a pipe that nobody reads would hold up the start.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        return os.open(self._path, flags, 0o600)


def audit_log(config: AuditConfig, dropped: Callable[[], None]) -> AuditLog | None:
    """The log of a section ``audit``; ``None`` if it asks for none.

    Raises:
        ConfigError: the file cannot be written.
    """
    if config.file is None:
        return None
    return AuditLog(config.file, fsync=config.fsync, body_digest=config.body_digest, dropped=dropped)


def digesting(receive: Receive, scope: Scope) -> Receive:
    """Receives the same, and leaves the SHA-256 of the body so far as ``body_sha256`` in the request's state."""
    digest = hashlib.sha256()

    async def receive_and_digest() -> Message:
        message = await receive()
        if message["type"] == "http.request":
            digest.update(message.get("body", b""))
            scope["state"]["body_sha256"] = digest.hexdigest()
        return message

    return receive_and_digest
