"""``jaxserve verify`` and ``jaxserve models`` on a store of small made-up checkpoints."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
import yaml

from jaxserve import cli
from jaxserve.checkpoint import manifest
from jaxserve.checkpoint.store import Store


@pytest.fixture
def store(tmp_path, monkeypatch) -> Store:
    monkeypatch.setenv("JAXSERVE_CHECKPOINTS__ROOT", str(tmp_path / "checkpoints"))
    monkeypatch.setenv("JAXSERVE_CHECKPOINTS__CATALOG", str(tmp_path / "catalog.yaml"))
    return Store(tmp_path / "checkpoints")


@pytest.fixture
def publish(store):
    """Publishes a version of a model that holds one file."""

    def publish(model: str, content: bytes, day: int) -> str:
        with store.workspace(model) as work:
            (work.content / "weights").write_bytes(content)
            files = manifest.hash_files(work.content, "hash")
            entry = manifest.FileEntry("a.gguf", 4, "ab" * 32)
            manifest.write(
                work.content,
                manifest.Manifest(
                    schema=manifest.SCHEMA,
                    model=model,
                    engine="0.1.0",
                    config_sha256="00" * 32,
                    dtype="bfloat16",
                    licence="Apache-2.0",
                    source=manifest.Source(kind="wheel", name="package==1", revision=None, files=(entry,)),
                    tokenizer=("tokenizer/tokenizer.json",),
                    chat_template=None,
                    generation_config=None,
                    goldens=None,
                    tree=(
                        manifest.LeafEntry("embed", (3, 4), "bfloat16"),
                        manifest.LeafEntry("norm", (4,), "bfloat16"),
                    ),
                    files=files,
                ),
            )
            return store.publish(model, work.content, datetime.date(2026, 1, day))

    return publish


def run(capsys, *arguments: str) -> list[str]:
    assert cli.run(arguments) == 0, capsys.readouterr().err
    return capsys.readouterr().out.splitlines()


def test_an_empty_store_lists_nothing(capsys, store):
    assert run(capsys, "models") == ["MODEL  VERSION    DTYPE  SIZE"]


def test_list_marks_what_is_in_use(capsys, publish):
    first, second = publish("toy", b"1", 1), publish("toy", b"2" * 2_000_000, 2)
    other = publish("another", b"3", 3)
    for arguments in (["models"], ["models", "list"]):
        rows = [line.split() for line in run(capsys, *arguments)[1:]]
        assert rows == [
            ["another", other, "in", "use", "bfloat16", "0.0", "MB"],
            ["toy", first, "previous", "bfloat16", "0.0", "MB"],
            ["toy", second, "in", "use", "bfloat16", "2.0", "MB"],
        ]


def test_list_tells_what_could_be_pulled(capsys, publish, tmp_path):
    publish("toy", b"1", 1)
    entry = {
        "about": "a toy",
        "model_type": "llama",
        "licence": {"name": "MIT"},
        "target": {"name": "a.gguf", "bytes": 1, "sha256": "0" * 64},
        "wheels": [{"package": "a", "version": "1", "sha256": "0" * 64}],
    }
    tmp_path.joinpath("catalog.yaml").write_text(yaml.safe_dump({"toy": entry, "top": entry}))
    assert [line.split() for line in run(capsys, "models")[2:]] == [["top", "-", "not", "pulled"]]


def test_show(capsys, publish):
    first, second = publish("toy", b"1", 1), publish("toy", b"2", 2)
    facts = dict(line.split(maxsplit=1) for line in run(capsys, "models", "show", "toy"))
    assert facts["version"] == second
    assert facts["parameters"] == "16 in 2 arrays of bfloat16"
    assert facts["source"] == "wheel package==1"
    assert facts["a.gguf"] == "sha256 " + "ab" * 32
    assert f"version        {first}" in run(capsys, "models", "show", "toy", "--version", first)


def test_use_rollback_and_gc(capsys, publish, store):
    versions = [publish("toy", bytes([day]), day) for day in range(1, 5)]
    assert run(capsys, "models", "use", "toy", versions[0]) == [f"toy: {versions[0]} is in use."]
    assert run(capsys, "models", "rollback", "toy") == [f"toy: {versions[3]} is in use."]
    assert run(capsys, "models", "gc", "toy", "--keep", "0") == [f"toy: {v} removed." for v in versions[1:3]]
    assert run(capsys, "models", "gc", "toy") == ["toy: nothing to remove."]
    assert store.versions("toy") == [versions[0], versions[3]]


def test_verify(capsys, publish, monkeypatch):
    version = publish("toy", b"1234", 1)
    expected = [f"toy {version}: 1 files, 0.0 MB, as the manifest says."]
    assert run(capsys, "verify", "toy") == expected
    assert run(capsys, "verify", "toy", "--version", version) == expected
    assert run(capsys, "verify", "--model", "toy") == expected


def test_verify_names_the_damaged_file(capsys, publish, store):
    publish("toy", b"1234", 1)
    path: Path = store.path("toy") / "weights"
    path.chmod(0o644)
    path.write_bytes(b"1235")
    assert cli.run(["verify", "toy"]) == 78
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"jaxserve: {path} is damaged: expected SHA-256 ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["verify", "toy"], "Model 'toy' has no version in use"),
        (["verify", "../toy"], "'../toy' is not a model's name"),
        (["models", "show", "toy"], "Model 'toy' has no version in use"),
        (["models", "use", "toy", "1"], "Model 'toy' has no version '1'"),
        (["models", "rollback", "toy"], "Model 'toy' has no previous version"),
    ],
)
def test_what_is_not_there_is_told(capsys, store, arguments, says):
    assert cli.run(arguments) == 78
    assert says in capsys.readouterr().err
