"""Conversion from end to end: what is published is what was there, and whatever fails leaves nothing behind."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import types
from pathlib import Path

import msgspec
import numpy as np
import pytest

from jaxserve import __version__
from jaxserve.checkpoint import cage, manifest
from jaxserve.checkpoint import convert as convert_module
from jaxserve.checkpoint.convert import convert
from jaxserve.checkpoint.manifest import Source
from jaxserve.checkpoint.store import Store
from jaxserve.errors import CheckpointError


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "checkpoints")


def assert_nothing_left(store: Store) -> None:
    assert [path.name for path in store.root.rglob("*")] in ([], [".lock"])


def test_a_folder_becomes_a_version(published, tiny):
    assert published.fresh
    found = manifest.verify(published.folder)
    assert (found.schema, found.model, found.engine, found.dtype) == (1, "tiny", __version__, "auto")
    assert (found.source.kind, found.source.name, found.source.revision) == ("folder", "Tiny-Folder", None)
    assert {entry.path for entry in found.source.files} == {
        "config.json",
        "generation_config.json",
        "LICENSE",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert (found.chat_template, found.generation_config) == ("chat_template.jinja", "generation_config.json")
    assert json.loads((published.folder / "config.json").read_text()) == tiny.config
    assert len(found.tree) == len(convert_module.family_of(tiny.config).rules)
    assert {leaf.dtype for leaf in found.tree} == {"float32"}
    assert sum(int(np.prod(leaf.shape)) for leaf in found.tree) == sum(array.size for array in tiny.weights.values())
    assert not list(published.folder.parent.glob(".*"))


def test_goldens_are_computed_from_the_version_to_be(uncaged, store, forms):
    def goldens(folder: Path) -> dict[str, object]:
        draft = manifest.read(folder)  # what `restore` needs is there already
        assert draft.goldens is None
        assert len(draft.tree) > 10
        assert (folder / "params" / "commit_success.txt").read_text() == "complete\n"
        return {"prompts": [[1, 2]], "greedy": [[3, 4]]}

    published = convert(forms["folder"], store, "tiny", goldens=goldens)
    found = manifest.verify(published.folder)
    assert found.goldens == "goldens.json"
    assert json.loads((published.folder / "goldens.json").read_text()) == {"prompts": [[1, 2]], "greedy": [[3, 4]]}


def test_goldens_that_fail_leave_nothing_behind(uncaged, store, forms):
    with pytest.raises(ZeroDivisionError):
        convert(forms["gguf"], store, "tiny", goldens=lambda _: {"a": 1 / 0})
    assert_nothing_left(store)


def test_the_same_source_is_converted_once(uncaged, store, forms, folder):
    first = convert(forms["folder"], store, "tiny")
    assert first.fresh
    seen: list[str] = []
    again = convert(folder, store, "tiny", progress=lambda phase, *_: seen.append(phase))
    assert (again.fresh, again.version, again.folder) == (False, first.version, first.folder)
    assert set(seen) == {"hash"}
    (folder / "README.md").write_text("has no part in it")
    assert not convert(folder, store, "tiny").fresh


def test_a_version_that_this_jaxserve_cannot_use_does_not_count(uncaged, store, forms, monkeypatch):
    first = convert(forms["folder"], store, "tiny")
    with_goldens = convert(forms["folder"], store, "tiny", goldens=lambda _: {})
    assert with_goldens.fresh
    assert convert(forms["folder"], store, "tiny").version == with_goldens.version
    family = convert_module.family_of(json.loads((first.folder / "config.json").read_text()))
    renamed = tuple(dataclasses.replace(rule, param=f"new.{rule.param}") for rule in family.rules)
    other = types.SimpleNamespace(rules=renamed, ignored=family.ignored, shape=family.shape)
    monkeypatch.setattr(convert_module, "family_of", lambda _: other)
    assert convert(forms["folder"], store, "tiny").fresh


def test_a_damaged_version_is_replaced_by_a_new_one(uncaged, store, forms):
    first = convert(forms["folder"], store, "tiny")
    (first.folder / "config.json").chmod(0o644)
    (first.folder / "config.json").write_text("{}")
    second = convert(forms["folder"], store, "tiny")
    assert second.fresh
    assert second.version != first.version
    assert (store.current("tiny"), store.previous("tiny")) == (second.version, first.version)
    manifest.verify(second.folder)


def test_origin_licence_and_texts_of_the_caller(uncaged, store, forms, tmp_path):
    (tmp_path / "NOTICE").write_text("notice")
    origin = Source("wheel", "a-package==1", "r1", ())
    published = convert(
        forms["gguf"], store, "tiny", origin=origin, licence="Apache-2.0", licence_files=[tmp_path / "NOTICE"]
    )
    found = manifest.verify(published.folder)
    assert msgspec.structs.replace(found.source, files=()) == origin
    assert [entry.path for entry in found.source.files] == ["Tiny.gguf"]
    assert found.licence == "Apache-2.0"
    assert (published.folder / "NOTICE").read_text() == "notice"


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (cage.Limits(memory_bytes=1 << 40, cpu_seconds=600, file_bytes=1 << 10), "File too large"),
        (cage.Limits(memory_bytes=1 << 26, cpu_seconds=600, file_bytes=1 << 40), "The converter"),
    ],
    ids=["file size", "memory"],
)
def test_a_child_at_its_limit_leaves_nothing_behind(store, forms, limits, reason):
    with pytest.raises(CheckpointError, match=reason) as caught:
        convert(forms["folder"], store, "tiny", limits=limits)
    assert caught.value.exit_code == 78
    assert_nothing_left(store)


def test_a_source_at_fault_is_named_and_leaves_nothing_behind(uncaged, store, folder):
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: its tensors end at byte"):
        convert(folder, store, "tiny")
    assert_nothing_left(store)


def test_an_unknown_family_is_named(uncaged, store, folder):
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "quux"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="'quux' is not supported"):
        convert(folder, store, "tiny")
    assert_nothing_left(store)


def test_a_configuration_of_other_shapes_is_refused(uncaged, store, folder):
    config = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 100}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"has shape \((96, 64|64, 96)\)"):
        convert(folder, store, "tiny")
    assert_nothing_left(store)


def test_no_code_of_a_folder_is_run(store, folder, tmp_path, monkeypatch):
    sentinel = tmp_path / "sentinel"
    code = f"import pathlib; pathlib.Path({str(sentinel)!r}).touch()"
    for name in ("evil.py", "llama.py", "json.py", "sitecustomize.py", "configuration_llama.py", "jaxserve.py"):
        (folder / name).write_text(code)
    config = json.loads((folder / "config.json").read_text())
    config |= {"auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}, "trust_remote_code": True}
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")  # refusals must not rest on asserts
    published = convert(Path(), store, "tiny")
    assert not sentinel.exists()
    assert not list(published.folder.rglob("*.py"))
    exec(code)  # it would have worked
    assert sentinel.exists()


def test_a_pickle_beside_good_weights_is_refused(uncaged, store, folder):
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin may be a pickle"):
        convert(folder, store, "tiny")
    assert_nothing_left(store)


@pytest.mark.parametrize("name", ["x.bin", "x.pt", "x.txt", "x"])
def test_what_is_no_source_is_refused(store, tmp_path, name):
    (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="neither a folder nor a"):
        convert(tmp_path / name, store, "tiny")
    with pytest.raises(CheckpointError, match="dtype 'int8' is none of auto, bfloat16"):
        convert(tmp_path, store, "tiny", dtype="int8")
    with pytest.raises(CheckpointError, match="not a model's name"):
        convert(tmp_path, store, "../tiny")


def test_fifos_and_links_are_refused_without_waiting(store, folder, tmp_path):
    (folder / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    (folder / "tokenizer.json").symlink_to(tmp_path / "tokenizer.json")
    with pytest.raises(CheckpointError, match="symbolic link"):
        convert(folder, store, "tiny")
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")
    with pytest.raises(CheckpointError, match="not a regular file"):
        convert(folder, store, "tiny")
    os.mkfifo(tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match="not a regular file"):
        convert(tmp_path / "a.gguf", store, "tiny")
    assert_nothing_left(store)


def test_an_absent_source_is_named(store, tmp_path):
    with pytest.raises(CheckpointError, match=r"absent\.gguf"):
        convert(tmp_path / "absent.gguf", store, "tiny")
