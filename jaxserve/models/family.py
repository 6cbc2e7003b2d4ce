"""From a Hugging Face configuration to a family: the file named after its ``model_type`` knows the facts.

There is no registry: ``models/<model_type>.py`` with a function ``family(hf)`` is a family.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxserve.errors import CheckpointError
from jaxserve.models.cache import Cache
from jaxserve.models.decoder import Decoder, DecoderConfig
from jaxserve.models.decoding import Decoding
from jaxserve.models.hf_fields import check_sizes
from jaxserve.models.passes import Routing
from jaxserve.models.quant import Quantisation, pack, quantisation_from_hf
from jaxserve.models.weights import Piece, Rule
from jaxserve.plan import ModelShape, WeightShape

MODEL_TYPE = re.compile(r"[a-z][a-z0-9_]*")


@dataclasses.dataclass(frozen=True)
class Family:
    """A model as its checkpoint describes it.

    Attributes:
        config: shapes and switches.
        ignored: prefixes of source tensors that carry no weight of this model.
        nested: it is the text model of one with other senses, whose files may name its tensors otherwise.
        quantisation: how the weights are held; ``None`` holds plain numbers.
        translate: from a piece as Llama's files hold it to one as this family's files do, where they name or join
            tensors in a way of their own.
        decoding: how it fills in text; ``None`` where it continues it, one token after the other.
    """

    config: DecoderConfig
    ignored: tuple[str, ...] = ()
    nested: bool = False
    quantisation: Quantisation | None = None
    translate: Callable[[Piece], Piece] | None = None
    decoding: Decoding | None = None

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """Every weight and where it comes from."""
        if self.quantisation is None:
            return self.plain_rules
        return tuple(leaf for one in self.plain_rules for leaf in self.quantisation.leaves(one))

    @cached_property
    def plain_rules(self) -> tuple[Rule, ...]:
        """The same as if files held plain numbers."""
        rules = self.config.rules()
        if self.translate is not None:
            rules = tuple(one.translated(self.translate) for one in rules)
        return tuple(one.also_named(_behind_model, _before_model) for one in rules) if self.nested else rules

    @cached_property
    def shape(self) -> ModelShape:
        """What the plan needs to know."""
        weights = tuple(WeightShape(one.param, one.shape, one.axes, one.dtype) for one in self.rules)
        block, beyond = (None, 0) if self.decoding is None else (self.decoding.read, self.decoding.beyond)
        return dataclasses.replace(self.config.shape, weights=weights, block=block, beyond=beyond)

    def empty_cache(self, slots: int, positions: int, dtype: DTypeLike) -> Cache:
        """A cache with nothing in it."""
        return self.config.empty_cache(slots, positions, dtype)

    def build(self, dtype: DTypeLike, rngs: nnx.Rngs, routing: Routing | None = None) -> Decoder:
        """Makes the module, e.g. ``build(jnp.bfloat16, nnx.Rngs(0))``; ``routing`` is the plan's."""
        config = self.config if routing is None else dataclasses.replace(self.config, routing=routing)
        decoder = Decoder(config, dtype=dtype, rngs=rngs)
        if self.quantisation is not None:
            pack(decoder, self.plain_rules, self.quantisation, dtype)
        return decoder

    def graphdef(self, dtype: DTypeLike, routing: Routing | None = None) -> nnx.GraphDef[Decoder]:
        """The module's structure without its weights: merge it with a parameter tree to get the module."""
        abstract = nnx.eval_shape(lambda: self.build(dtype, nnx.Rngs(0), routing))
        return nnx.split(abstract)[0]


def decoder_family(config: DecoderConfig, ignored: tuple[str, ...] = ()) -> Family:
    """A family whose checkpoints look as ``AutoModelForCausalLM`` saves them."""
    # Old checkpoints carry the rotary table as a buffer; a tied model's head repeats the embedding.
    tied = ("lm_head.weight",) if config.tied else ()
    buffers = tuple(f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(len(config.layers)))
    return Family(config, ignored + tied + buffers)


def nested_family(hf: Mapping[str, Any], model_type: str, ignored: tuple[str, ...]) -> Family:
    """The text model of one that has other senses, too: ``text_config`` describes it.

    Args:
        model_type: of the text model, where ``text_config`` does not say.
        ignored: prefixes of the other senses' tensors.

    Raises:
        CheckpointError: there is no such text model.
    """
    text = {"model_type": model_type} | hf["text_config"]
    if text["model_type"] != model_type:
        raise CheckpointError(
            f"text_config: model_type {text['model_type']!r} is not supported here", param="text_config"
        )
    # Which file says that the head repeats the embedding differs; where both do, the outer one is obeyed.
    if hf.get("tie_word_embeddings") is not None:
        text["tie_word_embeddings"] = hf["tie_word_embeddings"]
    own = family_of(text)
    known = (*own.ignored, *map(_behind_model, own.ignored), *map(_before_model, own.ignored))
    return Family(own.config, known + ignored, nested=True)


def _behind_model(source: str) -> str:
    return source.replace("model.", "model.language_model.", 1) if source.startswith("model.") else source


def _before_model(source: str) -> str:
    """As files of 2025 have it."""
    return f"language_model.{source}"


def family_of(hf: Mapping[str, Any]) -> Family:
    """The family that a ``config.json`` names.

    Raises:
        CheckpointError: no such family, or a configuration that it cannot serve.
    """
    reader = reader_of(hf.get("model_type"))
    try:
        check_sizes(hf)
        with np.errstate(all="ignore"):
            return dataclasses.replace(reader(hf), quantisation=quantisation_from_hf(hf))
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
