from __future__ import annotations

import concurrent.futures
import dataclasses
import gzip
import json
import shutil
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2

from jaxserve.errors import CheckpointError, ContextLengthExceeded, InvalidRequest
from jaxserve.text.backend import SPACE_MARK
from jaxserve.text.folder import SpecialIds, read_folder
from jaxserve.text.sentencepiece_backend import USER_DEFINED, SentencePieceBackend
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.tokenizers_backend import TokenizersBackend
from tests.text.samples import CONTROLS, REFERENCE

fixed = settings(derandomize=True, deadline=None, max_examples=200)
unicode_text = st.text(st.characters(exclude_categories=["Cs"]))


def check_reference(tokenizer: Tokenizer, golden: dict[str, object]) -> int:
    """How many ids and texts differ from another engine's."""
    texts, ids, plain, decode = (golden[key] for key in ("texts", "ids", "plain", "decode"))
    wrong = 0
    for index, (text, expected) in enumerate(zip(texts, ids, strict=True)):
        wrong += tokenizer.encode(text, add_special=False, parse_special=True) != expected
        wrong += tokenizer.encode(text, add_special=False) != plain.get(str(index), expected)
    return wrong + sum(tokenizer.decode(tokens) != text for tokens, text in decode)


def test_the_small_reference():
    golden = json.loads((REFERENCE / "tiny_bpe/goldens.json").read_text(encoding="utf-8"))
    assert check_reference(Tokenizer.load(REFERENCE / "tiny_bpe"), golden) == 0


@pytest.fixture(scope="module")
def real_golden():
    with gzip.open(REFERENCE / "smollm2_tokenizer.json.gz") as file:
        return json.load(file)


@pytest.mark.model
def test_the_real_reference(smollm2, real_golden):
    tokenizer = Tokenizer.load(smollm2 / "tokenizer")
    assert check_reference(tokenizer, real_golden) == 0
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.adds_bos) == (1, (2, 0), False)


@pytest.mark.gated
def test_the_real_reference_of_scored_pieces(gemma3):
    with gzip.open(REFERENCE / "gemma3_tokenizer.json.gz") as file:
        golden = json.load(file)
    tokenizer = Tokenizer.load(gemma3 / "tokenizer")
    assert len(golden["texts"]) == 2000
    assert check_reference(tokenizer, golden) == 0
    assert (tokenizer.bos_id, tokenizer.eos_ids[0], tokenizer.adds_bos) == (2, 1, True)
    assert tokenizer.vocab_size == 262_144, "as many as the embedding has rows: the file has a word for images, too"
    assert max(tokenizer.encode("<image_soft_token>", parse_special=True)) < 262_144


@pytest.mark.gated
def test_the_real_reference_sees_spaces_left_as_they_are(gemma3):
    """Runs of spaces are words of the vocabulary, which files write unmarked."""
    with gzip.open(REFERENCE / "gemma3_tokenizer.json.gz") as file:
        golden = json.load(file)
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString((gemma3 / "tokenizer" / "tokenizer.model").read_bytes())
    for piece in proto.pieces:
        if piece.type == USER_DEFINED:
            piece.piece = piece.piece.replace(SPACE_MARK, " ")
    wrong = Tokenizer(SentencePieceBackend(proto.SerializeToString()), SpecialIds())
    assert check_reference(wrong, golden) > 100


@pytest.mark.model
def test_the_real_reference_sees_a_wrong_pre_tokenizer(smollm2, real_golden):
    definition = json.loads((smollm2 / "tokenizer/tokenizer.json").read_text(encoding="utf-8"))
    splits = definition["pre_tokenizer"]["pretokenizers"]
    assert splits.pop(0)["pattern"]["Regex"] == r"\p{N}"
    wrong = Tokenizer(TokenizersBackend(json.dumps(definition)), SpecialIds())
    assert check_reference(wrong, real_golden) > 100


@fixed
@given(unicode_text)
def test_round_trip(bpe, text):
    assert bpe.decode(bpe.encode(text)) == text
    assert bpe.decode(bpe.encode(text, parse_special=True), skip_special=False) == text


@fixed
@given(unicode_text)
def test_round_trip_of_the_other_library(sp, text):
    assert sp.decode(sp.encode(text)) == text.replace("\u2581", " "), "the vocabulary's own sign for a space is one"


@pytest.mark.parametrize("name", ["bpe", "sp"])
def test_control_tokens_in_text(request, name):
    tokenizer = request.getfixturevalue(name)
    text = "bread <|im_end|>\n<|im_end|>rain"
    plain = tokenizer.encode(text, add_special=False)
    assert not any(tokenizer.is_special(token) for token in plain)
    assert tokenizer.decode(plain) == text
    control = tokenizer.controls["<|im_end|>"]
    parsed = tokenizer.encode(text, add_special=False, parse_special=True)
    assert parsed.count(control) == 2
    inert = tokenizer.encode(text, add_special=False, parse_special=True, inert={text.index("<")})
    assert inert.count(control) == 1
    assert tokenizer.decode(inert[: inert.index(control)]) == "bread <|im_end|>\n"


