from __future__ import annotations

import pytest

from jaxserve.errors import CheckpointError
from jaxserve.models.family import family_of
from jaxserve.models.moe import ExpertsConfig
from tests.models.test_deepseek_v3 import HF as DEEPSEEK

HF = DEEPSEEK | {"model_type": "glm4_moe_lite", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8}


def test_old_files_count_dense_layers_new_ones_list_them():
    listed = HF | {"mlp_layer_types": ["dense", "dense", "sparse"]}
    for hf, dense in ((HF, 1), (listed, 2), ({k: v for k, v in HF.items() if k != "first_k_dense_replace"}, 1)):
        layers = family_of(hf).config.layers
        assert [isinstance(layer.ffn, ExpertsConfig) for layer in layers] == [index >= dense for index in range(3)]
    assert family_of(HF).config.layers[2].ffn.router.scale == 1.8


def test_another_order_is_refused():
    with pytest.raises(CheckpointError, match="mlp_layer_types"):
        family_of(HF | {"mlp_layer_types": ["sparse", "dense", "sparse"]})
