"""The sample tokenizers as fixtures, and strings that tokenizers disagree about."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import sentencepiece
import tokenizers

from jaxserve.text.tokenizer import Tokenizer
from tests.text.samples import KINDS, REFERENCE, save, sentencepiece_model


@pytest.fixture(scope="session")
def hf_tokenizers() -> dict[str, tokenizers.Tokenizer]:
    """One tokenizer of the library for each kind."""
    return {name: make() for name, make in KINDS.items()}


@pytest.fixture(scope="session")
def hf_folders(hf_tokenizers, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hf")
    return {name: save(tokenizer, root / name, eos_token="<|im_end|>") for name, tokenizer in hf_tokenizers.items()}


@pytest.fixture(scope="session", params=KINDS)
def kind(request, hf_tokenizers, hf_folders) -> tuple[tokenizers.Tokenizer, Tokenizer]:
    """The library's tokenizer and ours, of every kind."""
    return hf_tokenizers[request.param], Tokenizer.load(hf_folders[request.param])


@pytest.fixture(scope="session")
def bpe(hf_folders) -> Tokenizer:
    """Byte-level BPE with ChatML's control tokens."""
    return Tokenizer.load(hf_folders["byte-level"])


@pytest.fixture(scope="session")
def sp_model() -> bytes:
    return sentencepiece_model()


@pytest.fixture(scope="session")
def sp_raw(sp_model) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=sp_model)


@pytest.fixture(scope="session")
def sp(sp_model, tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("sp")
    folder.joinpath("tokenizer.model").write_bytes(sp_model)
    return Tokenizer.load(folder)


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """2,000 strings: emoji, odd digits, mixed white space, many scripts, code, control characters, long words."""
    with gzip.open(REFERENCE / "tiny_sp.json.gz") as file:
        found: list[str] = json.load(file)["texts"]
    return found