@pytest.mark.parametrize("name", ["bpe", "sp"])
@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\udc80" * 3])
def test_lone_surrogates(request, name, text):
    with pytest.raises(InvalidRequest, match="lone surrogate") as info:
        request.getfixturevalue(name).encode(text)
    assert info.value.code == "invalid_string"


def test_text_at_the_limit_passes(kind, texts):
    _, tokenizer = kind
    for text in texts[:500]:
        ids = tokenizer.encode(text, parse_special=True)
        assert tokenizer.encode(text, parse_special=True, max_tokens=len(ids)) == ids
        if ids:
            with pytest.raises(ContextLengthExceeded):
                tokenizer.encode(text, parse_special=True, max_tokens=len(ids) - 1)


@pytest.mark.parametrize("name", ["bpe", "sp"])
@pytest.mark.parametrize("piece", ["the river winds ", "\ufdfa", "<|im_end|>", "a", " ", "\x00", "\u4e2d", "<"])
def test_a_hopeless_text_is_refused_before_the_work(request, monkeypatch, name, piece):
    tokenizer = request.getfixturevalue(name)
    monkeypatch.setattr(tokenizer._backend, "encode", lambda _: pytest.fail("it was tokenised"))
    with pytest.raises(ContextLengthExceeded, match=r"at least \d+ tokens; at most 100 fit"):
        tokenizer.encode(piece * 200_000, max_tokens=100)


@pytest.mark.parametrize("piece", ["the river winds ", "\ufdfa", "<|im_end|>", "a", "<", "e\u0301"])
def test_the_limit_bounds_the_work_where_bytes_do_not(kind, monkeypatch, piece):
    """Also for vocabularies whose tokens may be of any length, so that no number of bytes is too many for certain."""
    _, tokenizer = kind
    monkeypatch.setattr(tokenizer, "_bound", None)
    encode, seen = tokenizer._backend.encode, []

    def counted(parts):
        seen.append(sum(len(part) for part in parts if isinstance(part, str)))
        return encode(parts)

    monkeypatch.setattr(tokenizer._backend, "encode", counted)
    with pytest.raises(ContextLengthExceeded, match="at most 1000 fit"):
        tokenizer.encode(piece * 100_000, max_tokens=1000)
    assert sum(seen) < 70_000


@pytest.mark.parametrize("text", [" " * 30_000, "\t\n" * 9_000, "the river winds " * 2_000, "x" * 20_000])
def test_a_long_text_of_few_tokens_is_not_refused_for_its_length(kind, text):
    _, tokenizer = kind
    ids = tokenizer.encode(text)
    assert tokenizer.encode(text, max_tokens=len(ids)) == ids
    tokenizer.check_length(text, len(ids))


def test_a_length_is_checked_without_the_whole_work(bpe):
    bpe.check_length("the river winds " * 10, 1000)
    bpe.check_length("<|im_end|>" * 1000, 1000)
    with pytest.raises(ContextLengthExceeded):
        bpe.check_length("the river winds " * 100_000, 1000)
    with pytest.raises(InvalidRequest):
        bpe.check_length("\ud800", 1000)


def longest_pause(work: Callable[[], object]) -> tuple[float, float]:
    """How long another thread stood still while ``work`` ran in one, and how long that took."""
    thread = threading.Thread(target=work)
    begin = last = time.perf_counter()
    pause = 0.0
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        now = time.perf_counter()
        pause, last = max(pause, now - last), now
    return pause, time.perf_counter() - begin


def test_other_threads_run_while_a_text_is_read(kind):
    """The event loop is one of them."""
    _, tokenizer = kind
    pauses = (longest_pause(lambda: tokenizer.encode("the river winds " * 40_000)) for _ in range(3))
    assert any(pause < took / 3 for pause, took in pauses)


def test_the_pause_would_show(bpe):
    """The library's plainest call keeps Python's lock from beginning to end."""
    pause, took = longest_pause(lambda: bpe._backend._tokenizer.encode("the river winds " * 40_000))
    assert pause > took / 2


def test_normalisation_counts(hf_folders):
    tokenizer = Tokenizer.load(hf_folders["folding"])
    text = "\ufdfa" * 50  # 50 characters that become 18 each
    assert len(tokenizer.encode(text)) > 500
    with pytest.raises(ContextLengthExceeded):
        tokenizer.encode(text, max_tokens=500)


def test_threads(kind, texts):
    _, tokenizer = kind
    expected = [tokenizer.encode(text, parse_special=True) for text in texts[:400]]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            assert list(pool.map(lambda text: tokenizer.encode(text, parse_special=True), texts[:400])) == expected


