"""What the comparison with transformers would show: planted faults, each of which must fail it.

A fault is a switch of a configuration, a leaf, what is kept of a pass, or what happens to the cache between passes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.decode.step import DecodeState
from jaxserve.models import recurrent
from jaxserve.models.cache import KV, Cache, Ring
from jaxserve.models.decoder import BlockConfig, DecoderConfig
from jaxserve.models.family import Family, family_of
from jaxserve.models.feed_forward import MLPConfig
from jaxserve.models.latent import LatentConfig
from jaxserve.models.layers import Norm
from jaxserve.models.moe import SOFTMAX, SOFTMAX_CHOSEN, ExpertsConfig, RouterConfig
from jaxserve.models.recurrent import DeltaConfig, Recurrent
from jaxserve.models.self_attention import AttentionConfig
from jaxserve.models.weights import nest, params_of
from tests.models import every_pass
from tests.models import tiny_checkpoints as tiny
from tests.models.test_family_passes import TOLERANCE

pytestmark = pytest.mark.reference

SHOWS = 10 * TOLERANCE
Change = Callable[[Any], Any]


def everywhere(node: Any, kind: type, change: Change) -> Any:
    """A configuration with every part of one kind changed, however deep it lies."""
    if isinstance(node, tuple):
        return tuple(everywhere(part, kind, change) for part in node)
    if not dataclasses.is_dataclass(node):
        return node
    if isinstance(node, kind):
        return change(node)
    fields = {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
    changed = {name: everywhere(value, kind, change) for name, value in fields.items()}
    return dataclasses.replace(node, **{name: changed[name] for name in fields if changed[name] is not fields[name]})


def switch(kind: type, /, **fields: Any) -> Change:
    """Other values in every part of one kind; a function is told the part."""

    def change(part: Any) -> Any:
        return dataclasses.replace(part, **{n: v(part) if callable(v) else v for n, v in fields.items()})

    return lambda config: everywhere(config, kind, change)


def longer_window(by: int) -> Change:
    return switch(AttentionConfig, window=lambda part: part.window and part.window + by)


def rope_of_case(case: str) -> Change:
    """Every layer turns as another model's do."""
    rope = family_of(tiny.config(case)).config.layers[0].mixer.rope
    return switch(AttentionConfig, rope=rope)


def rope_of_layer(index: int) -> Change:
    """Every layer turns as one does."""
    return lambda config: switch(AttentionConfig, rope=config.layers[index].mixer.rope)(config)


