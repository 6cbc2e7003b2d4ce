"""SDAR (``SDARForCausalLM``): Qwen3's body, trained to fill in blocks of text (arXiv 2510.06303)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxserve.models import qwen3
from jaxserve.models.decoding import blocks_from_hf
from jaxserve.models.family import Family
from jaxserve.models.sdar_moe import BLOCK, MASK_ID, THRESHOLD


def family(hf: Mapping[str, Any]) -> Family:
    """Reads ``config.json``; weights are named as Qwen3's."""
    decoding = blocks_from_hf(hf, block=BLOCK, mask_id=MASK_ID, threshold=THRESHOLD)
    return dataclasses.replace(qwen3.family(hf), decoding=decoding)
