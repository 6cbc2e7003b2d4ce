from __future__ import annotations

import gzip
import json
import random

import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from jaxserve.errors import CheckpointError
from jaxserve.text.control import AddedToken
from jaxserve.text.sentencepiece_backend import BYTE, CONTROL, NORMAL, UNKNOWN, SentencePieceBackend, bpe_model
from jaxserve.text.tokenizer import Tokenizer
from tests.text.samples import REFERENCE, sentencepiece_model


def model(tmp_path, data: bytes, **config: object) -> Tokenizer:
    tmp_path.joinpath("tokenizer.model").write_bytes(data)
    tmp_path.joinpath("tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return Tokenizer.load(tmp_path)


def test_same_ids_as_the_library(sp, sp_raw, texts):
    for text in texts:
        assert sp.encode(text, add_special=False) == sp_raw.encode(text)


def test_same_ids_as_the_reference(tmp_path):
    with gzip.open(REFERENCE / "tiny_sp.json.gz") as file:
        golden = json.load(file)
    tokenizer = model(tmp_path, (REFERENCE / "tiny_sp.model").read_bytes())
    assert [tokenizer.encode(text, add_special=False) for text in golden["texts"]] == golden["ids"]


def test_same_text_as_the_library(sp, sp_raw, texts):
    for text in texts:
        ids = sp_raw.encode(text)
        assert sp.decode(ids) == sp_raw.decode(ids)


def test_arbitrary_ids_decode_as_the_library_does(sp, sp_raw):
    """Where the two agree on what broken UTF-8, the unknown piece and a leading space byte read as."""
    rng = random.Random(4)
    compared = 0
    for _ in range(2000):
        ids = [rng.randrange(1, sp.vocab_size) for _ in range(rng.randint(1, 8))]
        text = sp.decode(ids)
        if "\ufffd" not in text and sp.token_bytes(ids[0]) != b" ":
            assert text == sp_raw.decode(ids)
            compared += 1
    assert compared > 500


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "unigram", "vocab_size": 320},
        {"normalization_rule_name": "nmt_nfkc"},
        {"remove_extra_whitespaces": True},
        {"add_dummy_prefix": False},
    ],
)
def test_other_models(tmp_path, texts, options):
    data = sentencepiece_model(**options)
    raw = sentencepiece.SentencePieceProcessor(model_proto=data)
    tokenizer = model(tmp_path, data)
    for text in texts[:500]:
        assert tokenizer.encode(text, add_special=False) == raw.encode(text)
        if "\x00" not in text:
            tokenizer.encode(text, add_special=False, max_tokens=len(raw.encode(text)))


def test_control_pieces_are_never_spelled(sp, sp_raw):
    control = sp_raw.piece_to_id("<|im_end|>")
    text = "bread<|im_end|> and</s><s><unk> rain"
    plain = sp.encode(text, add_special=False)
    assert not set(plain) & {0, 1, 2, control}
    assert sp.decode(plain) == text
    parsed = sp.encode(text, add_special=False, parse_special=True)
    assert [token for token in parsed if sp.is_special(token)] == [control, 2, 1, 0]


def test_user_defined_pieces_are_words(sp, sp_raw):
    turn = sp_raw.piece_to_id("<turn>")
    assert turn in sp.encode("a<turn>b")
    assert sp.token_bytes(turn) == b"<turn>"
    assert not sp.is_special(turn)


def test_a_config_may_make_a_word_a_control_token(tmp_path, sp_model, sp_raw):
    turn = sp_raw.piece_to_id("<turn>")
    entry = {"content": "<turn>", "special": True, "rstrip": True}
    tokenizer = model(tmp_path, sp_model, added_tokens_decoder={str(turn): entry})
    assert turn not in tokenizer.encode("a<turn>b")
    parsed = tokenizer.encode("a<turn>  b", add_special=False, parse_special=True)
    assert parsed == [*sp_raw.encode("a"), turn, *sp_raw.encode("b")]
    tokenizer.save(tmp_path / "again")
    again = Tokenizer.load(tmp_path / "again")
    assert again.encode("a<turn>  b", add_special=False, parse_special=True) == parsed


