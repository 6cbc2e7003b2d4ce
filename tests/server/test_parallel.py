"""Every field of ``parallel`` and ``prediction``: what it becomes, and what is refused for which model."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from jaxserve.errors import InvalidRequest
from jaxserve.models.decoding import SEQUENTIAL, Decoding
from jaxserve.server import parallel, wire
from jaxserve.server.extensions import Parallel
from jaxserve.server.parse import parse
from jaxserve.server.service import ServedModel

EDITS = Decoding("block", 16, mask_id=258, threshold=0.7, edit_threshold=0.5, post_steps=16)
FILLS = Decoding("block", 4, mask_id=258, threshold=0.85)
CANVAS = Decoding("canvas", 32, denoising_steps=8)


@pytest.fixture
def models(model: ServedModel) -> dict[str, ServedModel]:
    """One of each kind; ``plain`` makes no drafts."""
    return {
        "plain": model,
        "drafts": dataclasses.replace(model, drafts=7),
        "edits": dataclasses.replace(model, decoding=EDITS),
        "fills": dataclasses.replace(model, decoding=FILLS),
        "canvas": dataclasses.replace(model, decoding=CANVAS),
    }


def asked(model: ServedModel, more: dict | None = None, **fields) -> parallel.Asked:
    body = {"prompt": "x", "parallel": fields} | (more or {})
    return parallel.asked(parse(msgspec.json.encode(body), wire.CompletionRequest), model)


def test_who_says_nothing_asks_nothing(models):
    for model in models.values():
        assert parallel.asked(wire.CompletionRequest(prompt="x"), model) == parallel.Asked()
        assert asked(model) == parallel.Asked(told=True)
        assert asked(model, mode="auto", stream="committed", trace="none", candidates=1).settings == ()


ALL_OFF = {"rule": SEQUENTIAL, "max_post_steps": 0}


@pytest.mark.parametrize(
    ("kind", "fields", "settings"),
    [
        ("plain", {"mode": "off"}, {}),
        ("drafts", {"mode": "off"}, {"drafts": 0}),
        ("drafts", {"mode": "draft"}, {}),
        ("drafts", {"mode": "draft", "draft_tokens": 3}, {"drafts": 3}),
        ("drafts", {"draft_tokens": 7}, {"drafts": 7}),
        ("edits", {"mode": "block", "block_length": 16}, {}),
        ("edits", {"mode": "off"}, ALL_OFF | {"denoising_steps": 16}),
        ("fills", {"mode": "off"}, ALL_OFF | {"denoising_steps": 4}),
        ("fills", {"mask_threshold": 0.3, "denoising_steps": 2}, {"threshold": 0.3, "denoising_steps": 2}),
        ("edits", {"edit_threshold": 0, "max_post_steps": 3}, {"edit_threshold": 0, "max_post_steps": 3}),
        ("edits", {"quality": "speed"}, {"threshold": 0.5, "edit_threshold": 0.0, "max_post_steps": 16}),
        ("edits", {"quality": "quality"}, {"threshold": 0.7, "edit_threshold": 0.5, "max_post_steps": 16}),
        ("edits", {"quality": "balanced"}, {}),
        ("fills", {"quality": "speed"}, {"threshold": 0.85}),
        ("fills", {"quality": "quality", "mask_threshold": 1}, {"threshold": 1}),
        ("canvas", {"denoising_steps": 64, "block_length": 32, "mode": "block"}, {"denoising_steps": 64}),
    ],
)
def test_what_it_becomes(models, kind, fields, settings):
    assert dict(asked(models[kind], **fields).settings) == settings


EVERYWHERE = [
    ({"mode": "fast"}, "mode"),
    ({"rescore": "best", "candidates": 2}, "rescore"),
    ({"quality": ""}, "quality"),
    ({"trace": "all"}, "trace"),
    ({"stream": "both"}, "stream"),
    ({"mode": 1}, "mode"),
    ({"mask_threshold": "0.5"}, "mask_threshold"),
    ({"mask_threshold": 1.5}, "mask_threshold"),
    ({"edit_threshold": -0.1}, "edit_threshold"),
    ({"draft_tokens": 0}, "draft_tokens"),
    ({"draft_tokens": True}, "draft_tokens"),
    ({"draft_tokens": 2.0e9}, "draft_tokens"),
    ({"block_length": 0}, "block_length"),
    ({"max_post_steps": -1}, "max_post_steps"),
    ({"denoising_steps": 0}, "denoising_steps"),
    ({"candidates": 0}, "candidates"),
    ({"candidates": 2, "mode": "off"}, "candidates"),
    ({"rescore": "logprob"}, "rescore"),
    ({"fragment_tokens": 8}, "fragment_tokens"),
    ({"fragment_tokens": 0, "candidates": 2}, "fragment_tokens"),
    ({"stream": "provisional"}, "stream"),
]


@pytest.mark.parametrize("kind", ["plain", "drafts", "edits", "fills", "canvas"])
@pytest.mark.parametrize(("fields", "param"), EVERYWHERE)
def test_what_no_model_takes(models, kind, fields, param):
    with pytest.raises(InvalidRequest) as refused:
        asked(models[kind], **fields)
    assert refused.value.param == f"parallel.{param}"


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        *(
            (kind, fields, param)
            for kind in ("plain", "drafts")
            for fields, param in (
                ({"mode": "block"}, "mode"),
                ({"block_length": 16}, "block_length"),
                ({"mask_threshold": 0.5}, "mask_threshold"),
                ({"edit_threshold": 0.5}, "edit_threshold"),
                ({"max_post_steps": 1}, "max_post_steps"),
                ({"denoising_steps": 1}, "denoising_steps"),
                ({"quality": "speed"}, "quality"),
            )
        ),
        ("plain", {"mode": "draft"}, "mode"),
        ("plain", {"draft_tokens": 2}, "draft_tokens"),
        ("drafts", {"draft_tokens": 8}, "draft_tokens"),
        ("drafts", {"draft_tokens": 2, "mode": "off"}, "draft_tokens"),
        ("edits", {"mode": "draft"}, "mode"),
        ("edits", {"draft_tokens": 2}, "draft_tokens"),
        ("edits", {"block_length": 32}, "block_length"),
        ("edits", {"mode": "off", "mask_threshold": 0.5}, "mask_threshold"),
        ("edits", {"mode": "off", "quality": "speed"}, "quality"),
        ("edits", {"denoising_steps": 17}, "denoising_steps"),
        ("fills", {"edit_threshold": 0.5}, "edit_threshold"),
        ("fills", {"max_post_steps": 5}, "max_post_steps"),
        ("canvas", {"mode": "off"}, "mode"),
        ("canvas", {"mask_threshold": 0.5}, "mask_threshold"),
        ("canvas", {"quality": "speed"}, "quality"),
    ],
)
def test_what_makes_no_sense_for_a_model(models, kind, fields, param):
    with pytest.raises(InvalidRequest) as refused:
        asked(models[kind], **fields)
    assert refused.value.param == f"parallel.{param}"


def test_provisional_text_is_for_streams_of_models_whose_text_changes(models):
    assert asked(models["edits"], {"stream": True}, stream="provisional").provisional
    for kind, more, fields in (
        ("plain", {"stream": True}, {}),
        ("edits", {}, {}),
        ("edits", {"stream": True}, {"candidates": 2}),
    ):
        with pytest.raises(InvalidRequest) as refused:
            asked(models[kind], more, stream="provisional", **fields)
        assert refused.value.param == "parallel.stream"


def test_a_trace_needs_a_place_in_the_answer(models):
    assert asked(models["plain"], trace="summary").trace == "summary"
    closing = {"stream": True, "stream_options": {"include_usage": True}}
    assert asked(models["edits"], closing, trace="steps").trace == "steps"
    with pytest.raises(InvalidRequest) as refused:
        asked(models["edits"], {"stream": True}, trace="steps")
    assert refused.value.param == "parallel.trace"


def test_candidates(models):
    assert asked(models["plain"], mode="candidates").candidates == 2
    wanted = asked(models["edits"], candidates=4, rescore="verifier")
    assert (wanted.candidates, wanted.rescore, wanted.fragment_tokens) == (4, "verifier", 32)
    assert asked(models["plain"], candidates=2, fragment_tokens=9).fragment_tokens == 9
    assert (wanted.times, asked(models["plain"], candidates=4).times, asked(models["plain"]).times) == (10, 5, 1)
    for kind in ("plain", "canvas"):
        with pytest.raises(InvalidRequest) as refused:
            asked(models[kind], candidates=2, rescore="verifier")
        assert refused.value.param == "parallel.rescore"


@pytest.mark.parametrize("content", ["Hi, you", [{"type": "text", "text": "Hi, "}, {"type": "text", "text": "you"}]])
def test_a_prediction_becomes_a_draft(models, content):
    for model in models.values():
        body = {"prompt": "x", "prediction": {"type": "content", "content": content}}
        found = parallel.asked(parse(msgspec.json.encode(body), wire.CompletionRequest), model)
        assert found.draft == tuple(model.tokenizer.encode("Hi, you"))
        assert found.predicted
        assert found.told


def test_a_prediction_is_text_and_no_control_token(models):
    model = models["plain"]
    wanted = wire.CompletionRequest(prompt="x", prediction=wire.Prediction("content", "<|im_end|>"))
    assert len(parallel.asked(wanted, model).draft) == len("<|im_end|>")
    empty = wire.CompletionRequest(prompt="x", prediction=wire.Prediction("content", ""))
    assert parallel.asked(empty, model) == parallel.Asked(predicted=True, told=True)


@pytest.mark.parametrize(
    "prediction",
    [
        {"type": "text", "content": "x"},
        {"type": "content"},
        {"type": "content", "content": 3},
        {"type": "content", "content": [{"type": "image_url"}]},
        {"type": "content", "content": [{"type": "text"}]},
        {"type": "content", "content": "x" * 513},
        {"type": "content", "content": [{"type": "text", "text": ""}] * 1025},
        "x",
    ],
)
def test_what_is_no_prediction(models, prediction):
    body = msgspec.json.encode({"prompt": "x", "prediction": prediction})
    with pytest.raises(InvalidRequest) as refused:
        parallel.asked(parse(body, wire.CompletionRequest), models["plain"])
    assert refused.value.param == "prediction"


def test_every_field_is_a_word_or_a_range():
    assert set(Parallel.__struct_fields__) == set(parallel.WORDS) | set(parallel.RANGES)
