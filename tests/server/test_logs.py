"""Log lines: one line each, whatever is in them."""

from __future__ import annotations

import io
import json
import logging

import pytest

from jaxserve.config import LogConfig
from jaxserve.server.logs import ConsoleFormatter, JSONFormatter, configure_logging

NASTY = "a\nb\r\x1b[31m\u202eend"


def record(message: str, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("jaxserve.x", logging.INFO, __file__, 1, message, (), None)
    made.fields = fields
    return made


def test_json_is_one_object_a_line():
    line = JSONFormatter().format(record(NASTY, status=200, route=NASTY))
    assert "\n" not in line
    found = json.loads(line)
    assert (found["message"], found["route"], found["status"], found["level"]) == (NASTY, NASTY, 200, "info")
    assert found["time"].count(":") >= 2


def test_the_console_shows_no_control_characters():
    line = ConsoleFormatter().format(record(NASTY, route=NASTY))
    assert line.isprintable()
    assert r"a\nb\r\x1b[31m\u202eend" in line


@pytest.mark.parametrize("formatter", [JSONFormatter(), ConsoleFormatter()])
def test_tracebacks_are_kept(formatter):
    try:
        raise ValueError("why")
    except ValueError as error:
        made = record("failed")
        made.exc_info = (type(error), error, error.__traceback__)
    assert "ValueError: why" in formatter.format(made)


@pytest.mark.parametrize(("name", "kind"), [("json", JSONFormatter), ("console", ConsoleFormatter)])
def test_configure(name, kind, monkeypatch):
    root = logging.RootLogger(logging.WARNING)
    monkeypatch.setattr(logging, "root", root)
    monkeypatch.setattr("sys.stderr", stream := io.StringIO())
    configure_logging(LogConfig(format=name, level="warning"))
    root.info("quiet")
    root.warning("loud")
    (handler,) = root.handlers
    assert isinstance(handler.formatter, kind)
    assert "loud" in stream.getvalue()
    assert "quiet" not in stream.getvalue()
