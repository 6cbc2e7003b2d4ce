from __future__ import annotations

import json
import random

import pytest
import tokenizers

from jaxserve.errors import CheckpointError
from jaxserve.text.control import AddedToken, ControlMatcher
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.tokenizers_backend import TokenizersBackend, byte_letters
from tests.text.samples import REFERENCE, byte_level_bpe, eating_spaces, marked_bpe


@pytest.fixture
def definition(hf_tokenizers):
    return json.loads(hf_tokenizers["byte-level"].to_str())


def spiced(texts: list[str]) -> list[str]:
    """Texts with control tokens, added words and white space strewn in."""
    rng = random.Random(3)
    spices = ["<|im_end|>", "<|im_start|>", "<|end|>", "[MASK]", "STOP", "</think>", "<|im", " ", "\n", "x", "<unk>"]
    return [
        "".join(rng.choice(texts) + rng.choice(["", *spices]) for _ in range(rng.randint(1, 4))) for _ in range(2000)
    ]


def ids(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def test_same_ids_as_the_library(kind, texts):
    raw, ours = kind
    raw.encode_special_tokens = False
    for text in texts + spiced(texts):
        assert ours.encode(text, add_special=False, parse_special=True) == ids(raw, text)


def test_same_ids_as_the_library_when_control_tokens_are_text(kind, texts):
    raw, ours = kind
    raw.encode_special_tokens = True
    try:
        for text in texts + spiced(texts):
            assert ours.encode(text, add_special=False) == ids(raw, text)
    finally:
        raw.encode_special_tokens = False


def test_same_text_as_the_library(kind, texts):
    raw, ours = kind
    for text in texts:
        encoded = ours.encode(text, add_special=False)
        assert ours.decode(encoded) == raw.decode(encoded, skip_special_tokens=True)


def test_letters_are_the_librarys():
    assert sorted(byte_letters().values()) == sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def test_surfaces_are_bytes(hf_tokenizers):
    backend = TokenizersBackend(hf_tokenizers["byte-level"].to_str())
    singles = [surface for surface in backend.surfaces if len(surface) == 1]
    assert sorted(singles) == [bytes([byte]) for byte in range(256)]
    assert backend.surfaces[2] == b"<|im_end|>"
    assert backend.dropped == b""
    marked = TokenizersBackend(hf_tokenizers["marked, first"].to_str())
    assert marked.surfaces[4 + 0xE2] == b"\xe2"
    assert marked.strips_space
    assert not TokenizersBackend(hf_tokenizers["marked, never"].to_str()).strips_space


def test_what_cannot_be_bounded_is_not(hf_tokenizers, definition):
    assert TokenizersBackend(hf_tokenizers["eating spaces"].to_str()).dropped is None
    definition["pre_tokenizer"] = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}
    assert TokenizersBackend(json.dumps(definition)).dropped is None
    raw = tokenizers.Tokenizer.from_str(marked_bpe("first").to_str())
    without = json.loads(raw.to_str())
    without["model"]["byte_fallback"] = False
    assert TokenizersBackend(json.dumps(without)).dropped is None


def test_missing_bytes_are_dropped(definition):
    letter = byte_letters()[4]
    model = definition["model"]
    number = model["vocab"].pop(letter)
    model["vocab"]["\u0394filler"] = number
    backend = TokenizersBackend(json.dumps(definition))
    assert backend.dropped == b"\x04"
    assert backend.encode(["a\x04b"]) == backend.encode(["a"]) + backend.encode(["b"])


def test_a_file_cannot_cut_or_pad_prompts():
    raw = byte_level_bpe()
    plain = ids(raw, "the river winds " * 10)
    raw.enable_truncation(4)
    raw.enable_padding(length=500)
    assert TokenizersBackend(raw.to_str()).encode(["the river winds " * 10]) == plain


def test_other_files_may_declare_control_tokens(definition):
    definition["added_tokens"] = []
    extra = [AddedToken(2, "<|im_end|>", control=True), AddedToken(-1, "<|im_start|>", control=True)]
    backend = TokenizersBackend(json.dumps(definition), [*extra, AddedToken(-1, "<absent>", control=True)])
    assert [(token.token, token.spelling) for token in backend.added] == [(1, "<|im_start|>"), (2, "<|im_end|>")]
    assert all(token.control for token in backend.added)


def test_save_gives_the_same_tokenizer(kind, tmp_path, texts):
    _, ours = kind
    ours.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    assert again.info() == ours.info()
    for text in spiced(texts)[:300]:
        assert again.encode(text, parse_special=True) == ours.encode(text, parse_special=True)
    saved = json.loads(tmp_path.joinpath("tokenizer.json").read_text(encoding="utf-8"))
    assert not any("\U0010ffff" in entry["content"] for entry in saved["added_tokens"])


def test_text_with_the_stand_ins_sign_is_text(bpe):
    assert bpe.decode(bpe.encode("\U0010ffff<|im_end|>\U0010ffff", parse_special=True)) == "\U0010ffff\U0010ffff"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: d.update(decoder={"type": "WordPiece", "prefix": "##", "cleanup": True}), "decoder"),
        (lambda d: d.update(decoder=None), "decoder"),
        (lambda d: d.update(model=None), "no model"),
        (lambda d: d["model"].update(vocab=None), "malformed"),
        (lambda d: d["model"].update(merges=[["qqq", "zzz"]]), "usable"),
        (lambda d: d.update(added_tokens=[{"id": 0}]), "malformed"),
        (lambda d: d["added_tokens"].append({**d["added_tokens"][0], "id": 5000, "content": "<far>"}), "id 5000"),
        (lambda d: d["added_tokens"][0].update(id="x"), "usable"),
    ],
)
def test_malformed_definitions_are_refused(definition, change, reason):
    change(definition)
    with pytest.raises(CheckpointError, match=rf"^some\.json.*{reason}"):
        TokenizersBackend(json.dumps(definition), source="some.json")


def test_a_panic_of_the_library_is_an_error(definition):
    definition["model"]["continuing_subword_prefix"] = "####"
    definition["model"]["merges"] = [["a", "b"]]
    with pytest.raises(CheckpointError):
        TokenizersBackend(json.dumps(definition))


def test_bad_files_are_refused(tmp_path):
    good = REFERENCE.joinpath("tiny_bpe/tokenizer.json").read_bytes()
    rng = random.Random(5)
    bad = [good[: rng.randrange(len(good))] for _ in range(40)] + [rng.randbytes(rng.randrange(400)) for _ in range(20)]
    path = tmp_path / "tokenizer.json"
    for content in [b"", b"{}", b"[]", b"null", b"[" * 100_000, *bad]:
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
            Tokenizer.load(tmp_path)


def test_the_comparison_finds_flags_that_are_not_honoured(texts):
    raw = eating_spaces()
    plain = json.loads(raw.to_str())
    for entry in plain["added_tokens"]:
        entry["rstrip"] = entry["lstrip"] = entry["single_word"] = False
    matcher = ControlMatcher(TokenizersBackend(json.dumps(plain)).added)
    backend = TokenizersBackend(raw.to_str())
    found = [ids(raw, text) == backend.encode(matcher.split(text)) for text in spiced(texts)]
    assert found.count(False) > 100
