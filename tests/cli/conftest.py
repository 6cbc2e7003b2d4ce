"""A small random model for the commands, as a source and as a pulled checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxserve import cli
from jaxserve.checkpoint.store import Store

ROOT = Path(__file__).resolve().parents[2]
CATALOG = ROOT / "checkpoints" / "catalog.yaml"


@pytest.fixture(scope="session")
def toy_source(tmp_path_factory) -> Path:
    """A Hugging Face folder: a tiny reference model and a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("source") / "Toy"
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


@pytest.fixture(scope="session")
def toy_root(toy_source, tmp_path_factory) -> Path:
    """The folder of a store that holds the toy, pulled."""
    root = tmp_path_factory.mktemp("toy")
    flags = ["--checkpoints.root", str(root), "--checkpoints.catalog", str(CATALOG)]
    assert cli.run(["pull", str(toy_source), *flags]) == 0
    return root


@pytest.fixture
def toy(toy_root, monkeypatch) -> Iterator[Store]:
    """The settings that serve the toy, in the environment; and the one that keeps the process from starting anew."""
    monkeypatch.setenv("JAXSERVE_CHECKPOINTS__ROOT", str(toy_root))
    monkeypatch.setenv("JAXSERVE_MODEL__ID", "toy")
    monkeypatch.setenv("JAXSERVE_MODEL__DTYPE", "float32")
    monkeypatch.setenv("JAXSERVE_ENGINE__POOLS", "2x64")
    monkeypatch.setenv("JAXSERVE_ENGINE__COMPILATION_CACHE", "off")  # the suite has its own
    monkeypatch.setenv("JAXSERVE_ENGINE__HUGE_PAGES", "off")
    return Store(toy_root)
