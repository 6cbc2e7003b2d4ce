"""Gemma 4 with eyes and ears (``Gemma4ForConditionalGeneration``): its text model; images and sounds are not read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.family import Family, nested_family

_SENSES = ("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio.")


def family(hf: Mapping[str, Any]) -> Family:
    """Reads ``config.json``, of which ``text_config`` matters."""
    return nested_family(hf, "gemma4_text", _SENSES)
