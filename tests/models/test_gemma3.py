from __future__ import annotations

import pytest

from jaxserve.errors import CheckpointError
from jaxserve.models import gemma3_text
from jaxserve.models.family import family_of
from tests.models.test_gemma3_text import SILENT

HF = {"model_type": "gemma3", "text_config": SILENT, "vision_config": {"hidden_size": 1152}}


def test_it_is_its_text_model():
    assert family_of(HF).config == gemma3_text.family(SILENT).config


def test_tensors_are_found_where_files_have_them():
    rule = next(one for one in family_of(HF).rules if one.param == "layers.3.ffn.down.kernel")
    name = "layers.3.mlp.down_proj.weight"
    for prefix in ("model.", "model.language_model.", "language_model.model."):
        assert [piece.source for piece in rule.pieces({prefix + name})] == [prefix + name]
    ignored = family_of(HF).ignored
    for other in ("vision_tower.a", "model.vision_tower.a", "multi_modal_projector.b", "language_model.lm_head.weight"):
        assert other.startswith(ignored)
    assert not "language_model.model.norm.weight".startswith(ignored)


@pytest.mark.parametrize("text", [None, 3, {}, {"model_type": "llama"}, {"num_hidden_layers": -1}])
def test_what_is_no_text_model_is_refused(text):
    if text == {}:
        assert family_of(HF | {"text_config": text}).config.width == 2304
        return
    with pytest.raises(CheckpointError):
        family_of(HF | {"text_config": text})
