"""SDAR-MoE (``SDARMoeForCausalLM``): Qwen3-MoE's body, trained to fill in blocks of text (arXiv 2510.06303)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxserve.models import qwen3_moe
from jaxserve.models.decoding import blocks_from_hf
from jaxserve.models.family import Family

BLOCK, MASK_ID, THRESHOLD = 4, 151_669, 0.85  # of the models' README and their own way to generate


def family(hf: Mapping[str, Any]) -> Family:
    """Reads ``config.json``; weights are named as Qwen3-MoE's."""
    decoding = blocks_from_hf(hf, block=BLOCK, mask_id=MASK_ID, threshold=THRESHOLD)
    return dataclasses.replace(qwen3_moe.family(hf), decoding=decoding)
