"""What each URL answers, and above all what it answers to what it should not be asked."""

from __future__ import annotations

import dataclasses
import time

import pytest
from prometheus_client import Counter

from jaxserve.errors import EngineError, NumericalError, Overloaded, ShuttingDown
from jaxserve.server.service import Service

CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
TURNS = [{"role": "user", "content": "Hello"}]


def chat(**fields) -> dict:
    return {"model": "toy", "messages": TURNS, "seed": 1} | fields


def text(**fields) -> dict:
    return {"model": "toy", "prompt": "Hello", "seed": 1} | fields


# --- right requests ---------------------------------------------------------------------------------------------------


def test_generate(ask, engine):
    engine.answer = "Grüße".encode()
    found = ask("POST", GENERATE, {"prompt": "Hello", "max_tokens": 20})
    assert found.status_code == 200
    assert found.json() == {
        "text": "Grüße",
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13},
    }


def test_generate_as_a_stream(ask, engine, events):
    engine.answer, engine.widest = "Grüße!".encode(), 1
    found = events(ask("POST", GENERATE, {"prompt": "Hello", "max_tokens": 20, "stream": True}))
    assert found[-1] == "[DONE]"
    assert "".join(event["text"] for event in found[:-1]) == "Grüße!"
    assert [event["finish_reason"] for event in found[:-1]] == [None] * (len(found) - 2) + ["stop"]
    assert found[-2]["usage"] == {"prompt_tokens": 5, "completion_tokens": 9, "total_tokens": 14}


def test_generate_with_logprobs(ask, engine):
    engine.answer = b"ab"
    found = ask("POST", GENERATE, {"prompt": "Hello", "logprobs": 1}).json()
    assert [entry["token"] for entry in found["logprobs"]] == ["a", "b"]
    assert [len(entry["top_logprobs"]) for entry in found["logprobs"]] == [1, 1]


def test_generate_passes_every_parameter_on(ask, engine):
    asked = {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "seed": 11,
        "logprobs": 2,
        "ignore_eos": True,
    }
    ask("POST", GENERATE, {"prompt": "Hello", **asked, "logit_bias": {"5": 3}, "stop_token_ids": [4]})
    (request,) = engine.submitted
    assert {name: getattr(request.sampling, name) for name in asked} == asked
    assert request.sampling.logit_bias == ((5, 3.0),)
    assert request.sampling.stop_token_ids == (4,)


