from __future__ import annotations

import pytest

from jaxserve.errors import CheckpointError
from jaxserve.models.family import family_of
from tests.models.tiny_recurrent import HF

MOE = HF | {
    "model_type": "qwen3_5_moe_text",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}


def test_every_layer_has_experts_and_one_for_all_tokens_behind_a_gate():
    for layer in family_of(MOE).config.layers:
        ffn = layer.ffn
        assert (ffn.experts, ffn.chosen, ffn.ffn, ffn.shared.ffn, ffn.shared_gate) == (4, 2, 24, 40, True)
        assert (ffn.router.kind, ffn.router.renormalise) == ("softmax", True)


@pytest.mark.parametrize("behind", ["model.", "model.language_model.", "language_model.model."])
@pytest.mark.parametrize(
    ("way", "named"), [(0, "experts.0.up_proj.weight"), (1, "experts.gate_up_proj"), (2, "experts.up_proj")]
)
def test_all_layouts_of_experts_load_behind_every_prefix(behind, way, named):
    family = family_of(MOE)
    plain = family.config.rules()
    names = {piece.source for rule in plain for piece in rule.ways[min(way, len(rule.ways) - 1)]}
    there = {name.replace("model.", behind, 1) for name in names}
    assert {piece.source for rule in family.rules for piece in rule.pieces(there)} == there
    assert any(name.endswith(named) for name in there)
    assert any(name.endswith("shared_expert_gate.weight") for name in there)


def test_a_missing_size_is_named():
    silent = {name: value for name, value in MOE.items() if name != "shared_expert_intermediate_size"}
    with pytest.raises(CheckpointError, match="shared_expert_intermediate_size"):
        family_of(silent)
