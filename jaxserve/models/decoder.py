"""A decoder: token embedding, a stack of layers, a norm, scores of every token.

One forward function serves the whole-sequence pass (no cache) and every cached pass. A layer is a mixer (attention or
whatever else lets positions see each other) and a feed-forward part, each described by a frozen configuration that
builds its module, states its weights and says what it keeps. A family's file reads ``config.json`` into a
``DecoderConfig``.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxserve.models.cache import Cache
from jaxserve.models.layers import Norm, RMSNorm, parameter, product
from jaxserve.models.passes import UNPLANNED, Canvas, Pass, Routing
from jaxserve.models.weights import Rule, rule
from jaxserve.plan import CacheShape, ModelShape, WeightShape


class Part(Protocol):
    """A feed-forward part's configuration; its module maps ``(x, pass)`` to ``[b, t, d]``, without the residual."""

    @property
    def widest(self) -> int:
        """Numbers of a token's widest activation."""

    def build(self, width: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> Any:
        """The module."""

    def rules(self, width: int, to: str, of: str) -> tuple[Rule, ...]:
        """Every weight: ``to`` and ``of`` are the paths of the layer here and in files, with their dots."""


class Mixer(Part, Protocol):
    """A mixer's configuration; its module maps ``(x, pass, layer)`` to the output and fresh cache entries."""

    def empty(self, slots: int, positions: int, dtype: DTypeLike, key_block: int) -> Any:
        """What the layer keeps, with nothing in it; ``None`` if it keeps nothing."""

    def cache_shape(self, key_block: int) -> CacheShape:
        """The same in numbers."""


class Layer(Protocol):
    """A layer's configuration; its module maps ``(x, pass, layer)`` to the output and fresh cache entries."""

    mixer: Mixer

    @property
    def chosen(self) -> int:
        """Experts that a token takes; 0 where there are none."""

    @property
    def widest(self) -> int:
        """Numbers of a token's widest activation."""

    def build(self, width: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> Any:
        """The module."""

    def rules(self, width: int, to: str, of: str) -> tuple[Rule, ...]:
        """Every weight."""


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """Pre-norm mixer and feed-forward part, each with a residual.

    Attributes:
        after: there are norms on the outputs of both parts, too, before they are added (Gemma 3).
    """

    mixer: Any
    ffn: Any
    norm: Norm
    after: bool = False

    @property
    def widest(self) -> int:
        """Numbers of a token's widest activation."""
        return max(self.mixer.widest, self.ffn.widest)

    @property
    def chosen(self) -> int:
        """Experts that a token takes; 0 where there are none."""
        return getattr(self.ffn, "chosen", 0)

    def build(self, width: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> Block:
        """The module."""
        return Block(self, width, dtype=dtype, rngs=rngs)

    def rules(self, width: int, to: str, of: str) -> tuple[Rule, ...]:
        """Every weight."""
        names = {"mixer_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
        if self.after:
            names |= {
                "mixer_after": "post_attention_layernorm",
                "ffn_norm": "pre_feedforward_layernorm",
                "ffn_after": "post_feedforward_layernorm",
            }
        norms = tuple(rule(f"{to}{own}.scale", f"{of}{name}.weight", (width,), (None,)) for own, name in names.items())
        return norms + self.mixer.rules(width, to, of) + self.ffn.rules(width, to, of)


class Block(nnx.Module):
    """See ``BlockConfig``."""

    def __init__(self, config: BlockConfig, width: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.mixer_norm = RMSNorm(width, config.norm, dtype=dtype)
        self.mixer = config.mixer.build(width, dtype=dtype, rngs=rngs)
        self.mixer_after = RMSNorm(width, config.norm, dtype=dtype) if config.after else None
        self.ffn_norm = RMSNorm(width, config.norm, dtype=dtype)
        self.ffn = config.ffn.build(width, dtype=dtype, rngs=rngs)
        self.ffn_after = RMSNorm(width, config.norm, dtype=dtype) if config.after else None

    def __call__(self, x: Float[Array, "b t d"], run: Pass, layer: int) -> tuple[Float[Array, "b t d"], Any]:
        """Applies the layer; returns its output and its fresh cache entries."""
        mixed, fresh = self.mixer(self.mixer_norm(x), run, layer)
        x = x + (mixed if self.mixer_after is None else self.mixer_after(mixed))
        out = self.ffn(self.ffn_norm(x), run)
        return x + (out if self.ffn_after is None else self.ffn_after(out)), fresh


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Everything that shapes the program; frozen and hashable, so that it can be a static argument.

    Attributes:
        layers: configurations of the layers.
        norm: of the final hidden states.
        tied: logits come from the embedding table.
        embedding_scale: factor on embeddings, rounded to the weights' dtype first.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        side: configuration of a module ``(tokens, embeddings) -> anything``, run once, for every layer to use.
        conditioning: configuration of a module ``(embeddings, soft embeddings) -> embeddings`` for rows that refine a
            canvas.
        key_block: positions of the cached prefix that attention reads at a time.
        routing: how tokens meet their experts, if there are any.
    """

    vocab_size: int
    width: int
    layers: tuple[Any, ...]
    norm: Norm
    max_positions: int
    tied: bool = False
    embedding_scale: float | None = None
    softcap: float | None = None
    side: Any = None
    conditioning: Any = None
    key_block: int = 128
    routing: Routing = UNPLANNED

    def rules(self) -> tuple[Rule, ...]:
        """Each weight once, under the names of ``LlamaForCausalLM`` and kin."""
        d, v = self.width, self.vocab_size
        rules = [
            rule("embedding", "model.embed_tokens.weight", (v, d), ("vocab", "model")),
            rule("norm.scale", "model.norm.weight", (d,), (None,)),
        ]
        if not self.tied:
            rules.append(rule("head", "lm_head.weight", (v, d), ("vocab", "model")))
        if self.side is not None:
            rules += self.side.rules(d, "side.", "model.")
        if self.conditioning is not None:
            rules += self.conditioning.rules(d, "conditioning.", "model.")
        for index, layer in enumerate(self.layers):
            rules += layer.rules(d, f"layers.{index}.", f"model.layers.{index}.")
        return tuple(rules)

    def empty_cache(self, slots: int, positions: int, dtype: DTypeLike) -> Cache:
        """A cache with nothing in it."""
        layers = (layer.mixer.empty(slots, positions, dtype, self.key_block) for layer in self.layers)
        return Cache(tuple(layers), positions, slots)

    @property
    def steady(self) -> bool:
        """Whether a token's numbers are the same, bit for bit, however many tokens a pass reads (on one device)."""
        parts = (part for layer in self.layers for part in (layer.mixer, layer.ffn))
        return all(getattr(part, "steady", False) for part in parts)

    @property
    def shape(self) -> ModelShape:
        """What the plan needs to know."""
        mixers = [layer.mixer for layer in self.layers]
        return ModelShape(
            vocab_size=self.vocab_size,
            weights=tuple(WeightShape(one.param, one.shape, one.axes, one.dtype) for one in self.rules()),
            cache=tuple(mixer.cache_shape(self.key_block) for mixer in mixers),
            max_positions=self.max_positions,
            widest=max(self.width, *(layer.widest for layer in self.layers)),
            heads=max(getattr(mixer, "heads", 1) for mixer in mixers),
            key_block=self.key_block,
            width=self.width,
            chosen=max((layer.chosen for layer in self.layers), default=0),
        )


class Decoder(nnx.Module):
    """See ``DecoderConfig``."""

    def __init__(self, config: DecoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.config = config
        table = (config.vocab_size, config.width)
        self.embedding = parameter(rngs, table, dtype, config.width)
        self.side = None if config.side is None else config.side.build(config.width, dtype=dtype, rngs=rngs)
        conditioning = config.conditioning
        self.conditioning = None if conditioning is None else conditioning.build(config.width, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([layer.build(config.width, dtype=dtype, rngs=rngs) for layer in config.layers])
        self.norm = RMSNorm(config.width, config.norm, dtype=dtype)
        self.head = None if config.tied else parameter(rngs, table, dtype, config.width)

    def __call__(
        self,
        tokens: Int[Array, "b t"],
        start: Int[Array, " b"],
        mask: Bool[Array, "b t t"],
        cache: Cache | None = None,
        row: Int[Array, ""] | int = 0,
        span: Int[Array, ""] | None = None,
        real: Bool[Array, "b t"] | None = None,
        positions: Int[Array, "b t"] | None = None,
        canvas: Canvas | None = None,
    ) -> tuple[Float[Array, "b t d"], tuple[Any, ...]]:
        """Runs ``tokens`` at positions ``start .. start+t-1`` over the cached prefix below ``start``.

        Args:
            tokens: ids in ``[0, vocab_size)``; JAX clamps others silently, so the host checks them.
            start: positions that stand before each row; zeros where there is no cache. A row that starts at 0 sees
                nothing of what its slot kept.
            mask: what each position of the block sees of the block.
            cache: entries of the prefix, or ``None`` for the whole-sequence pass.
            row: cache row of the first token row.
            span: longest ``start`` that matters, by default the longest of all; rows beyond it compute garbage.
            real: tokens whose output matters, by default all; the others (padding, empty slots) may be left out of
                what costs most, and give garbage.
            positions: of the tokens, where they do not simply follow each other (a whole-sequence pass over a text
                and its noisy copies); without windows or a cache, which go by the order of tokens.
            canvas: rows that refine one, by default none.

        Returns:
            Final hidden states (after the last norm), and the block's own cache entries, layer by layer:
            ``cache.write`` keeps as many of them as turn out to be final.
        """
        config = self.config
        run = Pass(start, mask, cache, row, span, real, config.key_block, positions)
        run.routing, run.canvas = config.routing, canvas
        x = self._scaled(self.embedding[...][tokens])
        if self.conditioning is not None and canvas is not None:
            x = jnp.where(canvas.refined[:, None, None], self.conditioning(x, canvas.soft), x)
        if self.side is not None:
            run.side = self.side(tokens, x)
        fresh = []
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{index}"):
                x, entries = layer(x, run, index)
            fresh.append(entries)
        return self.norm(x), tuple(fresh)

    def mixed(self, shares: Float[Array, "... v"]) -> Float[Array, "... d"]:
        """The embeddings of distributions over tokens, which ``Canvas.soft`` is made of."""
        table = self.embedding[...]
        rows = shares.reshape(-1, shares.shape[-1]).astype(table.dtype)
        over = (((1,), (0,)), ((), ()))
        mixed = jax.lax.dot_general(rows, table, over, preferred_element_type=jnp.float32).astype(table.dtype)
        return self._scaled(mixed).reshape(*shares.shape[:-1], -1)

    def _scaled(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        scale = self.config.embedding_scale
        return x if scale is None else x * jnp.asarray(scale, x.dtype)

    def logits(self, hidden: Float[Array, "... d"]) -> Float[Array, "... v"]:
        """Scores of every token, in float32."""
        table = self.embedding if self.head is None else self.head
        rows = product(hidden.reshape(-1, hidden.shape[-1]), table[...], jnp.float32)
        if self.config.softcap is not None:
            rows = self.config.softcap * jnp.tanh(rows / self.config.softcap)
        return rows.reshape(*hidden.shape[:-1], -1)
