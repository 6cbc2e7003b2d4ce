"""A block model through HTTP: what it took is told, blocks are shown before they are final, all else is as ever.

The model is random, of one token a byte: what it writes is no text, so much of it is compared as tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator

import httpx2
import openai
import pytest

from jaxserve.config import Pool
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.engine.engine import Engine
from jaxserve.models.family import family_of
from jaxserve.server.service import ServedModel
from jaxserve.testing import TINY_BLOCKS, tiny_engine

CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
TURNS = [{"role": "user", "content": "Hi"}]
MASK, BLOCK = TINY_BLOCKS["mask_token_id"], TINY_BLOCKS["block_size"]


@pytest.fixture(scope="module")
def real() -> Engine:
    return tiny_engine((Pool(16, 64),), hf=TINY_BLOCKS, prefill_buckets=(32,), max_logprobs=5, max_logit_bias=8)


@pytest.fixture(scope="module")
def running(real) -> Iterator[AsyncEngine]:
    engine = AsyncEngine(real)
    yield engine
    assert real.recompiles == 0
    assert engine.close()


@pytest.fixture
def model(model, running) -> ServedModel:
    return dataclasses.replace(model, engine=running, decoding=family_of(TINY_BLOCKS).decoding)


def text(**fields) -> dict:
    """A request that writes characters: bytes beyond ASCII and control tokens are forbidden where it matters."""
    return {"prompt": "Hello", "max_tokens": 20, "seed": 3, "temperature": 1.0, "ignore_eos": True} | fields


def details(body: dict) -> dict:
    found = body["usage"]["parallel_details"]
    assert found["drafted_tokens"] == found["accepted_tokens"] + found["rejected_tokens"]
    assert found["tokens_per_pass"] == round(body["usage"]["completion_tokens"] / found["passes"], 3)
    return found


def test_it_tells_what_it_took(ask):
    plain = ask("POST", TEXT, text()).json()
    assert details(plain)["blocks"] == 4  # 5 tokens are given, so 3, 8, 8 and 1
    assert "trace" not in plain["usage"]["parallel_details"]
    assert "completion_tokens_details" not in plain["usage"]
    off = ask("POST", TEXT, text(parallel={"mode": "off"})).json()
    took = details(off)
    assert (took["accepted_tokens"], took["edited_tokens"], took["rejected_tokens"]) == (20, 0, 0)
    assert 20 <= took["passes"] <= 20 + took["blocks"]
    chat = ask("POST", CHAT, {"messages": TURNS, "max_tokens": 8, "ignore_eos": True}).json()
    assert details(chat)["blocks"] >= 1


def test_one_pass_takes_all_that_it_is_allowed_to(ask):
    eager = {"mask_threshold": 0, "edit_threshold": 1, "max_post_steps": 0}
    took = details(ask("POST", TEXT, text(prompt="12345678", max_tokens=16, parallel=eager)).json())
    assert (took["drafted_tokens"], took["blocks"]) == (16, 2)
    assert took["passes"] <= 4
    assert took["tokens_per_pass"] >= 4


def test_a_trace_is_the_account_pass_by_pass(ask):
    body = text(n=2, parallel={"trace": "steps"})
    found = ask("POST", TEXT, body).json()
    took = details(found)
    trace = took["trace"]
    assert len(trace) == took["passes"]
    assert {one["choice"] for one in trace} == {0, 1}
    assert sum(one["committed"] for one in trace) == found["usage"]["completion_tokens"]
    for name in ("drafted", "accepted", "edited"):
        assert sum(one.get(name, 0) for one in trace) == took[f"{name}_tokens"]
    shown = [one for one in trace if one.get("canvas")]
    assert shown
    assert all(one["masks"] == one["canvas"].count(None) for one in shown)
    brief = details(ask("POST", TEXT, text(n=2, parallel={"trace": "summary"})).json())["trace"]
    assert [one.get("masks") for one in brief] == [one.get("masks") for one in trace]
    assert not any("canvas" in one or "tokens" in one for one in brief)


def test_a_long_trace_is_cut_and_says_so(ask, monkeypatch):
    monkeypatch.setattr("jaxserve.server.generation.MOST_TRACED", 3)
    took = details(ask("POST", TEXT, text(parallel={"trace": "summary"})).json())
    assert len(took["trace"]) == 3
    assert took["untraced_passes"] == took["passes"] - 3


def test_a_trace_comes_with_the_last_chunk(ask, events):
    stream = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    found = events(ask("POST", TEXT, text(parallel={"trace": "summary"}, **stream)))
    told = [event["usage"]["parallel_details"] for event in found[:-1]]
    assert ["trace" in one for one in told] == [False] * (len(told) - 1) + [True]
    assert [one["passes"] for one in told] == sorted(one["passes"] for one in told)
    short = events(ask("POST", GENERATE, text(parallel={"trace": "summary"}, stream=True)))
    assert ["trace" in one["usage"]["parallel_details"] for one in short[:-1]] == [False] * (len(short) - 2) + [True]


def test_seeds_streams_and_whole_answers_agree(ask, events):
    for more in ({}, {"top_p": 0.9}, {"temperature": 0.0}, {"frequency_penalty": 1.5}, {"repetition_penalty": 1.3}):
        whole = ask("POST", TEXT, text(**more)).json()
        again = ask("POST", TEXT, text(**more)).json()
        assert again["choices"] == whole["choices"]
        assert again["usage"] == whole["usage"]
        found = events(ask("POST", TEXT, text(stream=True, **more)))[:-1]
        assert "".join(event["choices"][0]["text"] for event in found) == whole["choices"][0]["text"]
        assert all("usage" not in event for event in found)
    other = ask("POST", TEXT, text(seed=4)).json()
    assert other["choices"][0]["text"] != ask("POST", TEXT, text()).json()["choices"][0]["text"]


def test_penalties_matter(ask):
    def tokens(**more) -> list[str]:
        body = text(prompt="aaaaaaa", temperature=0.0, max_tokens=32, logprobs=0, **more)
        return ask("POST", TEXT, body).json()["choices"][0]["logprobs"]["tokens"]

    plain, fined = tokens(), tokens(frequency_penalty=2.0, presence_penalty=2.0)
    assert len(set(fined)) > len(set(plain))


def test_log_probabilities_are_there_for_every_token(ask):
    found = ask("POST", TEXT, text(logprobs=3)).json()["choices"][0]["logprobs"]
    assert len(found["tokens"]) == len(found["token_logprobs"]) == 20
    assert all(value <= 0 for value in found["token_logprobs"])
    assert all(3 <= len(top) <= 4 for top in found["top_logprobs"])
    assert f"<{MASK}>" not in found["tokens"]


def test_a_stop_string_ends_it_within_a_block(ask, tokenizer):
    # Only letters of the alphabet, so that a stop string can be told from what comes before it.
    bias = {str(tokenizer.encode(sign)[0]): 100 for sign in "abcdefgh"}
    body = text(prompt="12345678", max_tokens=32, logit_bias=bias)
    whole = ask("POST", TEXT, body).json()["choices"][0]["text"]
    assert len(whole) == 32
    stop = whole[10:13]
    at = whole.index(stop)
    found = ask("POST", TEXT, body | {"stop": stop}).json()
    assert found["choices"][0] == {"index": 0, "text": whole[:at], "logprobs": None, "finish_reason": "stop"}
    assert details(found)["blocks"] == at // BLOCK + 1


def test_a_draft_is_looked_at_and_accounted_for(ask):
    guess = {"type": "content", "content": "any text at all, and more of it"}
    found = ask("POST", TEXT, text(prediction=guess)).json()
    details(found)
    told = found["usage"]["completion_tokens_details"]
    assert min(told.values()) >= 0
    assert set(told) == {"accepted_prediction_tokens", "rejected_prediction_tokens"}


# --- text that may change ---------------------------------------------------------------------------------------------


def named(response: httpx2.Response) -> list[tuple[str, dict]]:
    """Events with their types, ``message`` where they have none."""
    found, name = [], "message"
    for line in response.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: {"):
            found.append((name, json.loads(line.removeprefix("data: "))))
        elif not line:
            name = "message"
    return found


@pytest.mark.parametrize("path", [TEXT, GENERATE])
def test_blocks_are_shown_before_they_are_final(ask, path):
    body = text(stream=True, max_tokens=24, prompt="12345678", temperature=0.0)
    slow = {"mask_threshold": 1, "denoising_steps": BLOCK}  # one mask a pass
    plain = named(ask("POST", path, body | {"parallel": slow}))
    found = named(ask("POST", path, body | {"parallel": slow | {"stream": "provisional"}}))
    updates = [data for name, data in found if name == "block.update"]
    assert {name for name, _ in plain} == {"message"}
    assert len(updates) >= 4

    def said(events: list[tuple[str, dict]]) -> str:
        return "".join((data.get("choices") or [data])[0].get("text") for name, data in events if name == "message")

    assert said(found) == said(plain)
    assert {update["block_index"] for update in updates} <= {0, 1, 2}
    for update in updates:
        assert update["choices"] == []
        assert update["text"].count("\u2591") == update["tokens"].count(None)
        assert all(update["tokens"][place] is not None for place in update["changed"])
        assert ("id" in update) == (path == TEXT)
    for before, after in itertools.pairwise(updates):
        if before["block_index"] == after["block_index"]:
            differ = [
                i for i, pair in enumerate(zip(before["tokens"], after["tokens"], strict=True)) if pair[0] != pair[1]
            ]
            assert after["changed"] == differ


def test_an_ordinary_client_reads_past_them(served):
    """OpenAI's own looks at no event's type: to it they are chunks without a choice."""
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    more = {"parallel": {"stream": "provisional", "mask_threshold": 1}, "ignore_eos": True}
    asked = {"model": "toy", "messages": TURNS, "max_tokens": 24, "temperature": 0, "seed": 1}
    with client.chat.completions.create(**asked, stream=True, extra_body=more) as stream:
        chunks = list(stream)
    assert any(chunk.object == "block.update" for chunk in chunks)
    said = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    whole = client.chat.completions.create(**asked, extra_body=more | {"parallel": {"mask_threshold": 1}})
    assert said == whole.choices[0].message.content
    assert whole.usage.parallel_details["blocks"] >= 3


def test_who_does_not_ask_is_told_nothing_of_it(ask):
    assert {name for name, _ in named(ask("POST", TEXT, text(stream=True)))} == {"message"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"parallel": {"block_length": 16}}, "parallel.block_length"),
        ({"parallel": {"mode": "draft"}}, "parallel.mode"),
        ({"parallel": {"mask_threshold": "0.5"}}, "parallel.mask_threshold"),
        ({"parallel": []}, "parallel"),
        ({"parallel": {"stream": "provisional"}}, "parallel.stream"),
        ({"prediction": {"type": "x", "content": ""}}, "prediction"),
    ],
)
def test_what_is_refused(ask, fields, param):
    for path in (TEXT, GENERATE):
        found = ask("POST", path, text(**fields))
        assert (found.status_code, found.json()["error"]["param"]) == (400, param)