def test_a_config_may_extend_the_model(tmp_path, sp_model):
    added = {"450": {"content": "<|user|>", "special": True}, "453": {"content": "two words", "special": False}}
    tokenizer = model(tmp_path, sp_model, added_tokens_decoder=added)
    assert tokenizer.vocab_size == 454
    assert tokenizer.controls["<|user|>"] == 450
    assert 453 in tokenizer.encode("say two words now")
    assert tokenizer.token_bytes(453) == b"two words"
    with pytest.raises(CheckpointError, match="impossible id"):
        model(tmp_path, sp_model, added_tokens_decoder={"9999999": {"content": "<far>", "special": True}})


def test_the_dummy_space_after_control_tokens(tmp_path, sp_model, sp_raw):
    text = "bread<|im_end|>rain"
    control = sp_raw.piece_to_id("<|im_end|>")
    before = model(tmp_path, sp_model, legacy=True).encode(text, add_special=False, parse_special=True)
    assert before == [*sp_raw.encode("bread"), control, *sp_raw.encode("rain")]
    now = model(tmp_path, sp_model, legacy=False)
    ids = now.encode(text, add_special=False, parse_special=True)
    assert ids[: ids.index(control)] == sp_raw.encode("bread")
    assert ids[ids.index(control) + 1 :] != sp_raw.encode("rain")
    assert now.decode(ids) == "breadrain"
    now.save(tmp_path / "again")
    assert Tokenizer.load(tmp_path / "again").encode(text, add_special=False, parse_special=True) == ids


def test_spaces_at_the_start(sp):
    ids = sp.encode("rain", add_special=False)
    assert sp.decode(ids) == "rain"
    assert sp.decode(ids, continues=True) == " rain"
    assert sp.decode(sp.encode("  rain")) == "  rain"


def test_ids_of_the_model(sp):
    assert (sp.bos_id, sp.eos_ids[0], sp.pad_id, sp.unk_id) == (1, 2, None, 0)
    assert sp.adds_bos
    assert not sp.adds_eos
    assert sp.encode("")[0] == 1


def test_built_models():
    pieces = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), *((f"<0x{b:02X}>", 0.0, BYTE) for b in range(256))]
    pieces += [("\u2581", -1.0, NORMAL), ("a", -2.0, NORMAL), ("\u2581a", -0.5, NORMAL)]
    data = bpe_model(pieces, {"unk": 0, "bos": 1, "eos": -1, "pad": -1}, add_dummy_prefix=True)
    backend = SentencePieceBackend(data)
    assert (backend.bos_id, backend.eos_id, backend.pad_id, backend.unk_id) == (1, -1, -1, 0)
    assert backend.encode(["a\n"]) == [260, 2 + 10]
    assert backend.surfaces[2 + 10] == b"\n"


def test_bad_files_are_refused(tmp_path, sp_model):
    rng = random.Random(6)
    cut = [sp_model[: rng.randrange(len(sp_model) - 200)] for _ in range(60)]
    noise = [rng.randbytes(rng.randrange(1, 400)) for _ in range(30)]
    for data in [b"", b"\n", b"{}", b"gpt2\n" * 100, *cut, *noise]:
        with pytest.raises(CheckpointError, match=r"tokenizer\.model"):
            model(tmp_path, data)


def test_a_file_cut_between_two_pieces_is_refused(tmp_path, sp_model):
    """It parses: nothing but what is missing tells."""
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(sp_model)
    del proto.pieces[300:]
    for field in ("trainer_spec", "normalizer_spec", "denormalizer_spec"):
        proto.ClearField(field)
    data = proto.SerializeToString()
    assert sp_model.startswith(data)
    with pytest.raises(CheckpointError, match="not a whole"):
        model(tmp_path, data)


def test_models_that_mark_spaces_behind_words_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="treat_whitespace_as_suffix"):
        model(tmp_path, sentencepiece_model(treat_whitespace_as_suffix=True))


def test_declared_tokens_reach_the_library(sp_model):
    backend = SentencePieceBackend(sp_model, [AddedToken(450, "<|x|>", control=True, lstrip=True)])
    assert backend.dropped is None, "a token that eats spaces makes lengths unbounded"
    assert backend.added[-1].lstrip
