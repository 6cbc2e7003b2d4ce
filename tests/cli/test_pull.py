"""``jaxserve pull``: what it asks of the store and the catalogue, and what it says."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxserve import cli
from jaxserve.checkpoint.store import Store

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def store(tmp_path, monkeypatch) -> Store:
    monkeypatch.setenv("JAXSERVE_CHECKPOINTS__ROOT", str(tmp_path / "checkpoints"))
    monkeypatch.setenv("JAXSERVE_CHECKPOINTS__CATALOG", str(ROOT / "checkpoints" / "catalog.yaml"))
    return Store(tmp_path / "checkpoints")


@pytest.fixture
def source(tmp_path) -> Path:
    """A Hugging Face folder of a small random model and a tokenizer of bytes."""
    folder = tmp_path / "Toy"
    tiny = ROOT / "tests" / "reference" / "tiny" / "llama"
    shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("*.npz"))
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<end>"]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    folder.joinpath("tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    return folder


def test_pull_a_folder_once(capsys, store, source):
    assert cli.run(["pull", str(source)]) == 0
    version = store.current("toy")
    output = capsys.readouterr()
    assert output.out == f"toy {version}: pulled, in {store.path('toy')}.\n"
    assert "convert" in output.err
    assert cli.run(["pull", str(source), "--name", "toy"]) == 0
    assert capsys.readouterr().out == f"toy {version}: already there, in {store.path('toy')}.\n"
    assert store.versions("toy") == [version]


def test_the_served_model_is_pulled_unless_another_is_named(capsys, store):
    assert cli.run(["pull", "--model", "no-such-model"]) == 78
    assert "'no-such-model' is no model of the catalogue" in capsys.readouterr().err


def test_terms_have_to_be_accepted(capsys, store):
    assert cli.run(["pull", "gemma3-270m"]) == 78
    assert "Gemma Terms of Use" in capsys.readouterr().err
    assert store.models() == []


def test_a_catalogue_that_is_not_there(capsys, store, monkeypatch, tmp_path):
    monkeypatch.setenv("JAXSERVE_CHECKPOINTS__CATALOG", str(tmp_path / "no.yaml"))
    assert cli.run(["pull"]) == 78
    assert str(tmp_path / "no.yaml") in capsys.readouterr().err
