"""A real model whose layers see windows: every figure against another engine's, through files, engine and rings."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from jaxserve.config import Pool
from jaxserve.decode import jitted
from jaxserve.engine.request import Request, SamplingParams
from jaxserve.launch.loading import LoadedModel, load_model
from jaxserve.models.family import decoder_family
from jaxserve.models.layers import Norm
from tests.launch.conftest import configured

pytestmark = [pytest.mark.gated, pytest.mark.reference, pytest.mark.slow]

REFERENCE = dict(np.load(Path(__file__).parents[1] / "reference" / "gemma3.npz"))
PROMPTS = ("capital", "fibonacci", "long", "unicode", "single", "window")
TOLERANCE = 2e-4  # float32 in another order of sums; a window one off moves a score by 2e-3


@pytest.fixture(scope="module")
def real(gemma3) -> LoadedModel:
    """In float32, with a pool for texts longer than the window."""
    config = configured(gemma3.parents[1], pools=(Pool(2, 896),), prefill_buckets=(128,))
    model = msgspec.structs.replace(config.model, id=gemma3.parent.name)
    return load_model(msgspec.structs.replace(config, model=model), lambda phase, done, total: None)


def scores(real: LoadedModel, name: str, family=None):
    """Log-probabilities of a prompt's own tokens, and the best five at each of its positions."""
    ids = REFERENCE[f"{name}.ids"]
    padded = np.zeros((1, 385 if len(ids) <= 384 else 769), np.int32)
    padded[0, : len(ids)] = ids
    graphdef = real.graphdef if family is None else family.graphdef(jnp.float32)
    found = jitted.score(graphdef, real.params, jnp.asarray(padded), 5)
    return np.asarray(found.chosen)[0, : len(ids) - 1], np.asarray(found.top)[0], np.asarray(found.top_ids)[0]


@pytest.mark.parametrize("name", PROMPTS)
def test_scores_are_those_of_transformers(real: LoadedModel, name: str, supports):
    chosen, top, ids = scores(real, name)
    count = len(REFERENCE[f"{name}.ids"])
    np.testing.assert_allclose(chosen, REFERENCE[f"{name}.logprobs"], atol=TOLERANCE)
    expected = REFERENCE[f"{name}.top_logits"] - REFERENCE[f"{name}.logsumexp"][:, None]
    np.testing.assert_allclose(top[:count], expected, atol=TOLERANCE)
    # Where the fourth and the fifth are as good as equal, either may come first.
    clear = np.diff(-expected, axis=-1).min(-1) > 2 * TOLERANCE
    assert (ids[:count] == REFERENCE[f"{name}.top_ids"])[clear].all()
    assert clear.sum() >= 0.9 * count
    supports("gemma3_text", "real weights")


@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_tokens_are_those_of_transformers(real: LoadedModel, name: str):
    prompt, expected = (tuple(REFERENCE[f"{name}.{key}"].tolist()) for key in ("ids", "greedy"))
    sampling = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
    (answer,) = real.engine.generate([Request(name, prompt, sampling)])
    tight = np.flatnonzero(REFERENCE[f"{name}.gaps"] < 1e-2)
    sure = int(tight[0]) if len(tight) else 32
    assert sure > 8
    assert answer.tokens[:sure] == expected[:sure]


@pytest.mark.parametrize("name", ["capital", "window"])
def test_the_engine_gives_a_stated_text_the_scores_of_transformers(real: LoadedModel, name: str):
    """Teacher forcing through chunks, rings and steps: each next token is forced, whatever the gap to the second."""
    prompt, expected = (tuple(REFERENCE[f"{name}.{key}"].tolist()) for key in ("ids", "greedy"))
    worst = 0.0
    for known in (0, 1, 15, 31):
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=2)
        (answer,) = real.engine.generate([Request(name, prompt + expected[:known], sampling)])
        best = dict(answer.logprobs[0].top)
        assert expected[known] in best
        first, second = sorted(best.values(), reverse=True)
        gap = first - second if max(best, key=best.get) == expected[known] else second - first
        worst = max(worst, abs(gap - float(REFERENCE[f"{name}.gaps"][known])))
    assert worst < TOLERANCE


def layers(config, change):
    return decoder_family(dataclasses.replace(config, layers=tuple(map(change, config.layers))))


def window(config, size: int):
    def change(layer):
        return dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, window=layer.mixer.window and size))

    return layers(config, change)


MISTAKES = {
    "window one short": lambda config: window(config, 511),
    "window one long": lambda config: window(config, 513),
    "embeddings not scaled": lambda config: decoder_family(dataclasses.replace(config, embedding_scale=None)),
    "norm without its offset": lambda config: layers(
        config, lambda layer: dataclasses.replace(layer, norm=Norm(1e-6, wide=True))
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_would_show(real: LoadedModel, mistake: str):
    chosen, _, _ = scores(real, "window", MISTAKES[mistake](real.family.config))
    assert np.abs(chosen - REFERENCE["window.logprobs"]).max() > 5 * TOLERANCE
