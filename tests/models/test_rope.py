"""Rotary frequencies and rotations against those that transformers computes from the same fields."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import CheckpointError
from jaxserve.models.rope import Rope, rope_from_hf, rotate

ORACLE = json.loads((Path(__file__).parents[1] / "reference" / "oracle.json").read_text())


def head_size(config: dict) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def kind(case: dict) -> str:
    fields = case["config"].get("rope_parameters") or case["config"].get("rope_scaling") or {}
    return fields.get("rope_type", fields.get("type", "default"))


# Families whose layers differ read their own fields; dynamic frequencies would change within a request.
SHARED = [case for case in ORACLE["frequencies"] if case["layer_type"] is None]
SUPPORTED = [case for case in SHARED if kind(case) != "dynamic"]


@pytest.mark.reference
@pytest.mark.parametrize("case", SUPPORTED)
def test_frequencies_are_those_of_transformers(case):
    config, length = case["config"], case["length"]
    theta = {"gpt_oss": 150_000.0, "mixtral": 1e6}.get(config["model_type"], 10_000.0)
    rope = rope_from_hf(config, head_size(config), theta)
    long = rope.threshold is not None and length is not None and length > rope.threshold
    found = rope.long_frequencies if long else rope.frequencies
    np.testing.assert_allclose(found, case["inv_freq"], rtol=2e-6)
    assert rope.scale == pytest.approx(case["attention_factor"], rel=1e-6)


def test_the_oracle_covers_every_kind():
    assert {kind(case) for case in SUPPORTED} >= {"default", "linear", "llama3", "yarn", "longrope"}


@pytest.mark.reference
@pytest.mark.parametrize("case", ORACLE["rotations"])
def test_rotations_are_those_of_transformers(case):
    config = {"rope_theta": case["rope_theta"], "partial_rotary_factor": case["partial_rotary_factor"]}
    rope = rope_from_hf(config, 16)
    before = jnp.asarray(case["before"])[None, :, None]
    table = rope.table(jnp.asarray(case["positions"])[None], 2048, jnp.dtype(jnp.float32))
    np.testing.assert_allclose(rotate(before, *table)[0, :, 0], case["after"], atol=2e-5)


def test_a_rotation_depends_on_the_distance_alone():
    rope = rope_from_hf({"rope_theta": 10_000.0}, 8)
    random = np.random.default_rng(0)
    q, k = (jnp.asarray(random.normal(size=(1, 1, 1, 8)), jnp.float32) for _ in range(2))

    def product(position: int, other: int) -> float:
        turned = [
            rotate(x, *rope.table(jnp.asarray([[at]]), 512, jnp.dtype(jnp.float32)))
            for x, at in ((q, position), (k, other))
        ]
        return float(jnp.vdot(*turned))

    assert product(7, 3) == pytest.approx(product(107, 103), abs=1e-4)
    assert product(7, 3) != pytest.approx(product(7, 4), abs=1e-3)


def test_longrope_goes_by_the_length_of_the_cache():
    rope = Rope((1.0,), threshold=64, long_frequencies=(0.5,))
    at = jnp.asarray([[3]])
    short, long = (rope.table(at, length, jnp.dtype(jnp.float32))[0] for length in (64, 128))
    assert float(short[0, 0, 0]) == pytest.approx(np.cos(3.0), abs=1e-6)
    assert float(long[0, 0, 0]) == pytest.approx(np.cos(1.5), abs=1e-6)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rope_scaling": {"rope_type": "spiral"}}, "spiral"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    ],
)
def test_what_is_not_understood_is_refused(fields, named):
    with pytest.raises(CheckpointError, match=named):
        rope_from_hf(fields, 8)
