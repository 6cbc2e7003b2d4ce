from __future__ import annotations

import pytest

from jaxserve.errors import CheckpointError
from jaxserve.models.family import family_of
from tests.models.tiny_recurrent import HF

OUTER = {"model_type": "qwen3_5", "text_config": HF, "vision_config": {"depth": 2}}


def test_the_text_model_is_that_of_the_text_configuration():
    assert family_of(OUTER).config == family_of(HF).config


def test_the_head_may_be_tied_on_the_outside_only():
    text = {name: value for name, value in HF.items() if name != "tie_word_embeddings"}
    assert not family_of(OUTER | {"text_config": text}).config.tied
    assert family_of(OUTER | {"text_config": text, "tie_word_embeddings": True}).config.tied


def test_a_configuration_without_text_is_refused():
    with pytest.raises(CheckpointError, match="text_config"):
        family_of({"model_type": "qwen3_5"})
    with pytest.raises(CheckpointError, match="hidden_size"):
        family_of(OUTER | {"text_config": HF | {"hidden_size": 1 << 40}})
