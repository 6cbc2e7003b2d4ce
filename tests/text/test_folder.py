from __future__ import annotations

import json

import pytest
from tokenizers import processors

from jaxserve.errors import CheckpointError
from jaxserve.text.folder import read_json, spelling_of
from jaxserve.text.tokenizer import Tokenizer
from tests.text.samples import byte_level_bpe, save


def write(folder, name: str, **content: object) -> None:
    folder.joinpath(name).write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize(
    ("value", "spelling"),
    [("<s>", "<s>"), ({"content": "<s>", "lstrip": False}, "<s>"), (None, None), ("", None), ({}, None), (3, None)],
)
def test_spellings(value, spelling):
    assert spelling_of(value) == spelling


def test_end_tokens_are_the_union_of_all_files(tmp_path):
    folder = save(byte_level_bpe(), tmp_path, eos_token={"content": "<|im_start|>"})
    write(folder, "generation_config.json", eos_token_id=[7, 2, 99999, True])
    write(folder, "config.json", eos_token_id=9)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.eos_ids == (1, 7, 2, 9, 0), "its own, generation's, the model's, the known ends of turn"


def test_names_come_from_the_config_then_from_the_map(tmp_path):
    folder = save(byte_level_bpe(), tmp_path, bos_token="<|im_start|>", eos_token=None)
    write(folder, "special_tokens_map.json", bos_token="<|endoftext|>", eos_token="<|im_end|>", pad_token="<absent>")
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.bos_id, tokenizer.eos_ids[0], tokenizer.pad_id) == (1, 2, None)
    assert tokenizer.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


def test_who_adds_the_begin_token(tmp_path):
    raw = byte_level_bpe()
    folder = save(raw, tmp_path, bos_token="<|im_start|>", eos_token="<|im_end|>")
    assert Tokenizer.load(folder).encode("") == []
    write(folder, "tokenizer_config.json", bos_token="<|im_start|>", eos_token="<|im_end|>", add_bos_token=True)
    assert Tokenizer.load(folder).encode("") == [1]
    raw.post_processor = processors.TemplateProcessing(
        single="<|im_start|> <|endoftext|> $A <|im_end|>",
        special_tokens=[("<|im_start|>", 1), ("<|endoftext|>", 0), ("<|im_end|>", 2)],
    )
    folder = save(raw, tmp_path, bos_token="<|im_start|>", eos_token="<|im_end|>")
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("") == [1, 0, 2]
    assert tokenizer.adds_bos
    assert tokenizer.adds_eos
    tokenizer.save(tmp_path / "again")
    assert Tokenizer.load(tmp_path / "again").encode("") == [1, 0, 2]
    write(folder, "tokenizer_config.json", bos_token="<|im_start|>", eos_token="<|im_end|>", add_bos_token=False)
    assert Tokenizer.load(folder).encode("") == [], "what the config says outright wins, as in transformers"


def test_a_begin_token_that_is_asked_for_but_not_named_is_not_added(tmp_path):
    folder = save(byte_level_bpe(), tmp_path, add_bos_token=True)
    assert Tokenizer.load(folder).encode("") == []


def test_tokenizer_json_wins(tmp_path, sp_model):
    folder = save(byte_level_bpe(), tmp_path)
    folder.joinpath("tokenizer.model").write_bytes(sp_model)
    assert Tokenizer.load(folder).vocab_size == byte_level_bpe().get_vocab_size()


def test_a_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(CheckpointError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        Tokenizer.load(tmp_path)
    with pytest.raises(CheckpointError, match="neither"):
        Tokenizer.load(tmp_path / "absent")


@pytest.mark.parametrize("content", ["", "{", "[1]", "\ud800".encode("utf-8", "surrogatepass"), "[" * 100_000])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "generation_config.json"])
def test_bad_side_files_are_named(tmp_path, name, content):
    folder = save(byte_level_bpe(), tmp_path)
    folder.joinpath(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError, match=name):
        Tokenizer.load(folder)


@pytest.mark.parametrize("added", [{"x": {"content": "a"}}, {"1": {}}, {"1": None}, [1], "x"])
def test_malformed_added_tokens(tmp_path, added):
    folder = save(byte_level_bpe(), tmp_path, added_tokens_decoder=added)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: added_tokens_decoder"):
        Tokenizer.load(folder)


def test_absent_json_is_empty(tmp_path):
    assert read_json(tmp_path / "absent.json") == {}
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_json(tmp_path)
