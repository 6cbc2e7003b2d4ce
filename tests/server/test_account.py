"""Accounts as clients get them: who is told what, and what a block looks like on its way."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import msgspec
import pytest

from jaxserve.engine.request import Account, Pass
from jaxserve.models.decoding import Decoding
from jaxserve.server.account import Updates, usage
from jaxserve.server.generation import Piece
from jaxserve.server.parallel import Asked
from jaxserve.server.service import ServedModel
from jaxserve.server.shapes import Envelope

MASK = 258
TOOK = Account(passes=4, drafted=8, accepted=7, rejected=1, predicted_accepted=3, predicted_rejected=2, wasted=1)


@pytest.fixture
def blocks(model: ServedModel) -> ServedModel:
    return dataclasses.replace(model, decoding=Decoding("block", 4, mask_id=MASK))


def generation(account: Account = TOOK, *passes: Pass) -> SimpleNamespace:
    return SimpleNamespace(prompt_tokens=5, completion_tokens=10, account=account, passes=[list(passes)], rounds=[])


def told(model: ServedModel, asked: Asked = Asked(), *, last: bool = True, **given) -> dict:  # noqa: B008
    return msgspec.to_builtins(usage(generation(**given), asked, model, last=last))


def test_ordinary_clients_see_what_they_always_saw(model):
    plain = {"prompt_tokens": 5, "completion_tokens": 10, "total_tokens": 15}
    assert told(model, account=Account(passes=10)) == plain
    assert told(model, account=Account()) == plain


def test_who_asks_is_told_and_so_is_who_got_several_tokens_a_pass(model, blocks):
    for found in (
        told(model),
        told(model, Asked(told=True), account=Account(passes=10)),
        told(blocks, account=Account(passes=10)),
    ):
        assert found["parallel_details"]["passes"] in (4, 10)
        assert "completion_tokens_details" not in found
    assert told(model)["parallel_details"] == {
        "passes": 4,
        "drafted_tokens": 8,
        "accepted_tokens": 7,
        "rejected_tokens": 1,
        "edited_tokens": 0,
        "inserted_tokens": 0,
        "deleted_tokens": 0,
        "wasted_tokens": 1,
        "blocks": 0,
        "post_steps": 0,
        "tokens_per_pass": 2.5,
    }


def test_what_became_of_a_prediction_has_openais_names(model):
    found = told(model, Asked(predicted=True, told=True))["completion_tokens_details"]
    assert found == {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 2}


def updates(blocks: ServedModel, *canvases: tuple[int, tuple[int, ...]], envelope: Envelope | None = None) -> list:
    teller = Updates(blocks, envelope)
    return [teller.of(Piece(0, "", (), None, 0, canvas, block)) for block, canvas in canvases]


def test_updates_say_what_changed_since_the_one_before(blocks):
    a, b = (blocks.tokenizer.encode(sign)[0] for sign in "ab")
    first, second, third = updates(blocks, (0, (a, MASK, b, MASK)), (0, (a, a, b, MASK)), (1, (MASK, b, b, MASK)))
    assert (first.text, first.tokens, first.changed) == ("a\u2591b\u2591", ["a", None, "b", None], [0, 2])
    assert (second.text, second.changed, second.block_index) == ("aab\u2591", [1], 0)
    assert (third.text, third.changed, third.block_index) == ("\u2591bb\u2591", [1, 2], 1)


def test_characters_of_several_tokens_are_whole(blocks):
    (found,) = updates(blocks, (0, (*blocks.tokenizer.encode("é"), MASK, blocks.tokenizer.encode("é")[0])))
    assert found.text == "é\u2591\ufffd"
    assert len(found.tokens) == 4


def test_an_update_names_the_answer_that_it_belongs_to(blocks):
    (found,) = updates(blocks, (0, (MASK,)), envelope=Envelope("cmpl-1", 5, "toy", None))
    assert (found.id, found.created, found.model, found.choices) == ("cmpl-1", 5, "toy", [])
