"""A model that fills in blocks as its users meet it: a process, a socket, clients who look at what it took."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from jaxserve.engine.metrics import COUNTED
from tests.rigs.served import Served, served
from tests.rigs.tiny import BLOCKS, tiny_store

TOLD = {"passes": "passes", "blocks": "blocks", "post_steps": "post_steps"}
TOLD |= {f"{name}_tokens": name for name in COUNTED if name not in TOLD}


@pytest.fixture(scope="module")
def server():
    root = str(tiny_store(BLOCKS))
    with served("--model.id", BLOCKS, "--checkpoints.root", root, "--engine.pools", "8x128") as server:
        yield server
        assert server.metric("jaxserve_recompiles_total") == 0
        assert server.stop() == 0


def body(dice: random.Random) -> dict[str, Any]:
    """A request of any kind."""
    quality = dice.choice([None, "speed", "balanced", "quality"])
    wanted: dict[str, Any] = {"mode": "off"} if dice.random() < 0.2 else {"quality": quality}
    body = {"prompt": "word " * dice.randint(1, 5), "max_tokens": dice.randint(1, 60), "parallel": wanted}
    body |= {"temperature": dice.choice([0, 1]), "seed": dice.randrange(9), "n": dice.choice([1, 2])}
    if dice.random() < 0.5:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        wanted["stream"] = dice.choice(["committed", "provisional"])
    return body


def test_usage_adds_up_and_equals_the_metrics(server: Served):
    def counts() -> dict[str, float]:
        return {name: server.metric(metric, kind="block") for name, (metric, _) in COUNTED.items()}

    def ask(index: int) -> dict[str, Any]:
        wanted = body(random.Random(index))
        answer = httpx2.post(f"{server.url}/v1/completions", json=wanted, timeout=120)
        assert answer.status_code == 200, answer.text
        if not wanted.get("stream"):
            return answer.json()["usage"]
        *_, last = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        assert ("event: block.update" in answer.text) <= (wanted["parallel"]["stream"] == "provisional")
        return httpx2.Response(200, text=last).json()["usage"]

    before = counts()
    with ThreadPoolExecutor(8) as pool:
        usages = list(pool.map(ask, range(40)))
    for usage in usages:
        told = usage["parallel_details"]
        assert told["drafted_tokens"] == told["accepted_tokens"] + told["rejected_tokens"]
        assert usage["completion_tokens"] + told["wasted_tokens"] <= told["drafted_tokens"]
        assert told["tokens_per_pass"] == round(usage["completion_tokens"] / told["passes"], 3)
    grown = {name: value - before[name] for name, value in counts().items()}
    assert grown == {name: sum(usage["parallel_details"][told] for usage in usages) for told, name in TOLD.items()}
    assert grown["passes"] > 40


def test_somebody_else_is_told_what_makes_no_sense(server: Served):
    wrong = {"prompt": "a", "parallel": {"block_length": 32}}
    answer = httpx2.post(f"{server.url}/v1/completions", json=wrong, timeout=30)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "parallel.block_length")
