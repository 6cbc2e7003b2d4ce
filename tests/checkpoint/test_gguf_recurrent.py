"""GGUF's order of value heads, dealt out as its converter does it and put together again."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.checkpoint.gguf import GGUFFile
from jaxserve.checkpoint.gguf_architectures import architecture_of
from jaxserve.checkpoint.gguf_recurrent import NAMES, WHOLE_NAMES, ValueHeads
from jaxserve.decode import jitted
from jaxserve.errors import CheckpointError
from jaxserve.models.family import family_of
from jaxserve.models.weights import nest, params_of
from tests.checkpoint.test_gguf_architectures import PATH, metadata

KEYS, GROUP, KEY_SIZE, VALUE_SIZE, WIDTH = 2, 3, 4, 5, 8
HEADS = ValueHeads(KEYS, KEYS * GROUP, KEY_SIZE, VALUE_SIZE)


def dealt(array: np.ndarray, size: int) -> np.ndarray:
    """Rows of each value head: the first of each key head, then the second of each."""
    rows = [array[head * size : (head + 1) * size] for own in range(GROUP) for head in range(own, KEYS * GROUP, GROUP)]
    return np.concatenate(rows)


def behind_keys(array: np.ndarray) -> np.ndarray:
    keys = 2 * KEYS * KEY_SIZE
    return np.concatenate([array[:keys], dealt(array[keys:], VALUE_SIZE)])


ALL_VALUES, CHANNELS = KEYS * GROUP * VALUE_SIZE, 2 * KEYS * KEY_SIZE + KEYS * GROUP * VALUE_SIZE
CONVERTED = {
    "attn_qkv.weight": ((CHANNELS, WIDTH), behind_keys),
    "ssm_conv1d.weight": ((CHANNELS, 4), behind_keys),
    "attn_gate.weight": ((ALL_VALUES, WIDTH), lambda array: dealt(array, VALUE_SIZE)),
    "ssm_alpha.weight": ((KEYS * GROUP, WIDTH), lambda array: dealt(array, 1)),
    "ssm_beta.weight": ((KEYS * GROUP, WIDTH), lambda array: dealt(array, 1)),
    "ssm_dt.bias": ((KEYS * GROUP,), lambda array: dealt(array, 1)),
    "ssm_a": ((KEYS * GROUP,), lambda array: -np.exp(dealt(array, 1))),
    "ssm_out.weight": ((WIDTH, ALL_VALUES), lambda array: dealt(array.T, VALUE_SIZE).T),
}


@pytest.mark.parametrize("tensor", CONVERTED)
def test_what_the_converter_does_is_undone(tensor):
    shape, convert = CONVERTED[tensor]
    array = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    stored = convert(array)
    assert not np.array_equal(stored, array)
    np.testing.assert_allclose(HEADS.undo(tensor)(stored), array, rtol=1e-6)


def test_other_tensors_are_left_as_they_are():
    for tensor in ("ssm_norm.weight", "attn_q.weight", "ffn_down.weight"):
        assert HEADS.undo(tensor) is None


def test_rows_that_heads_cannot_share_are_refused():
    with pytest.raises(CheckpointError, match="6 value heads"):
        HEADS.undo("attn_gate.weight")(np.zeros((ALL_VALUES - 1, WIDTH)))
    with pytest.raises(CheckpointError, match="4 key heads"):
        ValueHeads(4, 6, 4, 5).undo("ssm_a")(np.ones(6))


# --- a whole file -----------------------------------------------------------------------------------------------------

BLOCKS = [
    *(f"{name}.weight" for name in NAMES),
    *WHOLE_NAMES,
    *(f"{name}.weight" for name in ("attn_norm", "post_attention_norm", "ffn_gate", "ffn_up", "ffn_down")),
]
FULL = [
    f"{name}.weight"
    for name in (
        *("attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm"),
        *("attn_norm", "post_attention_norm", "ffn_gate", "ffn_up", "ffn_down"),
    )
]


EXPERTS = [
    f"{name}.weight"
    for name in (
        *("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
        *("ffn_gate_inp_shexp", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"),
    )
]


def read(architecture: str = "qwen35", **changes: object):
    given = {
        "block_count": 5,
        "attention__key_length": 16,
        "attention__value_length": 16,
        "rope__dimension_count": 4,
        "full_attention_interval": 4,
        "nextn_predict_layers": 1,
        "ssm__conv_kernel": 4,
        "ssm__state_size": KEY_SIZE,
        "ssm__group_count": KEYS,
        "ssm__time_step_rank": KEYS * GROUP,
        "ssm__inner_size": ALL_VALUES,
    }
    if architecture == "qwen35moe":
        given |= {"expert_count": 8, "expert_used_count": 2, "feed_forward_length": None}
        given |= {"expert_feed_forward_length": 24, "expert_shared_feed_forward_length": 40}
    shapes = {"token_embd.weight": (100, 64), "output_norm.weight": (64,)}
    for layer in range(4):
        names = FULL if layer == 3 else BLOCKS
        if architecture == "qwen35moe":
            names = [name for name in names if not name.startswith("ffn_")] + EXPERTS
        shapes |= {f"blk.{layer}.{name}": (1,) for name in names}
    shapes |= {"blk.4.nextn.eh_proj.weight": (1,), "blk.4.attn_q.weight": (1,)}
    return architecture_of(PATH, metadata(architecture, **(given | changes)), shapes, None)


@pytest.mark.parametrize("architecture", ["qwen35", "qwen35moe"])
def test_a_file_has_every_tensor_that_the_family_calls_for(architecture):
    found = read(architecture)
    family, names = family_of(found.config), set(found.names.values())
    assert [layer.mixer.widest for layer in family.config.layers][:3] == [KEYS * (8 + 2 * GROUP * VALUE_SIZE)] * 3
    assert len(family.config.layers[3].mixer.rope.frequencies) == 2
    assert {piece.source for rule in family.rules for piece in rule.pieces(names)} == names


def test_a_file_says_how_many_experts_there_are():
    experts = family_of(read("qwen35moe").config).config.layers[0].ffn
    assert (experts.experts, experts.chosen, experts.ffn, experts.shared.ffn) == (8, 2, 24, 40)


def test_norms_come_back_around_zero_but_for_the_one_behind_the_memory():
    found, stored = read(), np.array([1.5, 1.0], np.float32)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.post_attention_norm", "blk.3.attn_q_norm"):
        np.testing.assert_array_equal(found.restore(f"{name}.weight", stored), [0.5, 0.0])
    np.testing.assert_array_equal(found.restore("blk.0.ssm_norm.weight", stored), stored)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"nextn_predict_layers": 5}, "guess"),
        ({"nextn_predict_layers": 0}, "blk.4"),
        ({"ssm__group_count": 0}, "group"),
    ],
)
def test_a_file_that_does_not_fit_its_metadata_is_refused(change, named):
    with pytest.raises(CheckpointError, match=named):
        read(**change)


# --- against llama.cpp ------------------------------------------------------------------------------------------------

FOLDER = Path(__file__).parents[1] / "reference" / "tiny_gguf"


def distance(architecture: str) -> float:
    """Of the ten best log-probabilities behind each length from llama.cpp's; infinite where the best is another."""
    source, text = GGUFFile(FOLDER / f"{architecture}.gguf"), json.loads((FOLDER / f"{architecture}.json").read_text())
    family, tensors = family_of(source.hf_config()), dict(source.tensors())
    leaves = {rule.param: jnp.asarray(rule.make(tensors, np.float32)) for rule in family.rules}
    tokens = jnp.asarray(text["ids"], jnp.int32)[None]
    logits = jitted.logits(family.graphdef(jnp.float32), params_of(nest(leaves)), tokens)[0]
    scores = np.asarray(jax.nn.log_softmax(logits))
    worst = 0.0
    for length, best in text["next"].items():
        own = scores[int(length) - 1]
        worst = max(worst, *(abs(own[token] - score) for token, score in best))
        worst = worst if own.argmax() == best[0][0] else float("inf")
    return worst


@pytest.mark.reference
@pytest.mark.parametrize("architecture", ["qwen35", "qwen35moe"])
def test_log_probabilities_are_those_of_llama_cpp(architecture):
    assert distance(architecture) < 2e-3


@pytest.mark.reference
@pytest.mark.parametrize(
    "tensor", ["attn_qkv", "ssm_conv1d", "attn_gate", "ssm_alpha", "ssm_beta", "ssm_dt", "ssm_out"]
)
def test_heads_left_in_their_order_would_show(monkeypatch, tensor):
    undo = ValueHeads.undo
    monkeypatch.setattr(ValueHeads, "undo", lambda self, name: None if name.startswith(tensor) else undo(self, name))
    assert distance("qwen35") > 0.02
