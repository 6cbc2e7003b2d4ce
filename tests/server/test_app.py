"""The whole service on a real socket: OpenAI's own client, and clients that go away."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import openai
import pytest

from jaxserve.engine.request import Delta
from jaxserve.errors import EngineError

CHAT = "/v1/chat/completions"
TURNS = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def sdk(served):
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


# --- OpenAI's client --------------------------------------------------------------------------------------------------


def test_sdk_chat(sdk, engine):
    engine.answer = "Grüße 😀".encode()
    found = sdk.chat.completions.create(model="toy", messages=TURNS, temperature=0, seed=3)
    assert found.choices[0].message.content == "Grüße 😀"
    assert found.choices[0].finish_reason == "stop"
    assert found.usage.completion_tokens == len(engine.answer) + 1
    assert found._request_id


def test_sdk_stream_with_usage(sdk, engine):
    engine.answer = "Grüße 😀".encode()
    options = {"include_usage": True}
    with sdk.chat.completions.create(model="toy", messages=TURNS, stream=True, stream_options=options) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Grüße 😀"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(engine.answer) + 1


def test_sdk_stream_helper(sdk, engine):
    engine.answer = b"fine"
    with sdk.chat.completions.stream(model="toy", messages=TURNS) as stream:
        assert stream.get_final_completion().choices[0].message.content == "fine"


def test_sdk_completions_with_logprobs(sdk, engine):
    engine.answer = b"abc"
    found = sdk.completions.create(model="toy", prompt="x", logprobs=2, max_tokens=8).choices[0]
    assert found.text == "abc"
    assert found.logprobs.tokens == ["a", "b", "c"]
    assert found.logprobs.token_logprobs == [-0.5] * 3
    assert found.logprobs.text_offset == [0, 1, 2]
    assert len(found.logprobs.top_logprobs) == 3


def test_sdk_chat_logprobs(sdk, engine):
    engine.answer = b"ab"
    found = sdk.chat.completions.create(model="toy", messages=TURNS, logprobs=True, top_logprobs=2).choices[0]
    assert [entry.token for entry in found.logprobs.content] == ["a", "b"]
    assert len(found.logprobs.content[0].top_logprobs) == 2


def test_sdk_models(sdk):
    assert [model.id for model in sdk.models.list()] == ["toy"]
    assert sdk.models.retrieve("toy").owned_by == "jaxserve"


def test_sdk_bad_request(sdk):
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.chat.completions.create(model="toy", messages=[])
    assert (caught.value.param, caught.value.code) == ("messages", "empty_array")
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id


def test_sdk_not_found(sdk):
    with pytest.raises(openai.NotFoundError) as caught:
        sdk.chat.completions.create(model="other", messages=TURNS)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("other")


def test_sdk_error_in_the_middle_of_a_stream(sdk, engine):
    engine.fail_after = (2, EngineError("The step failed."))
    with (
        sdk.chat.completions.create(model="toy", messages=TURNS, stream=True) as stream,
        pytest.raises(openai.APIError, match=r"The step failed\."),
    ):
        list(stream)


def test_sdk_retries_what_may_be_retried(served, service, model, wait_for):
    """Not ready at first: the client waits as it is told, then gets its answer."""
    service.model = None
    waited = []

    def become_ready() -> None:
        wait_for(lambda: waited)
        service.model = model

    def see(response: httpx2.Response) -> None:
        waited.append(response.status_code)

    thread = threading.Thread(target=become_ready)
    thread.start()
    http = httpx2.Client(event_hooks={"response": [see]})
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=2, http_client=http) as sdk:
        assert sdk.chat.completions.create(model="toy", messages=TURNS).choices
    thread.join()
    assert waited == [503, 200]


# --- streams and wholes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/generate"])
def test_a_stream_says_what_the_whole_says(path, client, engine, events):
    def text_of(choice: dict) -> str:
        return choice.get("text") or choice.get("message", choice.get("delta", {})).get("content") or ""

    rng = random.Random(path)
    for seed in range(15):
        body = {"max_tokens": rng.choice([5, 60, 200]), "seed": seed, "stop": rng.sample(["é", "b ", "END", "文a"], 2)}
        body |= {"messages": TURNS} if path == CHAT else {"prompt": "Hello"}
        engine.widest = rng.choice([1, 2, 9])
        whole = client.post(path, json=body).json()
        engine.widest = rng.choice([1, 2, 9])
        with client.stream("POST", path, json=body | {"stream": True}) as response:
            chunks = events(response)[:-1]
        if path == "/generate":
            assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
            assert chunks[-1]["finish_reason"] == whole["finish_reason"]
            assert chunks[-1]["usage"] == whole["usage"]
        else:
            (choice,) = whole["choices"]
            parts = [choice for chunk in chunks for choice in chunk["choices"]]
            assert "".join(map(text_of, parts)) == text_of(choice)
            assert parts[-1]["finish_reason"] == choice["finish_reason"]
    assert engine.active == set()


def test_events_come_while_the_engine_works(client, engine):
    engine.answer, engine.widest, engine.delay = b"x" * 20, 1, 0.02
    times = []
    with client.stream("POST", "/generate", json={"prompt": "x", "max_tokens": 40, "stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                times.append(time.monotonic())
    assert times[-1] - times[0] > 0.2
    assert len(times) >= 20


def test_the_head_waits_for_the_first_token(client, engine, wait_for):
    engine.hold = True
    with pytest.raises(httpx2.ReadTimeout):
        client.post("/generate", json={"prompt": "x", "stream": True}, timeout=0.3)
    wait_for(lambda: not engine.active)


def test_many_at_once(served, engine):
    engine.delay = 0.002
    with httpx2.Client(base_url=served.url, timeout=20) as client:

        def ask(seed: int) -> tuple[int, str]:
            return seed, client.post("/generate", json={"prompt": "x", "seed": seed % 5, "max_tokens": 90}).json()[
                "text"
            ]

        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(ask, range(60)))
    assert len({(seed % 5, text) for seed, text in found}) == 5
    assert engine.active == set()


# --- clients that go away ---------------------------------------------------------------------------------------------


def raw(address: tuple[str, int], body: dict) -> socket.socket:
    data = json.dumps(body).encode()
    connection = socket.create_connection(address, timeout=5)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + data)
    return connection


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hold", [False, True])
def test_hanging_up_frees_the_slot(hold, stream, n, served, engine, wait_for):
    """Before the first token and after some, in a stream and without one."""
    engine.hold, engine.delay, engine.answer, engine.widest = hold, 0.01, b"x" * 200, 1
    with raw(served.address, {"prompt": "x", "max_tokens": 250, "stream": stream, "n": n}) as connection:
        wait_for(lambda: len(engine.active) == n)
        if stream and not hold:
            assert connection.recv(65536)
    wait_for(lambda: not engine.active, seconds=1)
    assert len(engine.cancelled) == n


def test_a_storm_of_hanging_up_leaves_nothing(served, service, engine, wait_for):
    engine.delay, engine.widest = 0.002, 1
    rng = random.Random(0)

    def hang_up(seed: int) -> None:
        body = {"prompt": "x", "max_tokens": 100, "stream": seed % 2 == 0, "seed": seed, "ignore_eos": True}
        with raw(served.address, body):
            time.sleep(rng.random() * 0.05)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(hang_up, range(300)))
    wait_for(lambda: not engine.active)
    wait_for(lambda: not service.running.tasks)
    assert httpx2.post(served.url + "/generate", json={"prompt": "x"}).status_code == 200


def test_a_slow_reader_does_not_slow_others(served, engine):
    """A choice whose reader stops is held back, but nobody else."""
    engine.answer, engine.widest = b"x" * 250, 1
    with raw(served.address, {"prompt": "x", "max_tokens": 250, "stream": True}):
        begin = time.monotonic()
        assert httpx2.post(served.url + "/generate", json={"prompt": "x", "max_tokens": 200}).status_code == 200
        assert time.monotonic() - begin < 10


def test_deltas_without_tokens_send_nothing(client, engine, events, monkeypatch):
    deltas = engine._deltas

    def with_pauses(request):
        return [part for delta in deltas(request) for part in (Delta(), delta)]

    monkeypatch.setattr(engine, "_deltas", with_pauses)
    engine.answer, engine.widest = b"abc", 1
    found = events(client.post("/generate", json={"prompt": "x", "stream": True}))
    assert [event["text"] for event in found[:-1]][:3] == ["a", "b", "c"]