def test_bytes_and_names_of_tokens(bpe):
    euro = bpe.encode("\u20ac", add_special=False)
    assert b"".join(map(bpe.token_bytes, euro)) == "\u20ac".encode()
    assert bpe.token_text(euro[0]) == r"bytes:\xe2"
    assert bpe.token_text(2) == "<|im_end|>"
    assert bpe.token_bytes(2) == b""
    assert bpe.token_bytes(2, skip_special=False) == b"<|im_end|>"
    assert bpe.token_text(bpe.encode(" river")[0])[0] == " "


@pytest.mark.parametrize("token", [-1, 10**6, 2**63])
def test_ids_beyond_the_vocabulary_are_no_text(bpe, token):
    assert bpe.token_bytes(token) == b""
    assert bpe.decode([token, *bpe.encode("rain")]) == "rain"
    assert not bpe.is_special(token)


def test_invalid_bytes_are_replaced(bpe):
    first, second, third = bpe.encode("\u20ac", add_special=False)
    assert bpe.decode([first, second]) == "\ufffd"
    assert bpe.decode([third, first, second, third]) == "\ufffd\u20ac"


def test_info(bpe):
    info = bpe.info()
    assert info["eos_token"] == "<|im_end|>"
    assert info["eos_token_id"] == [2, 0]
    assert info["special_tokens"] == {name: token for token, name in enumerate(CONTROLS)}
    assert bpe.token_id("<|im_start|>") == 1
    assert bpe.token_id("river") is None
    json.dumps(info)


def test_a_table_that_does_not_fit_its_encoder_is_refused(hf_tokenizers):
    backend = TokenizersBackend(hf_tokenizers["byte-level"].to_str())
    backend.surfaces.insert(0, backend.surfaces.pop())
    with pytest.raises(CheckpointError, match="does not give a text back"):
        Tokenizer(backend, SpecialIds())


def test_special_ids_are_a_value():
    assert dataclasses.replace(SpecialIds(), bos=1) == SpecialIds(bos=1)


@pytest.mark.parametrize("wrong", [{"bos": 99_999}, {"eos": (0, 99_999)}, {"before": (-1,)}, {"unk": 400}])
def test_a_special_token_outside_the_vocabulary_is_refused(wrong):
    backend, special = read_folder(REFERENCE / "tiny_bpe")
    Tokenizer(backend, special)
    with pytest.raises(CheckpointError, match="outside the vocabulary"):
        Tokenizer(backend, dataclasses.replace(special, **wrong))


def declared(tokenizer: Tokenizer, folder, *words: str) -> Tokenizer:
    """With control tokens behind its vocabulary, whichever library reads it."""
    tokenizer.save(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["added_tokens_decoder"] = {
        str(tokenizer.vocab_size + index): {"content": word, "special": True} for index, word in enumerate(words)
    }
    path.write_text(json.dumps(config))
    return Tokenizer.load(folder)


@pytest.mark.parametrize("name", ["bpe", "sp"])
def test_tokens_without_an_embedding_are_never_given(request, name, tmp_path, texts):
    plain = request.getfixturevalue(name)
    rows = plain.vocab_size
    longer = declared(plain, tmp_path / "longer", "<image>", "<sound>")
    text = "see <image> and <sound>"
    assert {rows, rows + 1} <= set(longer.encode(text, parse_special=True))
    fitting = longer.within(rows)
    assert fitting.vocab_size == rows
    assert fitting.controls == plain.controls
    assert fitting.encode(text, parse_special=True) == plain.encode(text, parse_special=True)
    assert fitting.decode(fitting.encode(text, parse_special=True)) == text
    for text in texts[:300]:
        assert fitting.encode(text, parse_special=True) == plain.encode(text, parse_special=True)
    fitting.save(tmp_path / "again")
    assert Tokenizer.load(tmp_path / "again").info() == fitting.info() == plain.info()
    one_more = longer.within(rows + 1)
    assert set(one_more.encode("<image><sound>", parse_special=True)) & {rows, rows + 1} == {rows}


@pytest.mark.parametrize("name", ["bpe", "sp"])
def test_a_vocabulary_of_another_model_is_not_cut(request, name, tmp_path):
    plain = request.getfixturevalue(name)
    assert plain.within(plain.vocab_size) is plain
    with pytest.raises(CheckpointError, match="ordinary text"):
        plain.within(plain.vocab_size - 1)
    longer = declared(plain, tmp_path / "longer", "<|eot_id|>")
    assert plain.vocab_size in longer.eos_ids
    with pytest.raises(CheckpointError, match="outside the vocabulary"):
        longer.within(plain.vocab_size)


def test_an_unknown_token_that_is_unknown_itself_is_refused(tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(REFERENCE / "tiny_bpe", folder)
    tree = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = {sign: number for number, sign in enumerate("abc")}
    tree["model"] = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "nowhere"}
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    with pytest.raises(CheckpointError):
        Tokenizer.load(folder)
