"""Only regular files are read, links are followed in one case, and what is replaced is replaced as a whole."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from jaxserve.checkpoint import files
from jaxserve.errors import CheckpointError


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("link", "symbolic link"),
        ("dangling", "symbolic link"),
        ("folder", "not a regular file"),
        ("fifo", "not a regular file"),
        ("absent", "cannot be opened: No such file"),
    ],
)
def test_only_regular_files_are_opened(place, name, reason):
    for read in (lambda path: files.read_regular(path, 9), files.map_regular, files.sha256_of):
        with pytest.raises(CheckpointError, match=reason) as caught:
            read(place / name)
        assert str(place / name) in caught.value.message


def test_devices_are_not_files():
    with pytest.raises(CheckpointError, match="not a regular file"):
        files.read_regular(Path("/dev/zero"), 9)


def test_links_are_followed_on_request(place):
    assert files.read_regular(place / "link", 9, follow=True) == b"text"
    with pytest.raises(CheckpointError, match="cannot be opened"):
        files.read_regular(place / "dangling", 9, follow=True)


def test_reading_is_bounded(place):
    assert files.read_regular(place / "file", 4) == b"text"
    with pytest.raises(CheckpointError, match="more than 3 bytes"):
        files.read_regular(place / "file", 3)


def test_digests_are_sha256(tmp_path):
    data = os.urandom((1 << 20) + 17)
    (tmp_path / "a").write_bytes(data)
    pieces: list[int] = []
    assert files.sha256_of(tmp_path / "a", pieces.append) == hashlib.sha256(data).hexdigest()
    assert sum(pieces) == len(data)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b'{"a": 1, "a": 2}', "'a' stands there twice"),
        (b'{"a": {"b": 1, "b": 1}}', "'b' stands there twice"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": 1', "not valid JSON"),
        (b"[1]", "not a JSON object"),
        (b"\xff{}", "not valid JSON"),
        (b'{"a":' * 100_000, "not valid JSON"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "not valid JSON"),
        (b'{"a": "\\ud800"}', "not valid JSON"),
        (b'{"a": {"\\uDFFF": 1}}', "not valid JSON"),
    ],
)
def test_json_is_strict(text, reason):
    with pytest.raises(CheckpointError, match=reason) as caught:
        files.parse_json_object(text, "x.json")
    assert caught.value.message.startswith("x.json")


def test_pairs_of_surrogates_are_characters():
    assert files.parse_json_object(b'{"a": "\\ud83d\\ude00"}', "x.json") == {"a": "\U0001f600"}


@pytest.mark.parametrize("name", ["a", "model-00001-of-00002.safetensors", "model.layers.0.weight"])
def test_plain_names(name):
    assert files.is_plain_name(name)


@pytest.mark.parametrize("name", ["", "../a", "a/b", "/etc/passwd", "a\\b", "..", "a\0", "a\n", "a" * 256])
def test_names_that_are_not_plain(tmp_path, name):
    assert not files.is_plain_name(name)
    with pytest.raises(CheckpointError, match="not the name of a file"):
        files.regular_file(tmp_path, name)


def test_a_hub_cache_links_to_its_own_blobs(tmp_path):
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "123").write_bytes(b"x")
    (tmp_path / "secret").write_bytes(b"y")
    (snapshot / "good").symlink_to("../../blobs/123")
    (snapshot / "bad").symlink_to("../../../secret")
    (snapshot / "indirect").symlink_to("../../blobs/out")
    (blobs / "out").symlink_to("../../secret")
    assert files.regular_file(snapshot, "good") == blobs / "123"
    (tmp_path / "short").symlink_to(snapshot)
    assert files.regular_file(tmp_path / "short", "good") == blobs / "123"
    for name in ("bad", "indirect"):
        with pytest.raises(CheckpointError, match="symbolic link"):
            files.regular_file(snapshot, name)


def test_elsewhere_no_link_is_followed(place):
    assert files.regular_file(place, "file") == place / "file"
    with pytest.raises(CheckpointError, match="symbolic link"):
        files.regular_file(place, "link")


def test_a_tree_of_regular_files(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c").write_bytes(b"123")
    (tmp_path / "d").write_bytes(b"")
    assert files.regular_files(tmp_path) == {"a/b/c": 3, "d": 0}
    (tmp_path / "a" / "up").symlink_to("..")
    with pytest.raises(CheckpointError, match="up is a symbolic link"):
        files.regular_files(tmp_path)


def test_text_is_replaced_as_a_whole(tmp_path, monkeypatch):
    path = tmp_path / "CURRENT"
    files.replace_text(path, "one\n")

    def full(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        files.replace_text(path, "two\n")
    assert path.read_text() == "one\n"


def test_space_is_checked_in_bytes(tmp_path):
    files.require_space(tmp_path, 1, "this")
    with pytest.raises(CheckpointError, match=r"has \d+ bytes free, this needs 1152921504606846976"):
        files.require_space(tmp_path, 1 << 60, "this")