def test_completion(ask, engine):
    engine.answer = b"fine"
    found = ask("POST", TEXT, text()).json()
    assert found.pop("id").startswith("cmpl-")
    assert abs(found.pop("created") - time.time()) < 5
    assert found == {
        "object": "text_completion",
        "model": "toy",
        "system_fingerprint": None,
        "choices": [{"index": 0, "text": "fine", "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10},
    }


def test_completion_takes_sixteen_tokens_by_default(ask, engine):
    ask("POST", TEXT, text())
    ask("POST", TEXT, text(max_tokens=0))
    assert [request.sampling.max_tokens for request in engine.submitted] == [16, 0]


def test_nothing_to_generate(ask):
    found = ask("POST", TEXT, text(max_tokens=0)).json()
    assert (found["choices"][0]["text"], found["choices"][0]["finish_reason"]) == ("", "length")
    assert found["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    ("prompt", "lengths"),
    [("Hello", [5]), (["Hello", "you"], [5, 3]), ([7, 8, 9], [3]), ([[7], [8, 9]], [1, 2]), ("<|im_end|>x", [2])],
)
def test_kinds_of_prompts(prompt, lengths, ask, engine):
    found = ask("POST", TEXT, text(prompt=prompt, n=2)).json()
    assert [len(request.prompt) for request in engine.submitted[::2]] == lengths
    assert [choice["index"] for choice in found["choices"]] == list(range(2 * len(lengths)))
    assert found["usage"]["prompt_tokens"] == sum(lengths)


def test_logprobs_of_a_completion(ask, engine):
    engine.answer = "aé".encode()
    found = ask("POST", TEXT, text(logprobs=2)).json()["choices"][0]["logprobs"]
    assert found["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert found["token_logprobs"] == [-0.5, -0.5, -0.5]
    assert found["text_offset"] == [0, 1, 1]
    assert [len(top) for top in found["top_logprobs"]] == [2, 2, 2]
    assert found["top_logprobs"][0]["a"] == -0.5
    none = ask("POST", TEXT, text(logprobs=0)).json()["choices"][0]["logprobs"]
    assert none["top_logprobs"] is None
    assert none["tokens"] == found["tokens"]


def test_chat(ask, engine):
    engine.answer = b"fine"
    found = ask("POST", CHAT, chat()).json()
    assert found.pop("id").startswith("chatcmpl-")
    assert abs(found.pop("created") - time.time()) < 5
    message = {"role": "assistant", "content": "fine", "refusal": None}
    prompt = len("user\nHello\nassistant\n") + 3
    assert found == {
        "object": "chat.completion",
        "model": "toy",
        "system_fingerprint": None,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": 5, "total_tokens": prompt + 5},
    }


def test_chat_takes_what_fits_by_default(ask, engine):
    ask("POST", CHAT, chat())
    ask("POST", CHAT, chat(messages=[{"role": "user", "content": "x" * 330}]))
    first, second = engine.submitted
    assert first.sampling.max_tokens == engine.limits.max_output_tokens
    assert second.sampling.max_tokens == engine.limits.max_length - len(second.prompt) < 256


def test_chat_as_a_stream(ask, engine, events):
    engine.answer, engine.widest = "Grüße!".encode(), 1
    found = events(ask("POST", CHAT, chat(stream=True, n=2)))
    assert found.pop() == "[DONE]"
    assert all(event["object"] == "chat.completion.chunk" and "usage" not in event for event in found)
    assert len({event["id"] for event in found}) == 1
    for index in (0, 1):
        mine = [choice for event in found for choice in event["choices"] if choice["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in mine[1:])
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "Grüße!"
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["stop"]


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat()), (TEXT, text())])
def test_usage_in_a_stream(path, body, ask, events):
    plain = ask("POST", path, body).json()["usage"]
    asked = body | {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, done = events(ask("POST", path, asked))
    assert done == "[DONE]"
    assert (last["choices"], last["usage"]) == ([], plain)
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    always = body | {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    *chunks, done = events(ask("POST", path, always))
    assert chunks[-1]["usage"] == plain


def test_logprobs_of_chat(ask, engine, events):
    engine.answer, engine.widest = "aé".encode(), 1
    found = ask("POST", CHAT, chat(logprobs=True, top_logprobs=1)).json()["choices"][0]["logprobs"]
    assert found["refusal"] is None
    assert [entry["token"] for entry in found["content"]] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert [entry["bytes"] for entry in found["content"]] == [[97], [0xC3], [0xA9]]
    assert [entry["logprob"] for entry in found["content"]] == [-0.5] * 3
    assert found["content"][0]["top_logprobs"] == [{"token": "a", "logprob": -0.5, "bytes": [97]}]
    *chunks, _ = events(ask("POST", CHAT, chat(logprobs=True, top_logprobs=1, stream=True)))
    pieces = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    assert [entry for piece in pieces for entry in piece["content"]] == found["content"]
    assert ask("POST", CHAT, chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


@pytest.mark.parametrize("field", ["user", "metadata", "store", "service_tier", "anything"])
def test_what_changes_nothing_is_ignored(field, ask):
    assert ask("POST", CHAT, chat(**{field: "x"})).status_code == 200


def test_a_request_without_a_model_means_the_one_there_is(ask):
    body = chat()
    del body["model"]
    assert ask("POST", CHAT, body).json()["model"] == "toy"


# --- wrong requests ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "type_", "code"),
    [
        (Overloaded("The queue is full.", retry_after=2.5), 503, "service_unavailable_error", "server_is_overloaded"),
        (ShuttingDown("Bye."), 503, "service_unavailable_error", "server_shutdown"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_of_the_engine(stream, error, status, type_, code, ask, engine):
    engine.refuse = error
    found = ask("POST", CHAT, chat(stream=stream))
    assert found.status_code == status
    assert (found.json()["error"]["type"], found.json()["error"]["code"]) == (type_, code)
    assert float(found.headers["retry-after"]) >= error.retry_after
    assert float(found.headers["retry-after-ms"]) == error.retry_after * 1000


@pytest.mark.parametrize("stream", [False, True])
def test_at_the_very_end_nothing_begins(stream, ask, engine, service):
    service.running.end(ShuttingDown("The server is shutting down."))
    found = ask("POST", CHAT, chat(stream=stream))
    assert (found.status_code, found.json()["error"]["code"]) == (503, "server_shutdown")
    assert engine.active == set()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("error", [EngineError("The step failed."), NumericalError("Not a number.")])
def test_a_failure_of_the_engine(error, stream, ask, engine):
    engine.fail_after = (0, error)
    found = ask("POST", CHAT, chat(stream=stream))
    assert found.status_code == 500
    assert found.json()["error"] == {
        "message": error.message,
        "type": "server_error",
        "param": None,
        "code": error.code,
    }
    assert found.headers["x-should-retry"] == "false"
    assert engine.active == set()


def test_a_failure_in_the_middle_of_a_stream(ask, engine, events):
    engine.answer, engine.widest = b"abc", 1
    engine.fail_after = (1, EngineError("The step failed."))
    found = events(ask("POST", CHAT, chat(stream=True)))
    assert found[-1]["error"]["code"] == "engine_error"
    assert "[DONE]" not in found


def test_an_unforeseen_failure_says_nothing(ask, engine, caplog):
    def submit(_, *, patient=False):
        raise KeyError("the secret prompt")

    engine.submit = submit
    found = ask("POST", CHAT, chat())
    assert found.status_code == 500
    assert found.json()["error"]["code"] == "internal_error"
    assert "secret" not in found.text
    assert "secret" not in caplog.text
    assert "KeyError" in str([record.__dict__.get("fields") for record in caplog.records])


# --- the other URLs ---------------------------------------------------------------------------------------------------


def test_models(ask):
    card = {"id": "toy", "object": "model", "created": 1_700_000_000, "owned_by": "jaxserve", "max_model_len": 512}
    assert ask("GET", "/v1/models").json() == {"object": "list", "data": [card]}
    assert ask("GET", "/v1/models/toy").json() == card


@pytest.mark.parametrize("name", ["other", "../toy", "a/b", "toy%00", "%2e%2e", "x" * 300])
def test_no_such_model(name, ask):
    found = ask("GET", f"/v1/models/{name}")
    assert found.status_code == 404
    assert found.json()["error"]["code"] in ("model_not_found", "invalid_url")


def test_a_model_with_a_slash_in_its_name(ask, service, model):
    service.model = dataclasses.replace(model, id="org/toy")
    assert ask("GET", "/v1/models/org/toy").json()["id"] == "org/toy"


def test_tokenize_and_back(ask, tokenizer):
    found = ask("POST", "/tokenize", {"prompt": "Grüße"}).json()
    assert found == {
        "count": 7,
        "max_model_len": 512,
        "tokens": tokenizer.encode("Grüße"),
        "token_strs": None,
    }
    assert ask("POST", "/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": "Grüße"}
    assert ask("POST", "/tokenize", {"prompt": ""}).json()["count"] == 0


def test_tokenize_a_conversation(ask, engine):
    ask("POST", CHAT, chat())
    found = ask("POST", "/tokenize", {"messages": TURNS, "return_token_strs": True}).json()
    assert tuple(found["tokens"]) == engine.submitted[0].prompt
    assert found["token_strs"][:3] == ["<|im_start|>", "u", "s"]
    closed = ask("POST", "/tokenize", {"messages": TURNS, "add_generation_prompt": False}).json()
    assert closed["count"] == found["count"] - len("assistant\n") - 1


def test_more_can_be_counted_than_a_prompt_may_have(ask):
    assert ask("POST", "/tokenize", {"prompt": "x" * 5000}).json()["count"] == 5000
    turns = [{"role": "user", "content": "x" * 5000}]
    assert ask("POST", "/tokenize", {"messages": turns}).json()["count"] > 5000


def test_metrics(ask, service):
    Counter("jaxserve_things", "Things.", registry=service.registry).inc(3)
    found = ask("GET", "/metrics")
    assert "jaxserve_things_total 3.0" in found.text
    assert found.headers["content-type"].startswith("text/plain; version=")


# --- before and after -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", CHAT, chat()),
        ("POST", TEXT, text()),
        ("POST", GENERATE, {"prompt": "x"}),
        ("POST", "/tokenize", {"prompt": "x"}),
        ("POST", "/detokenize", {"tokens": [1]}),
        ("GET", "/v1/models", None),
        ("GET", "/v1/models/toy", None),
    ],
)
def test_too_early(method, path, body, ask, service):
    service.model = None
    service.readiness = Service(config=service.config).readiness
    service.readiness.advance("compiling", 5, 9)
    found = ask(method, path, body)
    assert found.status_code == 503
    assert found.json()["error"]["code"] == "not_ready"
    assert "compiling 5/9" in found.json()["error"]["message"]
    assert found.headers["retry-after"] == "1"
