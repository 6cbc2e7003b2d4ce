from __future__ import annotations

import json

import pytest
import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import decoders, models, normalizers, pre_tokenizers

from jaxserve.errors import CheckpointError
from jaxserve.text.gguf import tokenizer_from_gguf
from jaxserve.text.gguf_pretokenizers import PRE_TOKENIZERS
from jaxserve.text.tokenizer import Tokenizer
from tests.text.samples import CONTROLS, KINDS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4


def metadata(model: str, tokens: list[str], **keys: object) -> dict[str, object]:
    values = {"model": model, "tokens": tokens, **keys}
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


@pytest.fixture
def merged(hf_tokenizers) -> dict[str, object]:
    """Byte-level BPE as a GGUF file describes it."""
    model = json.loads(hf_tokenizers["byte-level"].to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    types = [CONTROL if token in CONTROLS else NORMAL for token in tokens]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "padding_token_id": 0}
    merges = [" ".join(pair) for pair in model["merges"]]
    return metadata("gpt2", tokens, pre="gpt-2", token_type=types, merges=merges, **ids)


@pytest.fixture
def scored(sp_model) -> dict[str, object]:
    """The SentencePiece sample as a GGUF file describes it."""
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(sp_model)
    return metadata(
        "llama",
        [piece.piece for piece in proto.pieces],
        scores=[piece.score for piece in proto.pieces],
        token_type=[piece.type for piece in proto.pieces],
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
    )


