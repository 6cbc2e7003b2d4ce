from __future__ import annotations

from jaxserve.models.feed_forward import MLPConfig
from jaxserve.models.moe import ExpertsConfig
from jaxserve.models.qwen3_moe import family
from jaxserve.testing import TINY

HF = TINY | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_hidden_layers": 4}


def kinds(**fields):
    return [type(layer.ffn) for layer in family(HF | fields).config.layers]


def test_which_layers_have_experts():
    assert kinds() == [ExpertsConfig] * 4
    assert kinds(mlp_only_layers=[1]) == [ExpertsConfig, MLPConfig, ExpertsConfig, ExpertsConfig]
    assert kinds(decoder_sparse_step=2) == [MLPConfig, ExpertsConfig] * 2


def test_weights_are_not_renormalised_unless_the_file_says_so():
    for stated, expected in (({}, False), ({"norm_topk_prob": True}, True)):
        assert family(HF | stated).config.layers[0].ffn.router.renormalise is expected


def test_attention():
    default, stated = (family(hf).config.layers[0].mixer for hf in (HF, HF | {"head_dim": 24}))
    assert default.head_size == 8  # unlike Qwen3 dense, whose class has a default
    assert stated.head_size == 24
    assert default.head_norm is not None
    assert default.window is None
    assert family(HF | {"use_sliding_window": True}).config.layers[3].mixer.window == 4096


def test_names_of_the_hub():
    sources = {piece.source for rule in family(HF).rules for way in rule.ways for piece in way}
    assert "model.layers.3.mlp.experts.7.gate_proj.weight" in sources
    assert "model.layers.3.mlp.experts.gate_up_proj" in sources
    assert "model.layers.3.mlp.gate.weight" in sources
