"""One flipped bit, one byte less, one file more or fewer: whatever it is and wherever, the manifest names it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec
import pytest

from jaxserve.checkpoint import manifest
from jaxserve.errors import CheckpointError


def paths_of(folder: Path) -> list[str]:
    return [entry.path for entry in manifest.read(folder).files]


def test_an_intact_version_is_verified(version):
    seen: list[tuple[str, int, int]] = []
    found = manifest.verify(version, lambda *report: seen.append(report))
    assert found == manifest.read(version)
    assert seen[0][1] == 0
    assert seen[-1][1] == seen[-1][2] == sum(entry.bytes for entry in found.files)
    assert [report[1] for report in seen] == sorted(report[1] for report in seen)


def test_every_file_is_listed(version):
    below = {path.relative_to(version).as_posix() for path in version.rglob("*") if path.is_file()}
    assert set(paths_of(version)) == below - {"manifest.json"}
    assert len(below) > 40
    assert {"config.json", "goldens.json", "LICENSE", "tokenizer/tokenizer.json", "chat_template.jinja"} < below


def test_one_flipped_bit_anywhere_is_found_and_named(version):
    for number, name in enumerate(["manifest.json", *paths_of(version)]):
        path = version / name
        good = path.read_bytes()
        if not good:
            continue  # a file without a bit; test_one_byte_less_or_more covers it
        bad = bytearray(good)
        position = number * 7919 % len(bad)
        bad[position] ^= 1 << number % 8
        path.chmod(0o644)
        path.write_bytes(bad)
        with pytest.raises(CheckpointError) as caught:
            manifest.verify(version)
        message = caught.value.message
        assert str(path) in message
        assert "is damaged" in message
        assert len(re.findall(r"\b[0-9a-f]{64}\b", message)) == (1 if name == "manifest.json" else 2)
        path.write_bytes(good)
    manifest.verify(version)


def test_one_byte_less_or_more_anywhere_is_found_and_named(version):
    for name in paths_of(version):
        path = version / name
        good = path.read_bytes()
        path.chmod(0o644)
        for bad in (good[:-1], good + b"\0"):
            if bad == good:
                continue
            path.write_bytes(bad)
            with pytest.raises(CheckpointError, match=f"expected {len(good)} bytes, found {len(bad)}") as caught:
                manifest.verify(version)
            assert str(path) in caught.value.message
        path.write_bytes(good)
    manifest.verify(version)


def test_every_missing_file_is_named(version):
    for name in paths_of(version):
        (version / name).rename(version.parent / "away")
        with pytest.raises(CheckpointError, match="is missing") as caught:
            manifest.verify(version)
        assert str(version / name) in caught.value.message
        (version.parent / "away").rename(version / name)
    (version / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be opened"):
        manifest.verify(version)


@pytest.mark.parametrize(
    "name", ["extra", "params/extra", "tokenizer/tokenizer.model", ".hidden", "params/state/x.bin"]
)
def test_every_extra_file_is_named(version, name):
    (version / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match="does not belong") as caught:
        manifest.verify(version)
    assert str(version / name) in caught.value.message


def test_links_are_refused_even_to_equal_bytes(version, tmp_path):
    (version / "config.json").rename(tmp_path / "config.json")
    (version / "config.json").symlink_to(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json is a symbolic link"):
        manifest.verify(version)


def test_linked_folders_are_refused_even_with_equal_bytes(version, tmp_path):
    (version / "params").rename(tmp_path / "params")
    (version / "params").symlink_to(tmp_path / "params")
    with pytest.raises(CheckpointError, match="params is a symbolic link"):
        manifest.verify(version)


@pytest.mark.parametrize("name", ["extra", "config.json", "manifest.json"])
def test_a_fifo_is_refused_without_waiting(version, name):
    (version / name).unlink(missing_ok=True)
    os.mkfifo(version / name)
    with pytest.raises(CheckpointError, match=f"{name} is not a regular file"):
        manifest.verify(version)


def test_the_folders_name_vouches_for_the_manifest(version):
    found = manifest.read(version)
    (version / "manifest.json").chmod(0o644)
    manifest.write(version, msgspec.structs.replace(found, model="another"))
    with pytest.raises(CheckpointError, match=f"starts with {version.name[-12:]}"):
        manifest.verify(version)
    moved = version.rename(version.with_name("my-model"))
    with pytest.raises(CheckpointError, match="not named like a version"):
        manifest.verify(moved)


def test_a_digest_is_the_manifests_alone(version):
    found = manifest.read(version)
    (version / "manifest.json").chmod(0o644)
    assert manifest.write(version, found)[:12] == version.name[-12:]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "is no manifest"),
        (b"[]", "is no manifest"),
        (b"{}", "no schema"),
        (b'{"schema": 2}', "schema 2, this version reads schema 1"),
        (b'{"schema": "1"}', 'schema "1"'),
        (b'{"schema": 1}', "is no manifest"),
        (b"\xff", "is no manifest"),
        (b"[" * 100_000, "is no manifest"),
        (b'{"schema": 1, "x": ' + b"[" * 100_000, "is no manifest"),
        (b'{"schema": 1, "source": ' + b'{"files": [' * 100_000, "is no manifest"),
        (b'{"schema": 1, "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "is no manifest"),
    ],
)
def test_what_is_no_manifest_is_refused(tmp_path, text, reason):
    (tmp_path / "manifest.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=reason):
        manifest.read(tmp_path)


def test_unknown_fields_are_refused(version):
    path = version / "manifest.json"
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().replace(b'"model"', b'"modle"', 1))
    with pytest.raises(CheckpointError, match="is no manifest"):
        manifest.read(version)
