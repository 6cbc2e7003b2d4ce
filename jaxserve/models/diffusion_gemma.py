"""DiffusionGemma (``DiffusionGemmaForBlockDiffusion``): Gemma 4's mixture of experts, trained to refine a canvas.

One set of weights reads in two ways. Text is read causally and kept, by the "encoder"; a canvas of tokens behind it is
refined pass by pass by the "decoder", whose positions all see each other and the text, and which keeps nothing. They
differ in the scales of their layers, and the latter is told what it made of the canvas before. Images are not read.
Source: transformers' ``configuration_diffusion_gemma`` and ``modeling_diffusion_gemma``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.models import gemma4_text
from jaxserve.models.decoding import LARGEST_BLOCK, Decoding
from jaxserve.models.family import Family
from jaxserve.models.gemma4_layer import ConditioningConfig
from jaxserve.models.weights import Piece

# What sets it apart from Gemma 4's other text models, which say so in their files.
_TEXT: dict[str, Any] = {
    "model_type": "gemma4_text",
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
}
_SOFTCAP = 30.0
_CANVAS, _PASSES = 256, 48
_ENCODER, _DECODER = "model.encoder.language_model.", "model.decoder."


def family(hf: Mapping[str, Any]) -> Family:
    """Reads ``config.json``, of which ``text_config`` and the size of a canvas matter.

    Raises:
        CheckpointError: a canvas that cannot be, or two sets of weights.
    """
    size = hf.get("canvas_length", _CANVAS)
    if type(size) is not int or not 1 <= size <= LARGEST_BLOCK:
        raise CheckpointError(
            f"config.json: canvas_length is no whole number from 1 to {LARGEST_BLOCK}", param="canvas_length"
        )
    if hf.get("tie_word_embeddings") is False:
        raise CheckpointError(
            "config.json: encoder and decoder with weights of their own are not supported", param="tie_word_embeddings"
        )
    text = {"final_logit_softcapping": _SOFTCAP} | hf["text_config"] | _TEXT | {"tie_word_embeddings": True}
    own = gemma4_text.family(text)
    layers = tuple(dataclasses.replace(layer, refines=True) for layer in own.config.layers)
    block = dataclasses.replace(layers[0].ffn, name="self_conditioning")
    config = dataclasses.replace(own.config, layers=layers, conditioning=ConditioningConfig(block, own.config.norm))
    # What the encoder has beside its scales is a copy, where a file carries it, or for images.
    return Family(
        config,
        ("lm_head.weight", _ENCODER, "model.encoder.vision_tower.", "model.encoder.embed_vision."),
        translate=_as_named,
        decoding=Decoding("canvas", size, denoising_steps=_PASSES),
    )


def _as_named(piece: Piece) -> Piece:
    """Weights are stored with the decoder, the scales of the encoder's layers apart."""
    source = piece.source.replace("model.", _ENCODER if piece.source.endswith("layer_scalar") else _DECODER, 1)
    return dataclasses.replace(piece, source=source.replace("canvas_scalar", "layer_scalar"))
