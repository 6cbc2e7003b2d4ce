"""The service as its users meet it: a process, a socket, clients; first with a tiny model, then with the real one."""

from __future__ import annotations

import json
import random
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.rigs.served import NAME, Served, started

TINY_FLAGS = ("--engine.pools", "4x128")


@pytest.fixture(scope="module")
def tiny_server():
    with started(*TINY_FLAGS) as server:
        server.readiness = server.wait_until_ready()
        yield server


def post(server: Served, path: str, body: dict[str, Any]) -> httpx2.Response:
    return httpx2.post(server.url + path, json=body, timeout=120)


def test_it_says_how_far_it_is_until_it_is_ready(tiny_server: Served):
    said = tiny_server.readiness
    assert {line["code"] for line in said[:-1]} == {503}
    phases = list(dict.fromkeys(line["progress"]["phase"] for line in said))
    assert phases[-1] == "ready"
    assert "compiling" in phases
    assert any(line["progress"]["total"] >= 3 and line["status"] == "compiling" for line in said)
    assert httpx2.get(tiny_server.url + "/livez").status_code == 200


def test_generate_answers_and_streams_the_same(tiny_server: Served):
    body = {"prompt": "The capital of France", "max_tokens": 24, "temperature": 0.9, "seed": 5, "ignore_eos": True}
    whole = post(tiny_server, "/generate", body).json()
    assert whole["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 24
    with httpx2.stream("POST", tiny_server.url + "/generate", json=body | {"stream": True}) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    assert "".join(json.loads(line)["text"] for line in lines) == whole["text"]


def test_a_client_that_leaves_frees_its_slot(tiny_server: Served):
    body = {"prompt": "a", "max_tokens": 120, "ignore_eos": True, "stream": True}
    for _ in range(8):
        with httpx2.stream("POST", tiny_server.url + "/generate", json=body) as answer:
            next(answer.iter_lines())
    whole = post(tiny_server, "/generate", {"prompt": "b", "max_tokens": 3, "ignore_eos": True})
    assert whole.status_code == 200
    assert tiny_server.metric("jaxserve_requests_running") == 0


BAD = [
    ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    ("/v1/completions", {"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": "word " * 500}, 400, "prompt"),
    ("/v1/completions", {"prompt": "a", "model": "nobody"}, 404, "model"),
    ("/v1/completions", {"prompt": [1, 2, 400]}, 400, "prompt"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"400": 1}}, 400, "logit_bias"),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), BAD)
