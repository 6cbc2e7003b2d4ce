"""A vocabulary of single characters, and a model's folder as Hugging Face has it.

Knows ids, ``tokenizer.json``, the chat template, ``config.json`` and how a family's leaves become named tensors again.
It does not know how the leaves were trained.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxserve.models.family import Family

CHARACTERS = "".join(map(chr, range(0x20, 0x7F))) + "\n"
CONTROLS = ("<|unknown|>", "<|endoftext|>", "<|mask|>", "<|user|>", "<|assistant|>", "<|pad|>")
UNKNOWN, END, MASK, USER, ASSISTANT, PAD = range(len(CHARACTERS), len(CHARACTERS) + len(CONTROLS))
VOCABULARY = len(CHARACTERS) + len(CONTROLS)
IDS = {character: token for token, character in enumerate(CHARACTERS)}

# One question is all that it has learnt: the last one counts. An answer that stands behind it is continued.
TEMPLATE = (
    "{%- set asked = messages | selectattr('role', 'equalto', 'user') | list -%}"
    "{%- if not asked -%}{{ raise_exception('There is no question.') }}{%- endif -%}"
    "<|user|>{{ asked[-1].content }}<|assistant|>"
    "{%- if messages[-1].role == 'assistant' -%}{{ messages[-1].content }}{%- endif -%}"
)


def encode(text: str) -> list[int]:
    """Ids of a text, one for each character."""
    return [IDS.get(character, UNKNOWN) for character in text]


def prompt(question: str) -> list[int]:
    """Ids of a question as the chat template has it."""
    return [USER, *encode(question), ASSISTANT]


def decode(ids: list[int]) -> str:
    """The text up to the end token; control tokens are spelled out, so that none goes unnoticed."""
    ids = ids[: ids.index(END)] if END in ids else ids
    return "".join((*CHARACTERS, *CONTROLS)[token] for token in ids)


def write_folder(
    folder: Path, config: Mapping[str, Any], family: Family, leaves: Mapping[str, np.ndarray], notice: str
) -> None:
    """Writes a folder that can be converted: weights in bfloat16, all that must be exact in float32.

    Args:
        config: the fields of ``config.json``.
        leaves: by path, in float32.
        notice: where the model comes from and under which licence.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors(family, leaves, config["hidden_size"]), folder / "model.safetensors")
    generation = {"eos_token_id": END, "pad_token_id": PAD, "temperature": 0.0}
    names = {"eos_token": CONTROLS[END - UNKNOWN], "pad_token": CONTROLS[-1], "unk_token": CONTROLS[0]}
    described = {"tokenizer_class": "PreTrainedTokenizerFast", **names, "chat_template": TEMPLATE}
    written = {
        "config.json": config,
        "generation_config.json": generation,
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": described,
    }
    for name, value in written.items():
        (folder / name).write_text(json.dumps(value, indent=2) + "\n")
    (folder / "NOTICE.md").write_text(notice)


def tensors(family: Family, leaves: Mapping[str, np.ndarray], width: int) -> dict[str, np.ndarray]:
    """A family's leaves as its files name and shape them: ``Piece.place`` the other way round."""
    parts: dict[str, dict[int, np.ndarray]] = {}
    for rule in family.rules:
        leaf = leaves[rule.param].astype(rule.dtype or ml_dtypes.bfloat16)
        for piece in rule.ways[0]:
            order = piece.order or tuple(range(len(piece.shape)))
            placed = leaf[tuple(slice(*bounds) for bounds in piece.region)]
            placed = placed.reshape([piece.shape[axis] for axis in order]).transpose(np.argsort(order))
            parts.setdefault(piece.source, {})[piece.rows[0] if piece.rows else 0] = _as_matrix(placed, width)
    return {name: np.concatenate([rows[at] for at in sorted(rows)]) for name, rows in parts.items()}


def _as_matrix(tensor: np.ndarray, width: int) -> np.ndarray:
    """Files hold maps as ``[out, in]`` and one of the two is the model's width, unless it is no map at all."""
    if tensor.ndim <= 2:
        return tensor
    if tensor.shape[-1] == width:
        return tensor.reshape(-1, width)
    return tensor.reshape(width, math.prod(tensor.shape[1:]))


def _tokenizer() -> dict[str, Any]:
    """Byte-pair encoding without a single pair: what is in the vocabulary is a token, anything else unknown."""
    controls = [
        {"id": UNKNOWN + at, "content": text, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for at, text in enumerate(CONTROLS)
    ]
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": CONTROLS[0],
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": IDS | {text: UNKNOWN + at for at, text in enumerate(CONTROLS)},
        "merges": [],
    }
    nothing = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor"))
    return {"version": "1.0", **nothing, "added_tokens": controls, "decoder": {"type": "Fuse"}, "model": model}
