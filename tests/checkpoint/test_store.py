"""Versions appear whole or not at all, whoever is killed when, and what is in use is never lost."""

from __future__ import annotations

import datetime
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxserve.checkpoint import manifest
from jaxserve.checkpoint.manifest import Manifest, Source
from jaxserve.checkpoint.store import Store
from jaxserve.errors import CheckpointError

DAY = datetime.date(2026, 1, 2)


def fill(content: Path, text: str, size: int = 100) -> None:
    """A version without weights, but with a true manifest."""
    (content / "params").mkdir()
    (content / "params" / "data").write_text(text * size)
    (content / "config.json").write_text("{}")
    files = manifest.hash_files(content, "hash")
    source = Source("gguf", text, None, ())
    rest = {
        "chat_template": None,
        "generation_config": None,
        "goldens": None,
        "licence": None,
        "tokenizer": (),
        "tree": (),
    }
    found = Manifest(
        schema=1, model="m", engine="0", config_sha256="", dtype="auto", source=source, files=files, **rest
    )
    manifest.write(content, found)


def publish(store: Store, text: str, model: str = "m", day: datetime.date = DAY) -> str:
    with store.workspace(model) as work:
        fill(work.content, text)
        return store.publish(model, work.content, day)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "checkpoints")


def leftovers(store: Store) -> list[str]:
    return [path.name for path in store.root.glob("*/.*")]


def test_an_empty_store(store):
    assert store.models() == []
    assert store.versions("m") == []
    assert store.current("m") is None
    assert not store.root.exists()
    with pytest.raises(CheckpointError, match=r"'m' has no version in use in .*; models there: none"):
        store.path("m")
    with pytest.raises(CheckpointError, match="no model 'm'"):
        store.gc("m", 1)


def test_published_versions_are_whole_immutable_and_in_use(store):
    first, second = publish(store, "one"), publish(store, "two")
    assert store.models() == ["m"]
    assert store.versions("m") == [first, second]
    assert (store.previous("m"), store.current("m")) == (first, second)
    assert store.path("m") == store.root / "m" / second
    assert first.startswith("20260102-")
    for version in (first, second):
        assert manifest.verify(store.path("m", version)).model == "m"
        modes = {path.stat().st_mode & 0o777 for path in store.path("m", version).rglob("*") if path.is_file()}
        assert modes == {0o444}
    assert leftovers(store) == []


def test_publishing_the_same_again_changes_nothing(store):
    first = publish(store, "one")
    inode = store.path("m").stat().st_ino
    assert publish(store, "one") == first
    assert store.path("m").stat().st_ino == inode
    assert store.previous("m") is None


def test_versions_of_a_day_are_in_the_order_they_came(store):
    texts = [f"text {number}" for number in range(8)]
    assert store.versions("m") == []
    published = [publish(store, text) for text in texts]
    assert store.versions("m") == published
    assert published != sorted(published)  # so that the order above is not that of the names
    assert store.versions("m")[-1] == published[-1]
    assert publish(store, "older", day=datetime.date(2025, 1, 1)) == store.versions("m")[0]


def test_use_and_rollback(store):
    first, second, third = (publish(store, text) for text in ("one", "two", "three"))
    store.use("m", first)
    assert (store.previous("m"), store.current("m")) == (third, first)
    store.use("m", first)
    assert store.previous("m") == third
    assert store.rollback("m") == third
    assert (store.previous("m"), store.current("m")) == (first, third)
    assert store.rollback("m") == first
    with pytest.raises(CheckpointError, match=f"no version '20260102-000000000000'; versions there: .*{second}"):
        store.use("m", "20260102-000000000000")
    assert store.current("m") == first


