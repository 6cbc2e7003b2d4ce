"""From a Hugging Face configuration to a family: the file named after its ``model_type`` knows the facts.

There is no registry: ``models/<model_type>.py`` with a function ``family(hf)`` is a family.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxserve.errors import CheckpointError
from jaxserve.models.cache import KVCache, empty_cache
from jaxserve.models.decoder import Decoder, DecoderConfig, arrange, decoder_rules
from jaxserve.models.weights import Rule
from jaxserve.plan import ModelShape

MODEL_TYPE = re.compile(r"[a-z][a-z0-9_]*")

# The largest that anybody could mean; tuples and tables of these lengths are made before a weight is seen.
_LARGEST = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "num_hidden_layers": 1 << 10,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 14,
    "max_position_embeddings": 1 << 30,
    "sliding_window": 1 << 30,
}
_MAY_BE_NULL = frozenset({"num_key_value_heads", "head_dim", "sliding_window"})


@dataclasses.dataclass(frozen=True)
class Family:
    """A model as its checkpoint describes it.

    Attributes:
        config: shapes and switches.
        rules: every weight and where it comes from.
        ignored: prefixes of source tensors that carry no weight of this model.
        build: makes the module, e.g. ``build(jnp.bfloat16, nnx.Rngs(0))``.
        arrange: makes the module's parameters of a checkpoint's tree (a leaf for each rule), and empties the tree.
        empty_cache: makes a cache of (slots, positions, dtype).
    """

    config: DecoderConfig
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...]
    build: Callable[[DTypeLike, nnx.Rngs], Decoder]
    arrange: Callable[[dict[str, Any]], dict[Any, Any]]
    empty_cache: Callable[[int, int, DTypeLike], KVCache]

    @property
    def shape(self) -> ModelShape:
        """What the plan needs to know."""
        config = self.config
        return ModelShape(
            vocab_size=config.vocab_size,
            parameters=sum(math.prod(rule.shape) for rule in self.rules),
            cache_per_position=2 * config.layers * config.kv_heads * config.head_size,
            max_positions=config.max_positions,
            widest=max(config.ffn, config.width, config.heads * config.head_size),
            heads=config.heads,
            key_block=config.key_block,
        )

    def graphdef(self, dtype: DTypeLike) -> nnx.GraphDef[Decoder]:
        """The module's structure without its weights: merge it with a parameter tree to get the module."""
        abstract = nnx.eval_shape(lambda: self.build(dtype, nnx.Rngs(0)))
        return nnx.split(abstract)[0]


def decoder_family(config: DecoderConfig, ignored: tuple[str, ...] = ()) -> Family:
    """A family whose module is the Llama-shaped ``Decoder``."""
    # Old checkpoints carry the rotary table as a buffer; a tied model's head repeats the embedding.
    tied = ("lm_head.weight",) if config.tied else ()
    buffers = tuple(f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(config.layers))
    return Family(
        config=config,
        rules=decoder_rules(config),
        ignored=ignored + tied + buffers,
        build=lambda dtype, rngs: Decoder(config, dtype=dtype, rngs=rngs),
        arrange=partial(arrange, config),
        empty_cache=lambda slots, positions, dtype: empty_cache(
            config.layers, slots, config.kv_heads, positions, config.head_size, dtype
        ),
    )


def family_of(hf: Mapping[str, Any]) -> Family:
    """The family that a ``config.json`` names.

    Raises:
        CheckpointError: no such family, or a configuration that it cannot serve.
    """
    reader = reader_of(hf.get("model_type"))
    for name, most in _LARGEST.items():
        value = hf.get(name, 1)
        if value is None and name in _MAY_BE_NULL:
            continue
        if type(value) is not int or not 1 <= value <= most:
            raise CheckpointError(f"config.json: {name} is no whole number from 1 to {most}", param=name)
    try:
        with np.errstate(all="ignore"):
            return reader(hf)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise CheckpointError(f"config.json does not describe such a model ({reason})") from error


def reader_of(model_type: object) -> Callable[[Mapping[str, Any]], Family]:
    """The function ``family`` of the file named after a ``model_type``.

    Raises:
        CheckpointError: there is none.
    """
    if not isinstance(model_type, str) or not MODEL_TYPE.fullmatch(model_type):
        raise CheckpointError(f"model_type {model_type!r} is no family's name", param="model_type")
    name = f"{__package__}.{model_type}"
    module = importlib.import_module(name) if importlib.util.find_spec(name) else None
    reader: Callable[[Mapping[str, Any]], Family] | None = getattr(module, "family", None)
    if reader is None:
        raise CheckpointError(f"model_type {model_type!r} is not supported", param="model_type")
    return reader
