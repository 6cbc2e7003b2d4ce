"""Mistral 7B and kin (``MistralForCausalLM``): Llama with an optional sliding window in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.decoder import read_config
from jaxserve.models.family import Family, decoder_family


def family(hf: Mapping[str, Any]) -> Family:
    """Reads ``config.json``; a window of ``null`` sees everything."""
    windows = (hf.get("sliding_window"),) * hf.get("num_hidden_layers", 0)
    return decoder_family(read_config(hf, windows=windows))
