"""Multi-head latent attention: keys and values of all heads come from one narrow latent, and only that is kept.

DeepSeek-V2 (arXiv 2405.04434), section 2.1. The maps from the latent to a head's keys and values are absorbed: a query
goes through the transposed key map once and then meets latents as they lie in the cache, and the value map follows the
weighted sum. So every head reads the same entries, which is grouped-query attention with one key head whose values are
the first numbers of its keys. Every pass does so, the whole-sequence one too: one path, one set of numbers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxserve.errors import CheckpointError
from jaxserve.models.attention import Prefix, attend
from jaxserve.models.cache import KV, entries
from jaxserve.models.hf_fields import need
from jaxserve.models.layers import Linear, Norm, RMSNorm
from jaxserve.models.passes import Pass
from jaxserve.models.rope import Rope, rope_from_hf, rotate
from jaxserve.models.weights import Piece, Rule, rule
from jaxserve.plan import CacheShape

# Of the norms on both latents: the reference never hands them the configuration's epsilon.
_NORM = Norm(1e-6)


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Latent attention with a rotated part beside it.

    Attributes:
        plain, rotary: size of a head's two parts of q and k; the rotated part of k is one for all heads.
        value: size of a head's values.
        latent: numbers of the latent from which keys and values come.
        query_latent: the same for queries; ``None`` makes them of the hidden state.
        scale: factor on the scores.
        interleaved: files hold the pairs that turn together side by side.
    """

    heads: int
    plain: int
    rotary: int
    value: int
    latent: int
    query_latent: int | None
    rope: Rope
    scale: float
    interleaved: bool = True

    @property
    def entry(self) -> int:
        """Numbers kept of a position."""
        return self.latent + self.rotary

    @property
    def widest(self) -> int:
        """Numbers of a token's widest activation."""
        return self.heads * self.entry

    def build(self, width: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> LatentAttention:
        """The module."""
        return LatentAttention(self, width, dtype=dtype, rngs=rngs)

    def empty(self, slots: int, positions: int, dtype: DTypeLike, key_block: int) -> KV:  # noqa: ARG002
        """What it keeps, with nothing in it."""
        return KV(entries(slots, 1, positions, self.entry, dtype), None)

    def cache_shape(self, key_block: int) -> CacheShape:  # noqa: ARG002
        """What it keeps, in numbers: heads that are split over devices all read the same entries."""
        return CacheShape(per_position=self.entry)

    def rules(self, width: int, to: str, of: str) -> tuple[Rule, ...]:
        """Every weight: ``to`` and ``of`` are the paths of the layer here and in files, with their dots."""
        of, to, n, latent = f"{of}self_attn.", f"{to}mixer.", self.heads, self.latent
        inputs, name = (width, "q_proj") if self.query_latent is None else (self.query_latent, "q_b_proj")
        axis = "model" if self.query_latent is None else None
        both = self.plain + self.rotary
        q = (
            piece
            for head in range(n)
            for piece in self._head(f"{of}{name}.weight", (self.plain, self.rotary), inputs, head * both, head)
        )
        kv = tuple(self._head(f"{of}kv_a_proj_with_mqa.weight", (latent, self.rotary), width))
        rules = [
            Rule(f"{to}q.kernel", (n, both, inputs), ("heads", None, axis), (tuple(q),)),
            Rule(f"{to}kv.kernel", (self.entry, width), (None, "model"), (kv,)),
            rule(f"{to}kv_norm.scale", f"{of}kv_a_layernorm.weight", (latent,), (None,)),
            rule(f"{to}o.kernel", f"{of}o_proj.weight", (width, n, self.value), ("model", "heads", None)),
        ]
        at = 0
        for own, size in (("key", self.plain), ("value", self.value)):
            starts = (head * (self.plain + self.value) + at for head in range(n))
            pieces = (
                Piece(f"{of}kv_b_proj.weight", (size, latent), (), ((head, head + 1),), (start, start + size))
                for head, start in enumerate(starts)
            )
            rules.append(Rule(f"{to}{own}.kernel", (n, size, latent), ("heads", None, None), (tuple(pieces),)))
            at += size
        if self.query_latent is not None:
            a = f"{of}q_a_proj.weight"
            rules.append(rule(f"{to}q_down.kernel", a, (self.query_latent, width), (None, "model")))
            rules.append(rule(f"{to}q_norm.scale", f"{of}q_a_layernorm.weight", (self.query_latent,), (None,)))
        return tuple(rules)

    def _head(
        self, source: str, sizes: tuple[int, int], inputs: int, start: int = 0, head: int | None = None
    ) -> tuple[Piece, Piece]:
        """Rows of a plain and a rotated part.

        The rotation here turns (i, i + r/2) together. Where files hold those pairs side by side, (2i, 2i + 1), the
        rows are put in order while loading: once, instead of at every token. Queries and keys are reordered alike, so
        their products stay what they are.
        """
        size, turned = sizes
        before = () if head is None else ((head, head + 1),)
        pairs, order = ((turned // 2, 2, inputs), (1, 0, 2)) if self.interleaved else ((turned, inputs), ())
        middle, end = start + size, start + size + turned
        return (
            Piece(source, (size, inputs), (), (*before, (0, size)), (start, middle)),
            Piece(source, pairs, order, (*before, (size, size + turned)), (middle, end)),
        )


class LatentAttention(nnx.Module):
    """See ``LatentConfig``; ``key`` and ``value`` hold each head's maps from the latent, ``[n, size, latent]``."""

    def __init__(self, config: LatentConfig, width: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        def linear(inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Linear:
            return Linear(inputs, outputs, bias=False, dtype=dtype, rngs=rngs)

        self.config = config
        narrow, n = config.query_latent, config.heads
        self.q_down = None if narrow is None else linear((width,), (narrow,))
        self.q_norm = None if narrow is None else RMSNorm(narrow, _NORM, dtype=dtype)
        self.q = linear((narrow or width,), (n, config.plain + config.rotary))
        self.kv = linear((width,), (config.entry,))
        self.kv_norm = RMSNorm(config.latent, _NORM, dtype=dtype)
        self.key = linear((config.latent,), (n, config.plain))
        self.value = linear((config.latent,), (n, config.value))
        self.o = linear((n, config.value), (width,))

    def __call__(self, x: Float[Array, "b t d"], run: Pass, layer: int) -> tuple[Float[Array, "b t d"], KV]:
        """Mixes positions; returns the output and the block's own entries ``[b, 1, t, latent + rotary]``."""
        config, turn = self.config, run.rotation(self.config.rope, x.dtype)
        narrow = x if self.q_down is None or self.q_norm is None else self.q_norm(self.q_down(x))
        q = self.q(narrow)
        plain, turned = q[..., : config.plain], rotate(q[..., config.plain :], *turn)
        q = jnp.concatenate([_each_head("btnh,nhl->btnl", plain, self.key.kernel[...]), turned], axis=-1)
        kv = self.kv(x)[:, :, None]
        latent, turned = self.kv_norm(kv[..., : config.latent]), rotate(kv[..., config.latent :], *turn)
        entry = jnp.concatenate([latent, turned], axis=-1).swapaxes(1, 2)
        cached = run.cached(layer)
        mixed = attend(
            q,
            entry,
            entry[..., : config.latent],
            run.mask,
            None if cached is None else Prefix(cached.k, None, run.row, run.start, run.span),
            scale=config.scale,
            window=None,
            key_block=run.key_block,
        )
        return self.o(_each_head("btnl,nhl->btnh", mixed, self.value.kernel[...])), KV(entry, None)


def _each_head(form: str, x: Float[Array, "b t n i"], weights: Float[Array, "n h l"]) -> Float[Array, "b t n o"]:
    return jnp.einsum(form, x, weights, preferred_element_type=jnp.float32).astype(x.dtype)


def latent_from_hf(hf: Mapping[str, Any]) -> LatentConfig:
    """Latent attention as DeepSeek's fields describe it.

    Raises:
        CheckpointError: a field is missing, or biases.
    """
    if hf.get("attention_bias"):
        raise CheckpointError("config.json: biases of latent attention are not supported", param="attention_bias")
    plain, rotary = need(hf, "qk_nope_head_dim"), need(hf, "qk_rope_head_dim")
    return LatentConfig(
        heads=need(hf, "num_attention_heads"),
        plain=plain,
        rotary=rotary,
        value=need(hf, "v_head_dim"),
        latent=need(hf, "kv_lora_rank"),
        query_latent=hf.get("q_lora_rank"),
        rope=rope_from_hf(hf, rotary),
        scale=(plain + rotary) ** -0.5 * _stretch(hf) ** 2,
        interleaved=bool(hf.get("rope_interleave", True)),
    )


def _stretch(hf: Mapping[str, Any]) -> float:
    """What YaRN puts on queries and keys beside what it puts on cosine and sine (DeepSeek-V2's model card)."""
    fields = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    weight, factor = fields.get("mscale_all_dim"), float(fields.get("factor") or 1)
    plain = fields.get("rope_type", fields.get("type", "default")) == "default"
    return 1.0 if plain or not weight or factor <= 1 else 0.1 * float(weight) * math.log(factor) + 1.0
