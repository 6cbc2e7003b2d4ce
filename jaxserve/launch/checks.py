"""``jaxserve check``: the promises, tried on the model at hand. Each check says what held and the figure it saw."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from jaxserve.decode import jitted
from jaxserve.engine.completion import Completion
from jaxserve.engine.request import Request, SamplingParams
from jaxserve.launch.golden import PROMPTS
from jaxserve.launch.loading import LoadedModel
from jaxserve.sharding import under

Outcome = tuple[str, bool, str]
# Log-probabilities of the cached pass against those of the whole-sequence pass, in nats.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15}


def check(model: LoadedModel) -> Iterator[Outcome]:
    """What was checked, whether it held, and the figure. The goldens were reproduced when the model was loaded."""
    requests = _requests(model)
    alone = [model.engine.generate([request])[0] for request in requests]
    yield _alone_is_together(alone, model.engine.generate(requests[::-1])[::-1])
    recompiles = model.engine.recompiles
    yield "no program was compiled after warm-up", recompiles == 0, f"{recompiles} compilations"
    if model.family.decoding is None:  # what fills in text has no score of a token after those before it alone
        yield _cached_is_uncached(model, alone)  # last: the whole-sequence pass is no program of the plan


def _requests(model: LoadedModel) -> list[Request]:
    settings = (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=0.7, top_k=40, repetition_penalty=1.2),
        SamplingParams(temperature=1.3, min_p=0.05, presence_penalty=0.5, frequency_penalty=0.2),
    )
    requests, limits = [], model.engine.limits
    for index in range(16):
        prompt = model.tokenizer.encode(PROMPTS[index % len(PROMPTS)] * (1 + index // 4))
        most = min(4 + index % 13, limits.max_output_tokens)
        room = min(limits.max_length - most, limits.max_input_tokens)
        logprobs = min(2, limits.max_logprobs)
        sampling = dataclasses.replace(settings[index % 4], max_tokens=most, seed=index, logprobs=logprobs)
        requests.append(Request(f"check-{index}", tuple(prompt[:room]), sampling))
    return requests


def _cached_is_uncached(model: LoadedModel, answers: list[Completion]) -> Outcome:
    worst = 0.0
    longest = max(len(one.request.prompt) + len(one.tokens) for one in answers)
    for one in answers:
        ids = np.zeros((1, longest), np.int32)
        start = len(one.request.prompt)
        ids[0, : start + len(one.tokens)] = one.request.prompt + one.tokens
        with under(model.mesh):
            chosen = np.asarray(jitted.score(model.graphdef, model.params, jnp.asarray(ids)).chosen)[0]
        for offset, entry in enumerate(one.logprobs):
            worst = max(worst, abs(float(chosen[start - 1 + offset]) - entry.logprob))
    held = worst <= TOLERANCE[model.plan.dtype]
    return "cached decoding = whole-sequence pass", held, f"log-probabilities differ by at most {worst:.2g}"


def _alone_is_together(alone: list[Completion], together: list[Completion]) -> Outcome:
    same = sum(
        one.tokens == other.tokens and one.logprobs == other.logprobs
        for one, other in zip(alone, together, strict=True)
    )
    return "alone = in company, bit for bit", same == len(alone), f"{same} of {len(alone)} requests"
