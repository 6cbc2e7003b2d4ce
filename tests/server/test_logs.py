"""Log lines: one line each, whatever is in them, and no thread waits for whoever reads them."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import select
import signal
import threading
import time
from pathlib import Path

import pytest

from jaxserve.config import LogConfig
from jaxserve.server.logs import ConsoleFormatter, JSONFormatter, LineWriter, configure_logging

NASTY = "a\nb\r\x1b[31m\u202eend"


def record(message: str, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("jaxserve.x", logging.INFO, __file__, 1, message, (), None)
    made.fields = fields
    return made


def test_json_is_one_object_a_line():
    line = JSONFormatter().format(record(NASTY, status=200, route=NASTY))
    assert line.isprintable()
    assert line.isascii()
    found = json.loads(line)
    assert (found["message"], found["route"], found["status"], found["level"]) == (NASTY, NASTY, 200, "info")
    assert found["time"].count(":") >= 2


def test_the_console_shows_no_control_characters():
    line = ConsoleFormatter().format(record(NASTY, route=NASTY))
    assert line.isprintable()
    assert r"a\nb\r\x1b[31m\u202eend" in line


@pytest.mark.parametrize("formatter", [JSONFormatter(), ConsoleFormatter()])
def test_tracebacks_and_stacks_are_kept(formatter):
    try:
        raise ValueError("why")
    except ValueError as error:
        made = record("failed")
        made.exc_info = (type(error), error, error.__traceback__)
        made.stacks = "Thread engine: waits"
    assert "ValueError: why" in formatter.format(made)
    assert "Thread engine: waits" in formatter.format(made)


# --- the way out ------------------------------------------------------------------------------------------------------


@pytest.fixture
def pipe():
    """Both ends of a pipe; closed in the end."""
    reader, writer = os.pipe()
    yield reader, writer
    for end in (reader, writer):
        with contextlib.suppress(OSError):
            os.close(end)


@pytest.fixture
def root(monkeypatch) -> logging.Logger:
    """A root logger of the test's own."""
    made = logging.RootLogger(logging.WARNING)
    monkeypatch.setattr(logging, "root", made)
    return made


def drained(reader: int) -> list[str]:
    """All lines that are in a pipe, or soon will be."""
    data = b""
    while select.select([reader], [], [], 0.2)[0]:
        data += os.read(reader, 1 << 20)
    return data.decode().splitlines()


@pytest.mark.parametrize(("name", "kind"), [("json", JSONFormatter), ("console", ConsoleFormatter)])
def test_configure(name, kind, root, pipe):
    reader, writer = pipe
    lines = configure_logging(LogConfig(format=name, level="warning"), writer)
    root.info("quiet")
    root.warning("loud")
    lines.flush()
    assert root.handlers == [lines]
    assert isinstance(lines.formatter, kind)
    (line,) = drained(reader)
    assert "loud" in line
    lines.close()


def test_standard_error_is_where_they_go(root, capfd):
    lines = configure_logging(LogConfig())
    root.warning("here")
    lines.flush()
    assert "here" in capfd.readouterr().err
    lines.close()


def test_lines_keep_their_order(pipe):
    reader, writer = pipe
    lines = LineWriter(writer)
    for i in range(1000):
        lines.handle(record(str(i)))
    lines.flush()
    assert drained(reader) == [str(i) for i in range(1000)]
    lines.close()


@pytest.mark.parametrize("blocking", [True, False])
def test_a_pipe_that_nobody_reads_holds_nobody_up(pipe, blocking):
    reader, writer = pipe
    os.set_blocking(writer, blocking)
    lost = []
    lines = LineWriter(writer, most=100)
    lines.on_drop = lambda: lost.append(1)
    begin = time.monotonic()
    for i in range(2000):
        lines.handle(record(f"{i} {'x' * 500}"))
    assert time.monotonic() - begin < 5
    assert 1000 < len(lost) < 2000
    begin = time.monotonic()
    lines.flush()
    assert time.monotonic() - begin < 5
    # Somebody reads again: what waited comes out whole and in order, and what was lost is told.
    lines.handle(record("again"))
    found = drained(reader)
    told = sum(int(line.split()[0]) for line in found if "lost" in line)
    numbers = [int(line.split()[0]) for line in found if "xxx" in line]
    assert numbers == sorted(numbers)
    assert told == len(lost)
    assert len(numbers) + len(lost) == 2000 + ("again" not in found)
    assert all(line.endswith("x" * 500) for line in found if "xxx" in line)
    lines.close()


def test_a_full_disk_loses_lines_and_nothing_else():
    lost = []
    descriptor = os.open("/dev/full", os.O_WRONLY)
    try:
        lines = LineWriter(descriptor)
        lines.on_drop = lambda: lost.append(1)
        for _ in range(10):
            lines.handle(record("x"))
        lines.flush()
        assert len(lost) == 10
        lines.close()
    finally:
        os.close(descriptor)


def test_a_reader_that_has_gone_loses_lines_and_nothing_else(pipe):
    reader, writer = pipe
    lost = []
    lines = LineWriter(writer)
    lines.on_drop = lambda: lost.append(1)
    os.close(reader)
    lines.handle(record("x"))
    lines.flush()
    assert len(lost) == 1
    lines.close()


def test_a_line_that_was_torn_does_not_spoil_the_next(monkeypatch, tmp_path):
    """The disk fills in the middle of a line, and is emptied later."""
    file = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    real, room = os.write, [3]

    def write(descriptor: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        done = real(descriptor, data[: room[0]])
        room[0] -= done
        return done

    monkeypatch.setattr(os, "write", write)
    lines = LineWriter(file)
    lines.handle(record("abcdef"))
    lines.flush()
    room[0] = 10_000
    lines.handle(record("whole"))
    lines.flush()
    lines.close()
    os.close(file)
    assert Path(tmp_path / "log").read_text().splitlines()[:2] == ["abc", "whole"]


def test_a_line_that_cannot_be_formatted_is_counted(pipe):
    lost = []
    lines = LineWriter(pipe[1])
    lines.on_drop = lambda: lost.append(1)
    lines.handle(logging.LogRecord("x", logging.INFO, __file__, 1, "%d", ("no number",), None))
    lines.flush()
    assert len(lost) == 1
    lines.close()


def test_a_signal_handler_may_write_a_line_in_the_middle_of_one(pipe):
    """With a lock that is not made for it this would never return."""
    reader, writer = pipe
    lines = LineWriter(writer, most=100_000)
    seen = []

    def handler(number: int, frame: object) -> None:
        lines.handle(record("from the handler"))
        seen.append(number)

    before = signal.signal(signal.SIGALRM, handler)
    swallow = threading.Thread(target=lambda: io.FileIO(reader, closefd=False).readall(), daemon=True)
    swallow.start()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            lines.handle(record("x"))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(seen) > 10
    lines.flush()
    lines.close()
    os.close(writer)
    swallow.join(5)
