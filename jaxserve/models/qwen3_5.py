"""Qwen3.5 and 3.6 dense with eyes (``Qwen3_5ForConditionalGeneration``): its text model; images are not read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.family import Family, nested_family


def family(hf: Mapping[str, Any]) -> Family:
    """Reads ``config.json``, of which ``text_config`` matters."""
    return nested_family(hf, "qwen3_5_text", ())
