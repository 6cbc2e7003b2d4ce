"""The golden self-test: what a checkpoint computed when it was made, it must compute before it serves.

Goldens come from the training-side pass in float32; the engine must give the same greedy tokens through prefill,
cache and step, in the dtype it serves in. Each golden ends before the first token whose lead over the next one is so
small that another dtype or device might rightly decide otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.checkpoint import Progress
from jaxserve.checkpoint.restore import restore
from jaxserve.checkpoint.side_files import CONFIG, GOLDENS
from jaxserve.decode import jitted
from jaxserve.engine.canary import Canary
from jaxserve.engine.engine import Engine
from jaxserve.engine.request import Request, SamplingParams
from jaxserve.errors import CheckpointError, DeviceFault, SelfTestFailed
from jaxserve.models.family import family_of
from jaxserve.models.weights import abstract, params_of
from jaxserve.text.folder import read_json
from jaxserve.text.tokenizer import Tokenizer

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "1, 2, 3, 4, 5, 6,",
    "Once upon a time, there was a",
)
PROMPT_TOKENS = 48  # a tokenizer that knows no words makes long prompts; the rest is left away
NEW_TOKENS = 16
LEADS = (0.5, 0.25, 0.1)  # in nats; the first that leaves enough tokens, else the last one
ENOUGH = 12


def goldens(folder: Path) -> dict[str, Any]:
    """Computes a new version's goldens: JSON values for ``goldens.json``."""
    family = family_of(read_json(folder / CONFIG))
    params = params_of(restore(folder, abstract(family.rules, jnp.float32)))
    graphdef = family.graphdef(jnp.float32)
    tokenizer = Tokenizer.load(folder / "tokenizer")
    room = min(PROMPT_TOKENS + NEW_TOKENS, family.config.max_positions)
    runs = []
    for text in PROMPTS:
        prompt = tokenizer.encode(text)[: room - NEW_TOKENS]
        runs.append((prompt, *_greedy(lambda ids: jitted.logits(graphdef, params, ids), prompt, room)))
    cuts = {lead: [(prompt, tokens[: _first_below(leads, lead)]) for prompt, tokens, leads in runs] for lead in LEADS}
    enough = (lead for lead, cut in cuts.items() if sum(len(tokens) for _, tokens in cut) >= ENOUGH)
    least = next(enough, LEADS[-1])
    return {
        "pass": "whole sequence, float32",
        "least_lead": least,
        "prompts": [{"prompt": prompt, "tokens": tokens} for prompt, tokens in cuts[least] if tokens],
    }


def self_test(engine: Engine, folder: Path, progress: Progress) -> None:
    """Lets the engine write the stored tokens, and leaves it the first of them to ask again when in doubt.

    Raises:
        SelfTestFailed: it wrote others.
        CheckpointError: nothing is stored, or nothing that fits into a pool.
    """
    try:
        stored = json.loads((folder / GOLDENS).read_text(encoding="utf-8"))["prompts"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder / GOLDENS} holds no goldens: {error}") from error
    limits = engine.limits
    cut = [one | {"tokens": one["tokens"][: limits.max_output_tokens]} for one in stored]
    fitting = [
        one
        for one in cut
        if len(one["prompt"]) <= limits.max_input_tokens
        and len(one["prompt"]) + len(one["tokens"]) <= limits.max_length
    ]
    if not fitting:
        raise CheckpointError(f"{folder / GOLDENS}: no golden fits into a pool of {limits.max_length} tokens")
    progress("selftest", 0, len(fitting))
    requests = [
        Request(
            f"golden-{index}",
            tuple(one["prompt"]),
            SamplingParams(max_tokens=len(one["tokens"]), temperature=0.0, ignore_eos=True),
        )
        for index, one in enumerate(fitting)
    ]
    try:
        answers = engine.generate(requests)
    except DeviceFault as fault:
        raise SelfTestFailed(f"no golden could be computed: {fault.message}") from fault
    for index, (one, answer) in enumerate(zip(fitting, answers, strict=True)):
        if answer.error is not None:
            raise SelfTestFailed(f"golden {index} could not be computed: {answer.error.message}")
        if list(answer.tokens) != one["tokens"]:
            raise SelfTestFailed(
                f"golden {index} of {folder / GOLDENS} is {one['tokens']}, but the model wrote {list(answer.tokens)}"
            )
    engine.canary = Canary(requests[0], tuple(fitting[0]["tokens"]))
    progress("selftest", len(fitting), len(fitting))


def _greedy(logits: Callable[[jax.Array], jax.Array], prompt: list[int], room: int) -> tuple[list[int], list[float]]:
    """Greedy tokens and the lead of each, one padded program for all; padding behind a token changes nothing."""
    ids, leads = list(prompt), []
    for _ in range(min(NEW_TOKENS, room - len(prompt))):
        padded = np.zeros((1, room), np.int32)
        padded[0, : len(ids)] = ids
        row = np.asarray(logits(jnp.asarray(padded)))[0, len(ids) - 1]
        second, first = np.partition(row, -2)[-2:]
        leads.append(float(first - second))
        ids.append(int(row.argmax()))
    return ids[len(prompt) :], leads


def _first_below(leads: list[float], least: float) -> int:
    return next((index for index, lead in enumerate(leads) if lead < least), len(leads))
