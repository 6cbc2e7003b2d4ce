"""Mistral 7B and kin (``MistralForCausalLM``): Llama with an optional sliding window in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.family import Family, decoder_family
from jaxserve.models.hf_fields import llama_like


def family(hf: Mapping[str, Any]) -> Family:
    """Reads ``config.json``; a window of ``null`` sees everything."""
    return decoder_family(llama_like(hf, windows=(hf.get("sliding_window"),) * hf.get("num_hidden_layers", 0)))