def test_bad_input_is_told_by_its_name(tiny_server: Served, path, body, status, param):
    answer = post(tiny_server, path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


@pytest.mark.parametrize(
    "body",
    [b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "\\ud800"}', b"[" * 100_000, b"{", b'{"prompt": "\xff"}'],
)
def test_bytes_that_are_no_request(tiny_server: Served, body):
    answer = httpx2.post(tiny_server.url + "/generate", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_signal_ends_it_in_order():
    with started(*TINY_FLAGS) as server:
        server.wait_until_ready()
        assert server.stop() == 0
        assert not any("Traceback" in line for line in server.lines)


def test_a_signal_while_it_loads_ends_it_too():
    with started(*TINY_FLAGS) as server:
        assert httpx2.get(server.url + "/livez").status_code == 200
        assert server.stop() == 0


def damaged(store: Path, to: Path) -> Path:
    shutil.copytree(store, to)
    weights = max((to / NAME).rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 16
    weights.write_bytes(bytes(content))
    return weights


def test_one_wrong_bit_is_refused_in_one_sentence(tiny_store, tmp_path):
    weights = damaged(tiny_store, tmp_path / "store")
    with started("--checkpoints.root", str(tmp_path / "store"), *TINY_FLAGS) as server:
        assert server.wait(60) == 78
        last = server.lines[-1]
        assert weights.name in last
        assert last.count("\n") == 1
        assert sum(len(word.strip(".,")) == 64 for word in last.split()) == 2  # the digest expected and the one found
        assert not any("Traceback" in line for line in server.lines)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--model.version", "20200101-000000000000"), "20200101-000000000000"),
        (("--engine.pools", "4x4096"), "256 positions"),
        (("--engine.memory-limit-bytes", "100000", "--engine.pools", "4x128"), "headroom"),
    ],
)
def test_what_cannot_be_served_is_said_and_ends(flags, named):
    with started(*flags) as server:
        assert server.wait(60) == 78
        assert named in server.lines[-1]
        assert not any("Traceback" in line for line in server.lines)


def test_a_taken_port_is_said():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with started(*TINY_FLAGS, "--server.port", str(taken.getsockname()[1])) as server:
            assert server.wait(60) == 78
            assert "address" in server.lines[-1].lower()


# --- the default model ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real_server(smollm2):
    with started("--engine.pools", "4x1024", model=smollm2) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture(scope="module")
def client(real_server: Served):
    with openai.OpenAI(base_url=real_server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


COLOURS = [{"role": "user", "content": "Name three primary colours."}]


@pytest.mark.model
@pytest.mark.slow
def test_the_real_model_names_three_colours(client: openai.OpenAI, smollm2):
    model = smollm2.parent.name
    whole = client.chat.completions.create(model=model, messages=COLOURS, temperature=0, max_tokens=80)
    text = whole.choices[0].message.content
    assert {"red", "blue", "yellow"} <= set(text.lower().replace(",", " ").replace(".", " ").replace(":", " ").split())
    stream = client.chat.completions.create(
        model=model,
        messages=COLOURS,
        temperature=0,
        max_tokens=80,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage == whole.usage
    assert chunks[-1].choices == []


@pytest.mark.model
@pytest.mark.slow
def test_a_python_client_gets_what_it_expects(client: openai.OpenAI, smollm2):
    model = smollm2.parent.name
    answer = client.completions.create(model=model, prompt="1, 2, 3, 4,", max_tokens=6, temperature=0, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == answer.choices[0].text == " 5, 6, 7, 8"[: len(answer.choices[0].text)]
    assert all(len(top) >= 2 for top in logprobs.top_logprobs)
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=model, messages=COLOURS, max_tokens=100_000)
    assert wrong.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=COLOURS)
    assert [entry.id for entry in client.models.list()] == [model]


def mixed(seed: int) -> dict[str, Any]:
    """A request around a chunk's edge with settings of every kind."""
    dice = random.Random(seed)
    length = dice.choice([1, 2, 31, 32, 33, 34, 127, 128, 129, 130, 160, 161, 162, 511, 512, 513, 514])
    return {
        "prompt": [dice.randrange(100, 49_000) for _ in range(length)],
        "max_tokens": dice.randint(1, 12),
        "temperature": dice.choice([0, 0.7, 1.2]),
        "top_p": dice.choice([1, 0.9]),
        "top_k": dice.choice([0, 40]),
        "min_p": dice.choice([0, 0.05]),
        "repetition_penalty": dice.choice([1, 1.1]),
        "presence_penalty": dice.choice([0, 0.4]),
        "frequency_penalty": dice.choice([0, 0.4]),
        "logit_bias": dice.choice([{}, {"500": 2.5, "600": -5}]),
        "logprobs": dice.choice([None, 0, 5]),
        "seed": seed,
        "ignore_eos": dice.random() < 0.5,
    }


@pytest.mark.model
@pytest.mark.slow
def test_nothing_compiles_while_it_serves_and_company_changes_nothing(real_server: Served):
    def ask(seed: int) -> Any:
        answer = post(real_server, "/v1/completions", mixed(seed))
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"]

    alone = [ask(seed) for seed in range(16)]
    seeds = [seed % 100 for seed in range(200)]
    random.Random(0).shuffle(seeds)
    with ThreadPoolExecutor(12) as pool:
        together = dict(zip(seeds, pool.map(ask, seeds), strict=True))
    assert [together[seed] for seed in range(16)] == alone
    assert real_server.metric("jaxserve_recompiles_total") == 0
    assert real_server.metric("jaxserve_requests_running") == real_server.metric("jaxserve_requests_waiting") == 0
