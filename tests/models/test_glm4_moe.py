from __future__ import annotations

from jaxserve.models.feed_forward import MLPConfig
from jaxserve.models.glm4_moe import family
from jaxserve.models.moe import ExpertsConfig
from jaxserve.testing import TINY

HF = {name: value for name, value in TINY.items() if name != "rms_norm_eps"} | {
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}


def test_the_first_layers_are_dense():
    kinds = [type(layer.ffn) for layer in family(HF | {"first_k_dense_replace": 2}).config.layers]
    assert kinds == [MLPConfig, MLPConfig, ExpertsConfig]


def test_half_of_a_head_is_rotated():
    default, stated = (family(hf).config.layers[0] for hf in (HF, HF | {"partial_rotary_factor": 1.0}))
    assert len(default.mixer.rope.frequencies) == 2
    assert len(stated.mixer.rope.frequencies) == 4
    assert default.norm.eps == 1e-5


def test_switches():
    plain, full = (family(hf).config.layers[2] for hf in (HF, HF | {"use_qk_norm": True, "attention_bias": True}))
    assert (plain.mixer.head_norm, plain.mixer.bias) == (None, False)
    assert full.mixer.head_norm is not None
    assert (full.mixer.bias, full.mixer.output_bias) == (True, False)
    assert plain.ffn.shared.ffn == 24
    assert family(HF | {"n_shared_experts": 2}).config.layers[2].ffn.shared.ffn == 48
    assert family(HF | {"n_shared_experts": 0}).config.layers[2].ffn.shared is None


def test_guesses_beyond_the_next_token_are_not_read():
    ignored = family(HF).ignored
    assert "model.layers.3.mlp.gate.weight".startswith(ignored)
    assert not "model.layers.2.mlp.gate.weight".startswith(ignored)


def test_names_of_the_hub():
    sources = {piece.source for rule in family(HF).rules for way in rule.ways for piece in way}
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in sources
    assert "model.layers.1.mlp.shared_experts.down_proj.weight" in sources
    assert "model.layers.0.mlp.down_proj.weight" in sources