SWITCHES: dict[tuple[str, str], Change] = {
    ("gemma3", "norm offset dropped"): switch(Norm, offset=0.0),
    ("gemma3", "norms behind the parts dropped"): switch(BlockConfig, after=False),
    ("gemma3", "window one long"): longer_window(1),
    ("gemma3", "window one short"): longer_window(-1),
    ("gemma3", "no local rotation"): rope_of_layer(5),
    ("gemma3", "no global rotation"): rope_of_layer(0),
    ("gemma3", "scaled by the head size"): switch(AttentionConfig, scale=lambda part: part.head_size**-0.5),
    ("gemma3", "embedding not scaled"): switch(DecoderConfig, embedding_scale=None),
    ("llama31", "rope kind"): rope_of_case("llama"),
    ("llama", "another epsilon"): switch(Norm, eps=1e-2),
    ("llama_bias", "biases of the feed-forward block dropped"): switch(MLPConfig, bias=False),
    ("qwen2", "biases dropped"): switch(AttentionConfig, bias=False),
    ("qwen2_window", "window in every layer"): switch(AttentionConfig, window=16),
    ("qwen3", "norms of heads dropped"): switch(AttentionConfig, head_norm=None),
    ("mistral", "window one short"): longer_window(-1),
    ("qwen3_moe", "not renormalised"): switch(RouterConfig, renormalise=False),
    ("qwen3_moe", "one expert fewer"): switch(ExpertsConfig, chosen=2),
    ("qwen3_moe_sparse", "softmax behind the choice"): switch(RouterConfig, kind=SOFTMAX_CHOSEN),
    ("mixtral", "softmax without its sum"): switch(RouterConfig, renormalise=False),
    ("glm4_moe", "scale of experts dropped"): switch(RouterConfig, scale=1.0),
    ("glm4_moe", "shared expert dropped"): switch(ExpertsConfig, shared=None),
    ("llada2_moe", "groups ignored"): switch(RouterConfig, groups=1, chosen_groups=1),
    ("deepseek_v3", "softmax for sigmoid"): switch(RouterConfig, kind=SOFTMAX),
    ("deepseek_v3", "pairs not put in order"): switch(LatentConfig, interleaved=False),
    ("deepseek_v3", "mscale dropped"): switch(LatentConfig, scale=lambda part: (part.plain + part.rotary) ** -0.5),
    ("gpt_oss", "sinks dropped"): switch(AttentionConfig, sinks=False),
    ("gpt_oss", "softmax before the choice"): switch(RouterConfig, kind=SOFTMAX, renormalise=False),
    ("gpt_oss", "not clamped"): switch(ExpertsConfig, activation="silu"),
    ("gpt_oss", "biases of experts dropped"): switch(ExpertsConfig, bias=False),
    ("gemma4", "values not normalised"): switch(AttentionConfig, value_norm=None),
    ("gemma4", "no softcap"): switch(DecoderConfig, softcap=None),
    ("gemma4_ple", "keys of an earlier layer"): switch(
        AttentionConfig, shares=lambda part: 0 if part.shares == 1 else part.shares
    ),
    ("qwen3_5", "norm offset dropped"): switch(Norm, offset=0.0),
    ("qwen3_5", "whole heads turn"): lambda config: switch(
        AttentionConfig, rope=dataclasses.replace(config.layers[2].mixer.rope, frequencies=(0.1,) * 16)
    )(config),
}

LEAVES: dict[tuple[str, str], tuple[str, Change]] = {
    ("gemma4_moe", "scale of each expert dropped"): ("expert_scale", np.ones_like),
    ("gemma4_moe", "scale of the router's input dropped"): ("router.scale", np.ones_like),
    ("gemma4", "layer scalar dropped"): (".scale", lambda leaf: np.ones_like(leaf) if leaf.shape == (1,) else leaf),
    ("gemma4_ple", "table of the layers dropped"): ("side.table", np.zeros_like),
    ("deepseek_v3", "correction dropped"): ("correction", np.zeros_like),
    ("glm4_moe", "correction dropped"): ("correction", np.zeros_like),
    ("qwen3_5", "value heads tiled"): ("time_bias", lambda leaf: leaf.T.reshape(leaf.shape)),
    ("qwen3_5", "convolution turned round"): ("conv", lambda leaf: leaf[..., ::-1]),
    ("qwen3_5_moe", "gate of the shared expert dropped"): ("shared_gate.kernel", np.zeros_like),
    ("qwen3_5_moe", "gate and up swapped"): ("ffn.gate_up", lambda leaf: leaf[:, ::-1]),
    ("gpt_oss_mxfp4", "nibbles swapped"): ("values", lambda leaf: leaf >> 4 | leaf << 4),
    ("deepseek_v3_fp8", "factors of blocks dropped"): ("scales", np.ones_like),
}


def installed(faults: Any) -> list[Any]:
    return [pytest.param(*fault, id="-".join(fault)) for fault in faults if fault[0] in tiny.CASES]


def changed(family: Family, change: Change) -> Family:
    return dataclasses.replace(family, config=change(family.config))


@pytest.mark.parametrize(("case", "fault"), installed(SWITCHES))
def test_a_wrong_switch_shows(case, fault):
    family = changed(tiny.load(case)[0], SWITCHES[case, fault])
    golden = tiny.goldens(case)
    logits = every_pass.whole(family, tiny.params(family, tiny.tensors(case)), golden["prompt"])
    assert np.abs(logits - golden["logits"]).max() > SHOWS


