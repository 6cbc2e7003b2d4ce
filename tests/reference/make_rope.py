"""Write oracle.json: rotary frequencies and attention factors as transformers reads them from config.json fields.

Knows transformers' configuration classes and ROPE_INIT_FUNCTIONS. The cases are configurations as files spell them
(old and new), so that what is tested is the reading of the fields as much as the formula.

    python -m tests.reference.make_rope
"""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_whole_head
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as rotate_part_of_head
from transformers.utils import logging

FILE = Path(__file__).parent / "oracle.json"
DEFAULT = {
    "llama": LlamaRotaryEmbedding.compute_default_rope_parameters,
    "qwen2": LlamaRotaryEmbedding.compute_default_rope_parameters,
    "qwen3": LlamaRotaryEmbedding.compute_default_rope_parameters,
    "mistral": LlamaRotaryEmbedding.compute_default_rope_parameters,
    "phi3": Phi3RotaryEmbedding.compute_default_rope_parameters,
    "gemma3_text": Gemma3RotaryEmbedding.compute_default_rope_parameters,
}
HEAD = {"hidden_size": 128, "num_attention_heads": 8}  # head size 16
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
SHORT = [1.0, 1.0, 1.02, 1.1, 1.25, 1.5, 1.8, 2.0]
LONG = [1.0, 1.2, 1.8, 2.9, 4.4, 6.1, 7.5, 8.0]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}

# name: (config.json fields, length of the sequence where the frequencies depend on it, layer type where they differ)
Entry = tuple[dict[str, Any], int | None, str | None]


def llama(length: int | None = None, /, **fields: Any) -> Entry:
    """A Llama configuration of head size 16 unless the fields say otherwise."""
    return {"model_type": "llama", "max_position_embeddings": 2048, **HEAD, **fields}, length, None


def phi3(length: int | None = None, /, **fields: Any) -> Entry:
    """A Phi-3 configuration: the family whose classes rotate a part of each head."""
    config = {"model_type": "phi3", "max_position_embeddings": 2048, "pad_token_id": None, **HEAD, **fields}
    return config, length, None


def gemma3(layer_type: str, **fields: Any) -> Entry:
    """A Gemma 3 configuration: frequencies by layer type."""
    config = {"model_type": "gemma3_text", "max_position_embeddings": 2048, "head_dim": 16, **HEAD, **fields}
    return config, None, layer_type


