"""Gemma 3 with eyes (``Gemma3ForConditionalGeneration``): its text model; images are not read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.family import Family, nested_family

_SIGHT = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def family(hf: Mapping[str, Any]) -> Family:
    """Reads ``config.json``, of which ``text_config`` matters."""
    return nested_family(hf, "gemma3_text", _SIGHT)
