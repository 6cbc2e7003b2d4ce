"""How log lines look: for people, or one JSON object a line.

Knows formats. What goes into a line is decided where it is written; a record's ``fields`` (``extra={"fields": {...}}``)
become keys of the object. Control characters are escaped in both formats, so that a line stays one line.
"""

from __future__ import annotations

import datetime
import logging
from typing import Any

import msgspec

from jaxserve.config import LogConfig


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
        return msgspec.json.encode(line).decode()


class ConsoleFormatter(logging.Formatter):
    """``12:34:56 INFO     message  key=value ...``."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the lines of a traceback if there is one."""
        fields = "".join(f" {key}={value}" for key, value in getattr(record, "fields", {}).items())
        line = f"{_time(record):%H:%M:%S} {record.levelname:<8} {_printable(record.getMessage() + fields)}"
        return line + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


def configure_logging(config: LogConfig) -> None:
    """Sends all log records to standard error in the format that ``config`` names."""
    handler = logging.StreamHandler()
    handler.setFormatter(JSONFormatter() if config.format == "json" else ConsoleFormatter())
    logging.basicConfig(level=config.level.upper(), handlers=[handler], force=True)


def _time(record: logging.LogRecord) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(record.created, tz=datetime.UTC).astimezone()


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
