"""The best of several through HTTP: whole choices (`best_of`) and fragments (`parallel.candidates`)."""

from __future__ import annotations

import itertools
import json

import pytest

from jaxserve.engine.request import TokenLogprob

CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
FOUR = {"candidates": 4, "fragment_tokens": 8}


@pytest.fixture(autouse=True)
def uneven(engine, monkeypatch):
    """Tokens differ in how likely they are."""
    monkeypatch.setattr(engine, "_logprob", lambda token, request: TokenLogprob(token, -(token * 7919 % 101) / 50))


def text(**fields) -> dict:
    return {"prompt": "Hello", "max_tokens": 40, "seed": 3} | fields


def refusal(found) -> tuple[int, str]:
    return found.status_code, found.json()["error"]["param"]


def test_the_best_of_several(ask):
    tried = ask("POST", TEXT, text(n=5, logprobs=0)).json()
    best = ask("POST", TEXT, text(n=2, best_of=5)).json()
    assert best["usage"] == tried["usage"]
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in best["choices"])
    texts = [choice["text"] for choice in tried["choices"]]
    found = [texts.index(choice["text"]) for choice in best["choices"]]
    assert found != [0, 1]
    assert ask("POST", TEXT, text(n=5, best_of=5)).json()["choices"] == ask("POST", TEXT, text(n=5)).json()["choices"]


def test_a_best_of_that_cannot_be(ask, engine):
    assert refusal(ask("POST", TEXT, text(n=3, best_of=2))) == (400, "best_of")
    assert refusal(ask("POST", TEXT, text(best_of=10**6))) == (400, "best_of")
    assert refusal(ask("POST", TEXT, text(best_of=2, stream=True))) == (400, "best_of")
    assert refusal(ask("POST", TEXT, text(prompt=["x"] * 16, best_of=8))) == (400, "best_of")
    assert not engine.submitted


def test_fragments_are_chosen_and_told_of(ask, engine):
    found = ask("POST", TEXT, text(parallel=FOUR, ignore_eos=True)).json()
    told = found["usage"]["parallel_details"]
    assert told["candidates"] == 4
    assert len(told["chosen_index"]) == len(told["candidate_scores"]) > 1
    for chosen, scores in zip(told["chosen_index"], told["candidate_scores"], strict=True):
        assert len(scores) == 4
        assert scores[chosen] == max(scores)
    written = found["usage"]["completion_tokens"]
    made = sum(len(engine._tokens(request)[0]) for request in engine.submitted)
    assert written + told["discarded_tokens"] == made > 3 * written
    assert ask("POST", TEXT, text(parallel=FOUR, ignore_eos=True)).json()["choices"] == found["choices"]
    assert "candidates" not in ask("POST", TEXT, text(parallel={"mode": "auto"})).json()["usage"]["parallel_details"]


@pytest.mark.parametrize("stop", [None, "a", ["b ", "é"]])
def test_a_stream_of_fragments_says_what_the_whole_says(ask, stop):
    for seed, n in itertools.product(range(4), (1, 2)):
        body = text(seed=seed, n=n, stop=stop, parallel=FOUR)
        whole = ask("POST", TEXT, body).json()
        lines = ask("POST", TEXT, body | {"stream": True}).text.split("\n\n")
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        texts, ends = [""] * n, [None] * n
        for chunk in chunks:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
                ends[choice["index"]] = choice["finish_reason"] or ends[choice["index"]]
        assert texts == [choice["text"] for choice in whole["choices"]]
        assert ends == [choice["finish_reason"] for choice in whole["choices"]]


def test_every_endpoint_has_candidates(ask):
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20, "seed": 1, "parallel": FOUR}
    for path, body in ((CHAT, chat), (GENERATE, text(parallel=FOUR))):
        found = ask("POST", path, body)
        assert found.status_code == 200
        assert found.json()["usage"]["parallel_details"]["candidates"] == 4


def test_what_makes_no_sense_with_candidates(ask, engine):
    assert refusal(ask("POST", TEXT, text(temperature=0, parallel=FOUR))) == (400, "temperature")
    assert refusal(ask("POST", TEXT, text(best_of=2, parallel=FOUR))) == (400, "best_of")
    guess = {"type": "content", "content": "Hi"}
    assert refusal(ask("POST", TEXT, text(prediction=guess, parallel=FOUR))) == (400, "prediction")
    assert refusal(ask("POST", TEXT, text(parallel={"candidates": 64}, n=2))) == (400, "parallel.candidates")
    assert not engine.submitted