def test_rollback_needs_a_previous_version(store):
    first = publish(store, "one")
    with pytest.raises(CheckpointError, match="no previous version"):
        store.rollback("m")
    second = publish(store, "two")
    for path in sorted((store.root / "m" / first).rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    with pytest.raises(CheckpointError, match=rf"{first}/manifest.json is missing"):
        store.rollback("m")
    assert store.current("m") == second


def test_gc_keeps_what_is_needed(store):
    versions = [publish(store, str(number)) for number in range(6)]
    store.use("m", versions[0])  # previous is the last one
    assert store.gc("m", 2) == versions[1:4]
    assert store.versions("m") == [versions[0], *versions[4:]]
    assert store.gc("m", 0) == [versions[4]]
    assert store.gc("m", 0) == []
    assert (store.current("m"), store.previous("m")) == (versions[0], versions[5])
    with pytest.raises(CheckpointError, match="-1"):
        store.gc("m", -1)


def test_gc_removes_abandoned_work_only(store):
    publish(store, "one")
    abandoned = store.root / "m" / ".tmp-abandoned"
    (abandoned / "content").mkdir(parents=True)
    (abandoned / "lock").touch()
    (store.root / "m" / ".tmp-barely").mkdir()
    with store.workspace("m") as alive:
        assert store.gc("m", 1) == []
        assert alive.content.is_dir()
        assert leftovers(store) == [alive.content.parent.name]


def test_a_workspace_is_gone_afterwards(store):
    def fail() -> None:
        with store.workspace("m") as work:
            (work.scratch / "large").write_bytes(b"x")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not (store.root / "m").exists()


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "/etc/passwd",
        "a/b",
        "%2e%2e",
        "a\0",
        "a" * 300,
        "",
        ".",
        "..",
        ".hidden",
        "a..b",
        "\u2024\u2024",
        "a b",
        "-x",
    ],
)
def test_names_never_become_paths(store, name):
    publish(store, "one")
    for call in (
        store.versions,
        store.current,
        store.previous,
        store.path,
        store.rollback,
        lambda model: store.gc(model, 1),
        lambda model: store.use(model, "20260102-000000000000"),
        lambda model: store.workspace(model).__enter__(),
    ):
        with pytest.raises(CheckpointError, match="not a model's name"):
            call(name)
    for call in (lambda version: store.path("m", version), lambda version: store.use("m", version)):
        with pytest.raises(CheckpointError, match="no version"):
            call(name)


@pytest.mark.parametrize("text", ["../../etc", "", "20260102-XYZ", "x" * 99])
def test_a_pointer_that_points_nowhere_is_named(store, text):
    publish(store, "one")
    (store.root / "m" / "CURRENT").write_text(text)
    with pytest.raises(CheckpointError, match="CURRENT holds"):
        store.path("m")


def test_a_pointer_that_is_a_link_is_refused(store, tmp_path):
    publish(store, "one")
    (tmp_path / "elsewhere").write_text((store.root / "m" / "CURRENT").read_text())
    (store.root / "m" / "CURRENT").unlink()
    (store.root / "m" / "CURRENT").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="symbolic link"):
        store.current("m")


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        publish(Store(tmp_path / "file"), "one")


# --- other processes -------------------------------------------------------------------------------------------------

PUBLISHER = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from test_store import publish, Store
store = Store(Path(sys.argv[2]))
print("ready", flush=True)
for number in range(int(sys.argv[4])):
    publish(store, f"{sys.argv[3]} {number} ")
    if sys.argv[5:]:
        store.gc("m", 2)
"""


def start(store: Store, name: str, count: int, *more: str) -> subprocess.Popen[str]:
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", PUBLISHER, here, str(store.root), name, str(count), *more]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def test_killed_at_any_instant_a_publisher_leaves_a_whole_version_in_use(store):
    chance = random.Random(20260102)
    publish(store, "zero")
    for turn in range(12):
        with start(store, str(turn), 1000, "gc") as child:
            time.sleep(chance.uniform(0, 0.06))
            os.kill(child.pid, signal.SIGKILL)
        current = store.current("m")
        assert current is not None
        for version in store.versions("m"):
            manifest.verify(store.path("m", version))
        previous = store.previous("m")
        assert previous is None or previous in store.versions("m")
    before = store.current("m")
    store.gc("m", 2)
    assert leftovers(store) == []
    assert store.current("m") == before
    assert len(store.versions("m")) <= 3


def test_publishers_at_the_same_time_do_not_disturb_each_other(store):
    with start(store, "left", 15) as left, start(store, "right", 15) as right:
        for _ in range(15):
            publish(store, "both")  # the same version again and again
        assert left.wait(30) == right.wait(30) == 0
    assert len(store.versions("m")) == 31
    for version in store.versions("m"):
        manifest.verify(store.path("m", version))
    assert store.current("m") in store.versions("m")
    assert leftovers(store) == []