@pytest.mark.parametrize(("case", "fault"), installed(LEAVES))
def test_a_wrong_leaf_shows(case, fault):
    suffix, change = LEAVES[case, fault]
    family, golden = tiny.load(case)[0], tiny.goldens(case)
    leaves = tiny.leaves(family, tiny.tensors(case))
    wrong = {path: change(leaf) if path.endswith(suffix) else leaf for path, leaf in leaves.items()}
    assert any(wrong[path] is not leaves[path] for path in leaves)
    params = params_of(nest({path: jnp.asarray(leaf) for path, leaf in wrong.items()}))
    assert not np.abs(every_pass.whole(family, params, golden["prompt"]) - golden["logits"]).max() <= SHOWS


# --- what is kept -----------------------------------------------------------------------------------------------------


def kept(kind: type, change: Change) -> Callable[[DecodeState], DecodeState]:
    """Every layer's cache of one kind changed before each pass."""

    def spoil(state: DecodeState) -> DecodeState:
        layers = tuple(change(layer) if isinstance(layer, kind) else layer for layer in state.cache.layers)
        return dataclasses.replace(state, cache=Cache(layers, state.cache.length, state.cache.slots))

    return spoil


def narrow(layer: Recurrent) -> Recurrent:
    return Recurrent(layer.state.astype(jnp.bfloat16).astype(jnp.float32), layer.inputs)


def without_inputs(layer: Recurrent) -> Recurrent:
    return Recurrent(layer.state, jnp.zeros_like(layer.inputs))


def turned(layer: Ring) -> Ring:
    return Ring(*(jnp.roll(leaf, 1, axis=2) for leaf in (layer.k, layer.v)))


def first_forgotten(layer: KV) -> KV:
    return jax.tree.map(lambda leaf: leaf.at[:, :, 0].set(0), layer)


def all_of_it(bucket: int, _: int) -> int:
    return bucket


KEPT: dict[tuple[str, str], dict[str, Any]] = {
    ("qwen3_5", "padding in the memory"): {"padded": all_of_it},
    ("qwen3_5", "memory in bfloat16"): {"spoil": kept(Recurrent, narrow)},
    ("qwen3_5", "inputs of the convolution lost"): {"spoil": kept(Recurrent, without_inputs)},
    ("gemma3", "padding in the ring"): {"padded": all_of_it},
    ("gemma3", "ring one place on"): {"spoil": kept(Ring, turned)},
    ("llama", "first position lost"): {"spoil": kept(KV, first_forgotten)},
    ("deepseek_v3", "first position lost"): {"spoil": kept(KV, first_forgotten)},
}


def furthest(case: str, family: Family, **fault: Any) -> float:
    """How far the cached passes' logits are from the golden's."""
    golden = tiny.goldens(case)
    params = tiny.params(family, tiny.tensors(case))
    found, _ = every_pass.cached(family, params, golden["prompt"], 1, **fault)
    return max(float(np.abs(logits - golden["logits"][-len(logits) :]).max()) for logits in found)


@pytest.mark.parametrize(("case", "fault"), installed(KEPT))
def test_a_fault_between_passes_shows(case, fault):
    assert not furthest(case, tiny.load(case)[0], **KEPT[case, fault]) <= SHOWS


def test_a_memory_that_is_not_cleared_shows(monkeypatch):
    monkeypatch.setattr(recurrent, "since_start", lambda leaf, _: leaf)
    # Another longest text, so that no program compiled before is used again, nor this one later.
    family = changed(tiny.load("qwen3_5")[0], lambda config: dataclasses.replace(config, max_positions=511))
    assert not furthest("qwen3_5", family) <= SHOWS


def test_a_switch_reaches_every_part():
    family, _ = tiny.load("llama")
    assert everywhere(family.config, DeltaConfig, lambda _: 1 / 0) == family.config
    wrong = switch(Norm, eps=1.0)(family.config)
    assert {one.norm.eps for one in wrong.layers} == {wrong.norm.eps} == {1.0}
