from __future__ import annotations

from jaxserve.models import gemma4_text
from jaxserve.models.family import family_of
from tests.models.test_gemma4_text import HF as TEXT

HF = {"model_type": "gemma4", "text_config": TEXT, "vision_config": {}, "audio_config": None}


def test_it_is_its_text_model():
    found = family_of(HF)
    assert found.config == gemma4_text.family(TEXT).config
    for other in ("model.vision_tower.a", "model.embed_vision.b", "model.audio_tower.c", "model.embed_audio.d"):
        assert other.startswith(found.ignored)


def test_the_outer_configuration_says_whether_the_head_is_tied():
    assert family_of(HF).config.tied
    assert not family_of(HF | {"tie_word_embeddings": False}).config.tied


def test_what_shares_keys_has_none_under_any_name():
    text = TEXT | {"num_kv_shared_layers": 6, "attention_k_eq_v": False}
    ignored = family_of(HF | {"text_config": text}).ignored
    assert "model.language_model.layers.6.self_attn.v_proj.weight".startswith(ignored)
    assert not "model.language_model.layers.5.self_attn.v_proj.weight".startswith(ignored)
