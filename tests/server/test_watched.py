"""A file that changes is read once it is whole, whatever way it was changed; one of no use changes nothing."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest

from jaxserve.errors import ConfigError
from jaxserve.server import watched
from jaxserve.server.watched import Watcher


class Reader:
    """What a watched file is read by."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read: list[str] = []

    def __call__(self) -> None:
        text = self.path.read_text() if self.path.exists() else ""
        if text.startswith("bad"):
            raise ConfigError("It is bad.")
        if text.startswith("mistake"):
            raise ValueError("a secret")
        self.read.append(text)


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "file"
    path.write_text("first")
    return path


@pytest.fixture
def reader(file) -> Reader:
    return Reader(file)


@pytest.fixture
def failures() -> list[str]:
    return []


@pytest.fixture
def watcher(file, reader, failures):
    watcher = Watcher(failures.append)
    watcher.watch("it", [file], reader)
    return watcher


def test_nothing_is_read_that_did_not_change(watcher, reader, file):
    watcher.look()
    os.utime(file)
    watcher.look()
    file.write_text("first")
    watcher.look()
    assert reader.read == []


def test_a_change_is_read_once(watcher, reader, file):
    file.write_text("second")
    watcher.look()
    watcher.look()
    assert reader.read == ["second"]


def test_a_file_put_in_its_place(watcher, reader, file, tmp_path):
    tmp_path.joinpath("new").write_text("other")
    tmp_path.joinpath("new").replace(file)
    watcher.look()
    assert reader.read == ["other"]


def test_a_change_that_the_clock_does_not_show(watcher, reader, file):
    """Same size, same times: only the contents tell."""
    before = file.stat()
    file.write_text("third")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    watcher.look()
    assert reader.read == ["third"]


def test_a_link_to_a_folder_is_swapped(tmp_path, failures):
    """As an orchestrator does it: the file's own link never changes."""
    for version in ("one", "two"):
        tmp_path.joinpath(version).mkdir()
        tmp_path.joinpath(version, "keys").write_text(version)
    tmp_path.joinpath("..data").symlink_to("one")
    file = tmp_path / "keys"
    file.symlink_to(Path("..data", "keys"))
    reader = Reader(file)
    watcher = Watcher(failures.append)
    watcher.watch("it", [file], reader)
    tmp_path.joinpath("new").symlink_to("two")
    tmp_path.joinpath("new").replace(tmp_path / "..data")
    watcher.look()
    assert reader.read == ["two"]


def test_a_file_that_goes_and_comes(watcher, reader, file):
    file.unlink()
    watcher.look()
    file.write_text("back")
    watcher.look()
    assert reader.read == ["", "back"]


def test_half_a_file_is_not_read(watcher, reader, file, monkeypatch):
    """Somebody writes slowly, into the file itself: a little more each time that is waited for the end."""
    rest = ["b", "c", "d"]

    def write_on(_: float) -> None:
        if rest:
            file.write_text(file.read_text() + rest.pop(0))

    file.write_text("a")
    monkeypatch.setattr(watched.time, "sleep", write_on)
    watcher.look()
    assert reader.read == ["abcd"]


def test_a_file_that_never_comes_to_rest_is_read_as_it_is(watcher, reader, file, monkeypatch):
    monkeypatch.setattr(watched.time, "sleep", lambda _: file.write_text(file.read_text() + "x"))
    file.write_text("a")
    watcher.look()
    assert len(reader.read) == 1


def test_one_of_no_use_is_told_once(watcher, reader, file, failures, caplog):
    file.write_text("bad")
    watcher.look()
    watcher.look()
    assert failures == ["it"]
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.fields == {"file": "it", "reason": "It is bad."}
    file.write_text("good")
    watcher.look()
    assert reader.read == ["good"]


def test_a_mistake_of_ours_does_not_end_the_watch(watcher, reader, file, failures, caplog):
    file.write_text("mistake")
    watcher.look()
    assert failures == ["it"]
    assert "secret" not in caplog.text
    file.write_text("good")
    watcher.look()
    assert reader.read == ["good"]


def test_it_looks_by_itself(watcher, reader, file, wait_for):
    watcher.start()
    try:
        file.write_text("second")
        wait_for(lambda: reader.read)
        assert reader.read == ["second"]
    finally:
        watcher.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "watching"]


def test_it_looks_at_once_when_told(file, reader, wait_for):
    watcher = Watcher(interval=60)
    watcher.watch("it", [file], reader)
    watcher.start()
    try:
        file.write_text("second")
        watcher.look_soon()
        wait_for(lambda: reader.read)
    finally:
        watcher.stop()


def test_without_files_there_is_no_thread():
    watcher = Watcher()
    watcher.start()
    assert not watcher
    assert not [thread for thread in threading.enumerate() if thread.name == "watching"]
    watcher.stop()