CASES: dict[str, Entry] = {
    "default, nothing said": llama(),
    "default, old": llama(rope_theta=100000.0, rope_scaling=None),
    "default, old, typed": llama(rope_theta=500000.0, rope_scaling={"rope_type": "default"}),
    "default, new": llama(rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}),
    "default, theta in both places": llama(
        rope_theta=5.0, rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}
    ),
    "default, head size 64": llama(head_dim=64, rope_theta=10000.0),
    "default, head size 128": llama(head_dim=128, rope_theta=1000000.0),
    "default, qwen3": ({"model_type": "qwen3", "head_dim": 24, "rope_theta": 1000000, **HEAD}, None, None),
    "default, qwen2": ({"model_type": "qwen2", "rope_theta": 1000000.0, **HEAD}, None, None),
    "default, mistral": ({"model_type": "mistral", "head_dim": None, "rope_theta": 10000.0, **HEAD}, None, None),
    "linear, old alias": llama(rope_theta=10000.0, rope_scaling={"type": "linear", "factor": 4.0}),
    "linear, new": llama(rope_parameters={"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0}),
    "linear, integers": llama(rope_theta=10000, rope_scaling={"rope_type": "linear", "factor": 2}),
    "llama3, 3.1": llama(head_dim=128, max_position_embeddings=131072, rope_theta=500000.0, rope_scaling=LLAMA3),
    "llama3, 3.2": llama(
        head_dim=64, max_position_embeddings=131072, rope_theta=500000.0, rope_scaling=LLAMA3 | {"factor": 32.0}
    ),
    "llama3, new": llama(
        max_position_embeddings=131072, rope_parameters=LLAMA3 | {"rope_theta": 500000.0, "low_freq_factor": 2.0}
    ),
    "yarn": llama(rope_theta=10000.0, rope_scaling=YARN),
    "yarn, no original length": llama(rope_theta=10000.0, rope_scaling={"rope_type": "yarn", "factor": 4.0}),
    "yarn, Qwen": llama(
        head_dim=128,
        max_position_embeddings=40960,
        rope_theta=1000000.0,
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    ),
    "yarn, attention factor": llama(rope_parameters=YARN | {"rope_theta": 10000.0, "attention_factor": 0.7}),
    "yarn, betas": llama(rope_parameters=YARN | {"rope_theta": 10000.0, "beta_fast": 16, "beta_slow": 2}),
    "yarn, whole range clamped": llama(
        rope_parameters={"rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 4}
    ),
    "yarn, not truncated": llama(rope_parameters=YARN | {"rope_theta": 10000.0, "truncate": False}),
    "yarn, gpt-oss": llama(
        head_dim=64,
        max_position_embeddings=131072,
        rope_theta=150000.0,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    ),
    "yarn, mscale": llama(rope_parameters=YARN | {"rope_theta": 10000.0, "mscale": 1.5, "mscale_all_dim": 0.5}),
    "yarn, mscale equal": llama(rope_parameters=YARN | {"rope_theta": 10000.0, "mscale": 1.0, "mscale_all_dim": 1.0}),
    "yarn, mscale alone": llama(rope_parameters=YARN | {"rope_theta": 10000.0, "mscale": 2.0}),
    "yarn, factor one": llama(rope_parameters=YARN | {"rope_theta": 10000.0, "factor": 1.0}),
    "dynamic, within": llama(100, rope_theta=10000.0, rope_scaling={"type": "dynamic", "factor": 2.0}),
    "dynamic, beyond": llama(5000, rope_theta=10000.0, rope_scaling={"type": "dynamic", "factor": 2.0}),
    "longrope, short": llama(
        512, rope_theta=10000.0, rope_scaling=LONGROPE | {"original_max_position_embeddings": 512}
    ),
    "longrope, long": llama(513, rope_theta=10000.0, rope_scaling=LONGROPE | {"original_max_position_embeddings": 512}),
    "longrope, factor": llama(
        513,
        rope_theta=10000.0,
        rope_scaling=LONGROPE | {"original_max_position_embeddings": 512, "factor": 16.0},
    ),
    "longrope, attention factor": llama(
        513, rope_parameters=LONGROPE | {"original_max_position_embeddings": 512, "attention_factor": 1.25}
    ),
    "longrope, original length outside wins": phi3(
        600,
        original_max_position_embeddings=1024,
        rope_theta=10000.0,
        rope_scaling=LONGROPE | {"original_max_position_embeddings": 512},
    ),
    "partial, old": phi3(rope_theta=10000.0, partial_rotary_factor=0.5),
    "partial, new": phi3(rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}),
    "partial, linear": llama(
        rope_theta=10000.0, partial_rotary_factor=0.75, rope_scaling={"type": "linear", "factor": 4.0}
    ),
    "partial, llama3": llama(
        max_position_embeddings=131072, rope_theta=500000.0, partial_rotary_factor=0.5, rope_scaling=LLAMA3
    ),
    "partial, yarn": llama(rope_parameters=YARN | {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}),
    "proportional": llama(
        head_dim=512,
        rope_parameters={"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
    ),
    "proportional, odd": llama(
        head_dim=24, rope_parameters={"rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 0.3}
    ),
    "gemma3, global": gemma3("full_attention"),
    "gemma3, global, linear": gemma3(
        "full_attention", rope_theta=1000000.0, rope_scaling={"rope_type": "linear", "factor": 8.0}
    ),
    "gemma3, local": gemma3(
        "sliding_attention", rope_local_base_freq=20000.0, rope_scaling={"rope_type": "linear", "factor": 8.0}
    ),
}


def frequencies(fields: dict[str, Any], length: int | None, layer_type: str | None) -> dict[str, Any]:
    """What transformers makes of one configuration: inverse frequencies [r/2] float32 and the factor on cos and sin."""
    fields = copy.deepcopy(fields)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    settings = config.rope_parameters[layer_type] if layer_type else config.rope_parameters
    compute: Callable[..., tuple[torch.Tensor, float]] = ROPE_INIT_FUNCTIONS.get(
        settings["rope_type"], DEFAULT[config.model_type]
    )
    arguments = {"layer_type": layer_type} if layer_type else {}
    inverse, factor = compute(config, seq_len=length, **arguments)
    return {"inv_freq": numbers(inverse), "attention_factor": float(factor)}


def numbers(tensor: torch.Tensor) -> Any:
    """A float32 tensor as nested lists whose numbers read back to the same float32."""
    return json.loads(json.dumps(tensor.float().tolist()), parse_float=lambda text: float(str(np.float32(text))))


def rotations() -> list[dict[str, Any]]:
    """Heads before and after rotation, at positions near and far, rotating the whole head or its first half."""
    positions = torch.tensor([[0, 1, 7, 1000]])
    heads = torch.from_numpy(np.random.default_rng(3).standard_normal((1, 1, 4, 16)).astype(np.float32))
    found = []
    for share, rotate, embedding in (
        (1.0, rotate_whole_head, LlamaRotaryEmbedding),
        (0.5, rotate_part_of_head, Phi3RotaryEmbedding),
    ):
        fields, _, _ = (llama if share == 1.0 else phi3)(rope_theta=10000.0, partial_rotary_factor=share)
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        cos, sin = embedding(config)(heads, positions)
        rotated, _ = rotate(heads, heads, cos, sin)
        found.append(
            {
                "partial_rotary_factor": share,
                "rope_theta": 10000.0,
                "positions": positions[0].tolist(),
                "before": numbers(heads[0, 0]),
                "after": numbers(rotated[0, 0]),
            }
        )
    return found


def main() -> None:
    """Write the file, one case a line."""
    logging.set_verbosity_error()
    cases = [
        {"name": name, "config": fields, "length": length, "layer_type": layer_type}
        | frequencies(fields, length, layer_type)
        for name, (fields, length, layer_type) in CASES.items()
    ]
    lines = [",\n    ".join(json.dumps(entry) for entry in entries) for entries in (cases, rotations())]
    FILE.write_text(f'{{\n  "frequencies": [\n    {lines[0]}\n  ],\n  "rotations": [\n    {lines[1]}\n  ]\n}}\n')
    print(f"{len(cases)} cases, {FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
