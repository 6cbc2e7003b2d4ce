from __future__ import annotations

from jaxserve.models.mixtral import family
from jaxserve.models.rope import rope_from_hf
from jaxserve.testing import TINY

HF = {name: value for name, value in TINY.items() if name not in ("rope_theta", "rms_norm_eps")}
HF |= {"num_local_experts": 4, "num_experts_per_tok": 2}


def test_defaults_are_its_own():
    config = family(HF).config
    assert config.layers[0].mixer.rope == rope_from_hf({"rope_theta": 1e6}, 8)
    assert config.norm.eps == 1e-5
    assert config.layers[0].ffn.router.renormalise
    assert config.layers[0].ffn.ffn == TINY["intermediate_size"]


def test_a_window_is_for_all_layers():
    assert [layer.mixer.window for layer in family(HF | {"sliding_window": 16}).config.layers] == [16, 16]


def test_names_of_the_hub():
    first = {rule.param: [piece.source for piece in rule.ways[0]] for rule in family(HF).rules}
    assert first["layers.1.ffn.gate_up"][:2] == [
        f"model.layers.1.block_sparse_moe.experts.0.{name}.weight" for name in ("w1", "w3")
    ]
    assert first["layers.1.ffn.down"][3] == "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    assert first["layers.1.ffn.router.kernel"] == ["model.layers.1.block_sparse_moe.gate.weight"]
