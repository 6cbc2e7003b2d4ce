from __future__ import annotations

from jaxserve.models import qwen3
from jaxserve.models.decoding import Decoding
from jaxserve.models.family import family_of
from jaxserve.testing import TINY

HF = TINY | {"model_type": "sdar"}


def test_its_body_is_another_familys():
    assert family_of(HF).config == qwen3.family(HF).config
    assert family_of(HF).rules == qwen3.family(HF).rules


def test_how_it_decodes():
    expected = Decoding("block", 4, 151_669, threshold=0.85, denoising_steps=4)
    assert family_of(HF | {"vocab_size": 151_936}).decoding == expected
    assert family_of(HF | {"mask_token_id": 258}).decoding.mask_id == 258
