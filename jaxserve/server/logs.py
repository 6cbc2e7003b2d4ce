"""How log lines look, for people or one JSON object a line, and how they leave: no request ever waits for a reader.

Knows formats and a descriptor. What goes into a line is decided where it is written; a record's ``fields``
(``extra={"fields": {...}}``) become keys of the object, its ``stacks`` are shown as they are. Control characters are
escaped in both formats, so that a line stays one line.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import queue
import select
import threading
from collections.abc import Callable
from typing import Any

from jaxserve.config import LogConfig

MOST_LINES = 10_000  # that wait for a reader
FLUSH_SECONDS = 1.0
_STANDARD_ERROR = 2

# --- formats ----------------------------------------------------------------------------------------------------------


class JSONFormatter(logging.Formatter):
    """``{"time": ..., "level": ..., "logger": ..., "message": ..., ...fields}``."""

    def format(self, record: logging.LogRecord) -> str:
        """One line; a traceback becomes the key ``traceback``."""
        line: dict[str, Any] = {
            "time": _time(record).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        if hasattr(record, "stacks"):
            line["stacks"] = record.stacks
        # In ASCII: what turns text around or breaks lines for one reader or another is escaped.
        return json.dumps(line, separators=(",", ":"), default=str)


class ConsoleFormatter(logging.Formatter):
    """``12:34:56 INFO     message  key=value ...``."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the lines of a traceback or of stacks if there are any."""
        fields = "".join(f" {key}={value}" for key, value in getattr(record, "fields", {}).items())
        line = f"{_time(record):%H:%M:%S} {record.levelname:<8} {_printable(record.getMessage() + fields)}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line + ("\n" + record.stacks if hasattr(record, "stacks") else "")


def _time(record: logging.LogRecord) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(record.created, tz=datetime.UTC).astimezone()


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


# --- the way out ------------------------------------------------------------------------------------------------------


def _uncounted() -> None:
    """Nobody counts what is dropped."""


class LineWriter(logging.Handler):
    """Hands lines to a thread that writes them to a descriptor.

    A pipe that nobody reads and a full disk hold up that thread alone. Lines that find ``MOST_LINES`` before them are
    dropped, as are those that the system refuses; the next line that gets through says how many.

    It writes to the descriptor, past ``sys.stderr``: a thread that is stuck in there holds a lock which the interpreter
    needs to end.

    Attributes:
        on_drop: called for each line that is lost.
    """

    def __init__(self, descriptor: int = _STANDARD_ERROR, most: int = MOST_LINES) -> None:
        super().__init__()
        self.on_drop: Callable[[], None] = _uncounted
        self._descriptor = descriptor
        self._most = most
        # A SimpleQueue may be put to by a signal handler that has interrupted a put; a Queue would lock itself.
        self._lines: queue.SimpleQueue[str | threading.Event | None] = queue.SimpleQueue()
        self._lost = 0
        self._torn = False
        threading.Thread(target=self._write_all, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Formats the line and leaves it to the thread."""
        if self._lines.qsize() >= self._most:
            self._lose()
            return
        try:
            self._lines.put(self.format(record))
        except Exception:  # noqa: BLE001 - a line that can't be formatted must not end what it tells of
            self._lose()

    def flush(self) -> None:
        """Waits until all is written, but not for long."""
        written = threading.Event()
        self._lines.put(written)
        written.wait(FLUSH_SECONDS)

    def close(self) -> None:
        """Ends the thread when it has written what is there."""
        self._lines.put(None)
        super().close()

    def _lose(self) -> None:
        self._lost += 1
        self.on_drop()

    def _write_all(self) -> None:
        while (item := self._lines.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            lost = self._lost
            if not self._write(item):
                self._lose()
            elif lost:
                self._lost -= lost
                self._write(self._formatted(f"{lost} log lines were lost"))

    def _write(self, line: str) -> bool:
        data = line.encode("utf-8", "backslashreplace") + b"\n"
        left = b"\n" + data if self._torn else data
        try:
            while left:
                try:
                    left = left[os.write(self._descriptor, left) :]
                except BlockingIOError:  # somebody else has made it so; it is shared
                    select.select([], [self._descriptor], [])
        except OSError:  # the disk is full, or the reader has gone
            self._torn = len(left) < len(data)
            return False
        self._torn = False
        return True

    def _formatted(self, message: str) -> str:
        return self.format(logging.LogRecord(__name__, logging.WARNING, __file__, 0, message, (), None))


def configure_logging(config: LogConfig, descriptor: int = _STANDARD_ERROR) -> LineWriter:
    """Sends all log records to standard error in the format that ``config`` names; never blocks who writes them."""
    writer = LineWriter(descriptor)
    writer.setFormatter(JSONFormatter() if config.format == "json" else ConsoleFormatter())
    logging.basicConfig(level=config.level.upper(), handlers=[writer], force=True)
    return writer