def reference(merged: dict[str, object], name: str) -> tokenizers.Tokenizer:
    """The pipeline stated with the library's own parts where it has them."""
    tokens, merges = merged["tokenizer.ggml.tokens"], merged["tokenizer.ggml.merges"]
    rule = PRE_TOKENIZERS[name]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    model = models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in merges], ignore_merges=rule.ignore_merges)
    tokenizer = tokenizers.Tokenizer(model)
    parts: dict[str, list[pre_tokenizers.PreTokenizer]] = {
        "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    }
    splits = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in rule.patterns]
    parts.setdefault(name, [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts[name])
    tokenizer.decoder = decoders.ByteLevel()
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(list(CONTROLS))
    return tokenizer


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_merged_vocabularies(merged, texts, name):
    merged["tokenizer.ggml.pre"] = name
    ours, raw = tokenizer_from_gguf(merged), reference(merged, name)
    for text in texts[:400]:
        assert ours.encode(text, add_special=False, parse_special=True) == raw.encode(text).ids


@pytest.mark.parametrize(("name", "wrong"), [("smollm", "gpt-2"), ("gpt-2", "default"), ("qwen2", "stablelm2")])
def test_a_wrong_pre_tokenizer_shows(merged, texts, name, wrong):
    merged["tokenizer.ggml.pre"] = wrong
    ours, raw = tokenizer_from_gguf(merged), reference(merged, name)
    assert any(ours.encode(text, add_special=False, parse_special=True) != raw.encode(text).ids for text in texts)


def test_an_unknown_pre_tokenizer_is_refused(merged):
    merged["tokenizer.ggml.pre"] = "newest-bpe"
    with pytest.raises(CheckpointError, match=r"unknown pre-tokenizer 'newest-bpe'; known are command-r, "):
        tokenizer_from_gguf(merged)


def test_without_a_name_it_is_the_default(merged, texts):
    del merged["tokenizer.ggml.pre"]
    unnamed = tokenizer_from_gguf(merged)
    merged["tokenizer.ggml.pre"] = "default"
    named = tokenizer_from_gguf(merged)
    assert [unnamed.encode(text) for text in texts] == [named.encode(text) for text in texts]


def test_ids_and_flags(merged):
    tokenizer = tokenizer_from_gguf(merged)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id, tokenizer.adds_bos) == (1, (2, 0), 0, False)
    merged |= {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    assert tokenizer_from_gguf(merged).encode("") == [1, 2]
    del merged["tokenizer.ggml.add_bos_token"]
    merged["tokenizer.ggml.pre"] = "llama-bpe"
    assert tokenizer_from_gguf(merged).encode("") == [1, 2], "the default of that vocabulary"
    merged["tokenizer.ggml.eot_token_id"] = 7
    assert tokenizer_from_gguf(merged).eos_ids == (2, 7, 0)
    merged["tokenizer.ggml.bos_token_id"] = 0xFFFFFFFF
    assert tokenizer_from_gguf(merged).bos_id is None


def test_added_words_and_repeated_tokens(merged):
    tokens, types = merged["tokenizer.ggml.tokens"], merged["tokenizer.ggml.token_type"]
    tokens += ["<tool>", tokens[50], ""]
    types += [USER_DEFINED, NORMAL, NORMAL]
    tokenizer = tokenizer_from_gguf(merged)
    size = len(tokens)
    assert size - 3 in tokenizer.encode("a<tool>b")
    assert not tokenizer.is_special(size - 3)
    assert tokenizer.encode(tokenizer.token_text(50)) == [50], "the first of two wins"


def test_it_survives_a_checkpoint(merged, scored, texts, tmp_path):
    for name, values in (("merged", merged), ("scored", scored)):
        tokenizer = tokenizer_from_gguf({**values, "tokenizer.ggml.add_bos_token": True})
        tokenizer.save(tmp_path / name)
        again = Tokenizer.load(tmp_path / name)
        assert again.info() == tokenizer.info()
        assert again.encode("") == [1]
        for text in texts[:500]:
            assert again.encode(text, parse_special=True) == tokenizer.encode(text, parse_special=True)


def test_scored_vocabularies(scored, sp_raw, texts):
    tokenizer = tokenizer_from_gguf(scored)
    assert (tokenizer.bos_id, tokenizer.eos_ids[0], tokenizer.unk_id, tokenizer.adds_bos) == (1, 2, 0, True)
    for text in texts:
        assert tokenizer.encode(text, add_special=False) == sp_raw.encode(text)


def test_the_space_before_a_text_is_a_flag(scored, sp_model, texts):
    scored["tokenizer.ggml.add_space_prefix"] = False
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(sp_model)
    proto.normalizer_spec.add_dummy_prefix = False
    raw = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    tokenizer = tokenizer_from_gguf(scored)
    assert not tokenizer.strips_space
    for text in texts[:500]:
        assert tokenizer.encode(text, add_special=False) == raw.encode(text)


def test_added_words_with_literal_spaces(scored):
    """Files hold runs of spaces so; the library would never find them."""
    scored["tokenizer.ggml.tokens"] += ["    ", "two words"]
    scored["tokenizer.ggml.scores"] += [0.0, 0.0]
    scored["tokenizer.ggml.token_type"] += [USER_DEFINED, USER_DEFINED]
    scored["tokenizer.ggml.add_space_prefix"] = False
    tokenizer = tokenizer_from_gguf(scored)
    size = tokenizer.vocab_size
    assert tokenizer.encode("    two words", add_special=False) == [size - 2, size - 1]
    assert tokenizer.decode([size - 2, size - 1]) == "    two words"


def test_many_unknown_pieces(scored, sp_raw, texts):
    """Some files mark many pieces as unknown; the library takes one only."""
    types = scored["tokenizer.ggml.token_type"]
    normal = [token for token, kind in enumerate(types) if kind == NORMAL]
    for token in normal[::7]:
        types[token] = UNKNOWN
    tokenizer = tokenizer_from_gguf(scored)
    for text in texts[:500]:
        assert tokenizer.encode(text, add_special=False) == sp_raw.encode(text)
    del scored["tokenizer.ggml.unknown_token_id"]
    assert tokenizer_from_gguf(scored).unk_id == 0


def test_repeated_and_empty_pieces(scored):
    scored["tokenizer.ggml.tokens"] += [scored["tokenizer.ggml.tokens"][300], ""]
    scored["tokenizer.ggml.scores"] += [0.0, 0.0]
    scored["tokenizer.ggml.token_type"] += [NORMAL, NORMAL]
    assert tokenizer_from_gguf(scored).vocab_size == len(scored["tokenizer.ggml.tokens"])


def test_marked_vocabularies(hf_tokenizers, texts):
    raw = KINDS["marked, never"]()
    raw.pre_tokenizer = None
    raw.normalizer = normalizers.Replace(" ", "\u2581")
    model = json.loads(raw.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    types = [UNKNOWN, *[CONTROL] * len(CONTROLS), *[6] * 256]
    types += [NORMAL] * (len(tokens) - len(types)) + [USER_DEFINED]
    tokens.append("\u2581\u2581")
    merges = [" ".join(pair) for pair in model["merges"]]
    values = metadata("gemma4", tokens, token_type=types, merges=merges, unknown_token_id=0, bos_token_id=1)
    tokenizer = tokenizer_from_gguf(values)
    assert tokenizer.adds_bos
    for text in texts:
        ids = tokenizer.encode(text, add_special=False, parse_special=True)
        assert ids == raw.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text.replace("\u2581", " ")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", "bert"),
        ("model", None),
        ("model", 3),
        ("tokens", None),
        ("tokens", []),
        ("tokens", "abc"),
        ("tokens", [1, 2]),
        ("token_type", [1]),
        ("token_type", ["x"]),
        ("merges", ["ab"]),
        ("merges", ["q\u0120q zz"]),
        ("merges", 7),
        ("pre", 7),
        ("bos_token_id", 10**6),
        ("bos_token_id", "1"),
        ("eos_token_id", True),
        ("add_bos_token", "yes"),
    ],
)
def test_malformed_metadata(merged, key, value):
    merged[f"tokenizer.ggml.{key}"] = value
    with pytest.raises(CheckpointError, match="GGUF file's tokenizer metadata"):
        tokenizer_from_gguf(merged)


def test_malformed_scores(scored):
    with pytest.raises(CheckpointError, match="names none"):
        tokenizer_from_gguf({**scored, "tokenizer.ggml.token_type": [6] * len(scored["tokenizer.ggml.tokens"])})
    with pytest.raises(CheckpointError, match="differ in length"):
        tokenizer_from_gguf({**scored, "tokenizer.ggml.scores": [0.0]})
