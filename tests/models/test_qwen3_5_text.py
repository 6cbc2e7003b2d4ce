from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.decode import jitted
from jaxserve.errors import CheckpointError
from jaxserve.models.family import family_of
from jaxserve.models.recurrent import DeltaConfig
from jaxserve.models.self_attention import AttentionConfig
from tests.models.tiny_checkpoints import config, goldens, params, tensors
from tests.models.tiny_recurrent import HF


def mixers(hf):
    return [layer.mixer for layer in family_of(hf).config.layers]


def test_a_layer_in_four_attends_unless_the_file_says_otherwise():
    hf = {name: value for name, value in HF.items() if name != "layer_types"} | {"num_hidden_layers": 8}
    assert [isinstance(one, AttentionConfig) for one in mixers(hf)] == [False, False, False, True] * 2
    stated = mixers(hf | {"full_attention_interval": 2})
    assert [isinstance(one, AttentionConfig) for one in stated] == [False, True] * 4
    assert [isinstance(one, DeltaConfig) for one in mixers(HF)] == [True, False, True]


def test_attention_is_gated_and_turns_a_quarter_of_the_head():
    attention = mixers(HF)[1]
    assert attention.gate
    assert len(attention.rope.frequencies) == 2
    assert (attention.head_norm.offset, attention.head_norm.wide) == (1.0, True)
    silent = {name: value for name, value in HF.items() if name not in ("rope_parameters", "head_dim")}
    assert len(mixers(silent | {"rope_theta": 1e7})[1].rope.frequencies) == 32


def test_only_the_norm_behind_the_memory_is_stored_plain():
    family = family_of(HF)
    assert family.config.norm.offset == family.config.layers[0].norm.offset == 1.0
    assert family.config.layers[0].mixer.norm.offset == 0.0


@pytest.mark.parametrize("behind", ["model.", "model.language_model.", "language_model.model."])
def test_all_prefixes_of_files_are_known(behind):
    family = family_of(HF)
    names = {piece.source for rule in family.rules for piece in rule.ways[0]}
    there = {name.replace("model.", behind, 1) for name in names}
    used = {piece.source for rule in family.rules for piece in rule.pieces(there)}
    assert used == there
    assert "mtp.layers.0.input_layernorm.weight".startswith(family.ignored)
    assert "model.visual.blocks.0.attn.qkv.weight".startswith(family.ignored)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layer_types": ["linear_attention", "sliding_attention", "full_attention"]}, "sliding_attention"),
        ({"linear_num_value_heads": 3}, "3 value heads"),
        ({"linear_num_key_heads": 0}, "linear_num_key_heads"),
        ({"full_attention_interval": "x", "layer_types": None}, "does not describe"),
    ],
)
def test_a_wrong_configuration_is_named(change, named):
    with pytest.raises(CheckpointError, match=named):
        family_of(HF | change)


def test_what_must_be_exact_is_float32_in_every_dtype():
    family = family_of(HF)
    exact = {rule.param.rpartition(".")[2] for rule in family.rules if rule.dtype == "float32"}
    assert exact == {"rate", "time_bias"}
    cache = family.empty_cache(2, 64, jnp.bfloat16)
    assert cache.layers[0].state.dtype == np.float32
    shapes = jax.tree.leaves(jax.eval_shape(lambda: cache.layers[0]))
    assert {leaf.shape[0] for leaf in shapes} == {2}


# --- against transformers ---------------------------------------------------------------------------------------------


def gate_first(tensor: np.ndarray) -> np.ndarray:
    """Each head's gate where its query should be."""
    heads = config("qwen3_5")["num_attention_heads"]
    return tensor.reshape(heads, 2, -1, tensor.shape[-1])[:, ::-1].reshape(tensor.shape)


def gates_behind(tensor: np.ndarray) -> np.ndarray:
    """All queries, then all gates."""
    heads = config("qwen3_5")["num_attention_heads"]
    return tensor.reshape(heads, 2, -1, tensor.shape[-1]).swapaxes(0, 1).reshape(tensor.shape)


@pytest.mark.reference
@pytest.mark.parametrize(
    ("suffix", "change", "shows"),
    [
        ("q_proj.weight", None, False),
        ("q_proj.weight", gate_first, True),
        ("q_proj.weight", gates_behind, True),
        ("layernorm.weight", lambda scale: scale - 1, True),
        ("linear_attn.norm.weight", lambda scale: scale + 1, True),
        ("conv1d.weight", lambda taps: taps[..., ::-1], True),
    ],
)
def test_logits_are_those_of_transformers_unless_something_is_misread(suffix, change, shows):
    family, weights = family_of(config("qwen3_5")), tensors("qwen3_5")
    if change is not None:
        changed = {name: change(tensor) for name, tensor in weights.items() if name.endswith(suffix)}
        assert changed
        weights |= changed
    golden = goldens("qwen3_5")
    tokens = jnp.asarray(golden["prompt"], jnp.int32)[None]
    logits = np.asarray(jitted.logits(family.graphdef(jnp.float32), params(family, weights), tokens))[0]
    distance = np.abs(logits - golden["logits"]).max()
    assert distance > 1e-3 if shows else distance < 1e-4
