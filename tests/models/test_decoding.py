from __future__ import annotations

import pytest

from jaxserve.errors import CheckpointError
from jaxserve.models.decoding import Decoding, blocks_from_hf

HF = {"vocab_size": 100}


def test_what_the_file_says_wins():
    assert blocks_from_hf(HF, block=8, mask_id=99) == Decoding("block", 8, 99, denoising_steps=8)
    stated = HF | {"block_size": 16, "mask_token_id": 5, "delete_token_id": 6, "split_token_id": 7}
    expected = Decoding("block", 16, 5, threshold=0.5, denoising_steps=16, delete_id=6, insert_id=7)
    assert blocks_from_hf(stated, block=8, mask_id=99, threshold=0.5) == expected


def test_how_a_model_is_best_asked():
    """A configuration's own thresholds come before those of its family."""
    advice = {"threshold": 0.8, "editing_threshold": 0, "max_post_steps": 4}
    known = {"threshold": 0.5, "edit_threshold": 0.9, "post_steps": 16}
    expected = Decoding("block", 8, 99, threshold=0.8, edit_threshold=0.0, post_steps=4, denoising_steps=8)
    assert blocks_from_hf(HF | advice, block=8, mask_id=99, **known) == expected
    assert blocks_from_hf(HF, block=8, mask_id=99, **known) != expected


def test_a_vocabulary_without_the_familys_mask():
    assert blocks_from_hf(HF, block=8, mask_id=100) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"block_size": 0},
        {"block_size": 4096},
        {"block_size": "8"},
        {"mask_token_id": 100},
        {"mask_token_id": -1},
        {"mask_token_id": True},
        {"delete_token_id": 6},
        {"split_token_id": 6},
        {"delete_token_id": 6, "split_token_id": 200},
        {"threshold": 1.5},
        {"threshold": "0.5"},
        {"editing_threshold": float("nan")},
        {"editing_threshold": True},
        {"max_post_steps": -1},
        {"max_post_steps": 2.0},
    ],
)
def test_what_cannot_be(fields):
    with pytest.raises(CheckpointError):
        blocks_from_hf(HF | fields, block=8, mask_id=99)


def test_how_prompts_are_read():
    assert Decoding("block", 8, 99).read == 8
    assert Decoding("canvas", 256).read == 1
