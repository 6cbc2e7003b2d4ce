from __future__ import annotations

from jaxserve.models.family import family_of
from tests.models.test_qwen3_5_moe_text import MOE


def test_the_text_model_is_that_of_the_text_configuration():
    outer = family_of({"model_type": "qwen3_5_moe", "text_config": MOE, "vision_config": {"depth": 2}})
    assert outer.config == family_of(MOE).config
    assert "model.visual.patch_embed.proj.weight".startswith(outer.ignored)
