"""The golden self-test: what a checkpoint computed when it was made, it must compute before it serves.

Goldens come from the training-side pass in float32; the engine must give the same greedy tokens through prefill,
cache and step, in the dtype it serves in. Each golden ends before the first token whose lead over the next one is so
small that another dtype or device might rightly decide otherwise.

Where tokens are decided together, goldens are decided so that each has a lead of its own and no threshold plays a part:
masks of a block one by one from the left, a canvas by its first pass. Requests of the self-test ask for the same.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.checkpoint import Progress
from jaxserve.checkpoint.restore import restore
from jaxserve.checkpoint.side_files import CONFIG, GOLDENS
from jaxserve.config import EngineConfig, Pool
from jaxserve.decode.score import logits
from jaxserve.decode.strategies import facts, strategy_of
from jaxserve.engine.canary import Canary
from jaxserve.engine.engine import Engine
from jaxserve.engine.jax_device import JaxDevice
from jaxserve.engine.programs import Programs
from jaxserve.engine.request import Request, SamplingParams
from jaxserve.engine.scheduler import Policy
from jaxserve.errors import CheckpointError, DeviceFault, SelfTestFailed
from jaxserve.models.decoding import SEQUENTIAL, Decoding
from jaxserve.models.family import Family, family_of
from jaxserve.models.weights import abstract, params_of
from jaxserve.plan import draft_plan
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
SEED = 0
PATIENT = Policy(2, len(PROMPTS), math.inf, math.inf, 0.0)
LEADS = (0.5, 0.25, 0.1)  # in nats; the first that leaves enough tokens, else the last one
ENOUGH = 12


def goldens(folder: Path) -> dict[str, Any]:
    """Computes a new version's goldens: JSON values for ``goldens.json``."""
    family = family_of(read_json(folder / CONFIG))
    params = params_of(restore(folder, abstract(family.rules, jnp.float32)))
    graphdef = family.graphdef(jnp.float32)
    tokenizer = Tokenizer.load(folder / "tokenizer")
    room = min(PROMPT_TOKENS + NEW_TOKENS, family.config.max_positions)
    prompts = [tokenizer.encode(text)[: room - NEW_TOKENS] or [0] for text in PROMPTS]
    if family.decoding is not None and family.decoding.kind == "canvas":
        runs = _first_passes(_own_engine(family, graphdef, params, room), prompts)
    else:
        block = 1 if family.decoding is None else family.decoding.block
        room = max(1, room // block) * block
        forward = jax.jit(lambda params, tokens: logits(nnx.merge(graphdef, params), tokens, block))
        runs = [(prompt, *_greedy(partial(forward, params), prompt, room, family.decoding)) for prompt in prompts]
    cuts = {lead: [(prompt, tokens[: _first_below(leads, lead)]) for prompt, tokens, leads in runs] for lead in LEADS}
    enough = (lead for lead, cut in cuts.items() if sum(len(tokens) for _, tokens in cut) >= ENOUGH)
    least = next(enough, LEADS[-1])
    return {
        "pass": "whole sequence, float32",
        "settings": one_by_one(family.decoding),
        "least_lead": least,
        "prompts": [{"prompt": prompt, "tokens": tokens} for prompt, tokens in cuts[least] if tokens],
    }


def one_by_one(decoding: Decoding | None) -> dict[str, float]:
    """Settings by which no token of a text hangs on another one's threshold; see ``unmasking`` and ``canvas``."""
    if decoding is None:
        return {}
    if decoding.kind == "canvas":
        return {"denoising_steps": 1}
    return {"rule": SEQUENTIAL, "denoising_steps": decoding.block, "max_post_steps": 0, "penalty": 0}


def self_test(engine: Engine, folder: Path, progress: Progress) -> None:
    """Lets the engine write the stored tokens, and leaves it the first of them to ask again when in doubt.

    Raises:
        SelfTestFailed: it wrote others.
        CheckpointError: nothing is stored, or nothing that fits into a pool.
    """
    try:
        whole = json.loads((folder / GOLDENS).read_text(encoding="utf-8"))
        stored, settings = whole["prompts"], tuple(whole.get("settings", {}).items())
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
            SamplingParams(max_tokens=len(one["tokens"]), temperature=0.0, ignore_eos=True, seed=SEED),
            settings=settings,
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


def _greedy(
    logits: Callable[[jax.Array], jax.Array], prompt: list[int], room: int, decoding: Decoding | None = None
) -> tuple[list[int], list[float]]:
    """Greedy tokens and the lead of each, one padded program for all; padding behind a token changes nothing.

    Where masks are filled a token's scores are those of its own place, with masks up to the end of its block.
    """
    ids, leads = list(prompt), []
    never = () if decoding is None else (decoding.mask_id, decoding.delete_id, decoding.insert_id)
    for _ in range(min(NEW_TOKENS, room - len(prompt))):
        padded = np.full((1, room), 0 if decoding is None else decoding.mask_id, np.int32)
        padded[0, : len(ids)] = ids
        row = np.array(logits(jnp.asarray(padded)))[0, len(ids) - (decoding is None)]
        row[[token for token in never if token is not None]] = -np.inf
        second, first = np.partition(row, -2)[-2:]
        leads.append(float(first - second))
        ids.append(int(row.argmax()))
    return ids[len(prompt) :], leads


def _first_passes(engine: Engine, prompts: list[list[int]]) -> list[tuple[list[int], list[int], list[float]]]:
    """Prompts with the tokens and leads of a canvas's first pass."""
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, seed=SEED, logprobs=2)
    requests = [
        Request(f"golden-{index}", tuple(prompt), sampling, settings=(("denoising_steps", 1),))
        for index, prompt in enumerate(prompts)
    ]
    return [
        (list(one.request.prompt), list(one.tokens), [scores.top[0][1] - scores.top[1][1] for scores in one.logprobs])
        for one in engine.generate(requests)
    ]


def _own_engine(family: Family, graphdef: nnx.GraphDef[Any], params: dict[Any, Any], length: int) -> Engine:
    """An engine in float32 that serves nobody else."""
    config = EngineConfig(pools=(Pool(2, length),), max_logprobs=2)
    drafted = draft_plan(family.shape, config, dtype="float32", dtype_bytes=4, memory_limit=0)
    strategy = strategy_of(family, jnp.float32, drafted.max_logprobs)
    planned = dataclasses.replace(drafted, **facts(strategy, family))
    device = JaxDevice(Programs(planned, family, graphdef, params, strategy))
    engine = Engine(device, PATIENT)
    engine.warm_up()
    device.compile_watch.close()
    return engine


def _first_below(leads: list[float], least: float) -> int:
    return next((index for index, lead in enumerate(leads) if lead < least), len(leads))
