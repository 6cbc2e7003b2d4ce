from __future__ import annotations

import pytest

from jaxserve.errors import CheckpointError
from jaxserve.models import qwen3_moe
from jaxserve.models.decoding import Decoding
from jaxserve.models.family import family_of
from jaxserve.testing import TINY

HF = TINY | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "model_type": "sdar_moe"}


def test_its_body_is_another_familys():
    own = family_of(HF)
    assert own.config == qwen3_moe.family(HF).config
    assert own.rules == qwen3_moe.family(HF).rules
    assert own.decoding is None  # no token of this vocabulary can be its mask


def test_how_it_decodes():
    expected = Decoding("block", 4, 151_669, threshold=0.85, denoising_steps=4)
    assert family_of(HF | {"vocab_size": 151_936}).decoding == expected
    stated = family_of(HF | {"block_size": 8, "mask_token_id": 256}).decoding
    assert (stated.block, stated.mask_id, stated.denoising_steps) == (8, 256, 8)
    with pytest.raises(CheckpointError):
        family_of(HF | {"block_size": -4, "mask_token_id": 256})


def test_a_released_model_whose_file_says_nothing_more():
    hf = HF | {"vocab_size": 151_936, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4}
    hf |= {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
    own = family_of(hf)
    assert own.config.layers[0].mixer.head_size == 128
    assert own.config.layers[0].ffn.router.renormalise
