"""Every field that OpenAI's clients read, in every shape: whole and in chunks."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import UNSET

from jaxserve.server.generation import Output, Piece, Token
from jaxserve.server.shapes import ChatShape, CompletionShape, Envelope, GenerateShape
from jaxserve.server.wire import Usage

ENVELOPE = Envelope("x-1", 17, "toy", "fp_1")
USAGE = Usage(3, 4, 7)


def plain(struct: msgspec.Struct) -> dict:
    return msgspec.json.decode(msgspec.json.encode(struct))


@pytest.fixture
def tokens(engine) -> list[Token]:
    a, b = (engine.token_of(ord(letter)) for letter in "ab")
    return [Token(a, -0.25, ((b, -0.125), (a, -0.25)), 0), Token(b, -2.0, ((a, -0.5),), 1)]


@pytest.mark.parametrize(("usage", "found"), [(UNSET, {}), (None, {"usage": None}), (USAGE, {"usage": plain(USAGE)})])
@pytest.mark.parametrize("kind", [ChatShape, CompletionShape])
def test_usage_is_there_null_or_absent(kind, usage, found, tokenizer):
    chunk = plain(kind(ENVELOPE, tokenizer, logprobs=None).chunk(Piece(0, "x", (), None, 1), usage))
    assert {name: value for name, value in chunk.items() if name == "usage"} == found


@pytest.mark.parametrize("kind", [ChatShape, CompletionShape])
def test_the_envelope_is_the_same_everywhere(kind, tokenizer):
    shape = kind(ENVELOPE, tokenizer, logprobs=None)
    events = [*shape.opening(2, UNSET), shape.chunk(Piece(0, "x", (), None, 1), UNSET), *shape.closing(USAGE)]
    for event in [*map(plain, events), plain(shape.whole([Output(0)], USAGE))]:
        assert (event["id"], event["created"], event["model"], event["system_fingerprint"]) == (
            "x-1",
            17,
            "toy",
            "fp_1",
        )


def test_the_last_chunk_of_chat_has_an_empty_delta(tokenizer):
    shape = ChatShape(ENVELOPE, tokenizer, logprobs=False)
    (choice,) = plain(shape.chunk(Piece(1, "", (), "length", 1), UNSET))["choices"]
    assert choice == {"index": 1, "delta": {}, "logprobs": None, "finish_reason": "length"}


def test_logprobs_of_chat_name_tokens_and_bytes(tokenizer, tokens):
    shape = ChatShape(ENVELOPE, tokenizer, logprobs=True)
    (choice,) = plain(shape.whole([Output(0, "ab", tokens, "stop")], USAGE))["choices"]
    first, second = choice["logprobs"]["content"]
    assert first == {
        "token": "a",
        "logprob": -0.25,
        "bytes": [97],
        "top_logprobs": [
            {"token": "b", "logprob": -0.125, "bytes": [98]},
            {"token": "a", "logprob": -0.25, "bytes": [97]},
        ],
    }
    assert [entry["token"] for entry in second["top_logprobs"]] == ["a"]


def test_logprobs_of_completions_always_hold_the_chosen_token(tokenizer, tokens):
    shape = CompletionShape(ENVELOPE, tokenizer, logprobs=1)
    (choice,) = plain(shape.whole([Output(0, "ab", tokens, "stop")], USAGE))["choices"]
    assert choice["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.25, -2.0],
        "top_logprobs": [{"b": -0.125, "a": -0.25}, {"a": -0.5, "b": -2.0}],
        "text_offset": [0, 1],
    }


def test_control_tokens_have_a_name_and_no_bytes(tokenizer):
    end = tokenizer.token_id("<|im_end|>")
    shape = GenerateShape(tokenizer, logprobs=True)
    (entry,) = plain(shape.chunk(Piece(0, "", (Token(end, -1.0, (), 0),), None, 1), USAGE))["logprobs"]
    assert entry == {"token": "<|im_end|>", "logprob": -1.0, "bytes": None, "top_logprobs": []}


def test_generate_leaves_out_what_was_not_asked(tokenizer):
    shape = GenerateShape(tokenizer, logprobs=False)
    assert plain(shape.whole([Output(0, "x", [], "stop")], USAGE)) == {
        "text": "x",
        "finish_reason": "stop",
        "usage": plain(USAGE),
    }
    assert (list(shape.opening(1, UNSET)), list(shape.closing(USAGE))) == ([], [])
