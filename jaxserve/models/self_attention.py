"""Grouped-query self-attention: its configuration, its module, its weights, and what it keeps.

The kinds differ by switches (biases, norms on heads, windows, sinks, a gate), not by structure; the product itself is
``attention.attend``.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxserve.models.attention import Prefix, attend
from jaxserve.models.cache import KV, Ring, entries, ring_size
from jaxserve.models.layers import Linear, Norm, RMSNorm
from jaxserve.models.passes import Pass
from jaxserve.models.rope import Rope, rotate
from jaxserve.models.weights import Piece, Rule, rule
from jaxserve.plan import CacheShape
from jaxserve.sharding import fed, held

_SPLIT = (None, None, "kv_heads", None, None)
_KERNEL = ("kv_heads", None, None, "model")


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Grouped-query attention with rotary positions.

    Attributes:
        rope: rotation of q and k; ``None`` has no positions (NoPE).
        scale: factor on the scores.
        window: how many positions a query sees, itself included; ``None`` sees all.
        bias, output_bias: on q, k and v; on the output.
        head_norm: on each head of q and k, before the rotation.
        value_norm: on each head of v, without a scale (Gemma 4).
        keys_are_values: v is k before its norm and rotation; there are no weights for it (Gemma 4).
        gate: the output is gated by a sigmoid of a second part of the query product (Qwen3.5).
        sinks: a learned score of each head for nothing at all (gpt-oss).
        shares: uses the keys and values of this earlier layer and has none of its own (Gemma 4).
    """

    heads: int
    kv_heads: int
    head_size: int
    rope: Rope | None
    scale: float
    window: int | None = None
    bias: bool = False
    output_bias: bool = False
    head_norm: Norm | None = None
    value_norm: Norm | None = None
    keys_are_values: bool = False
    gate: bool = False
    sinks: bool = False
    shares: int | None = None

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

    @property
    def parts(self) -> tuple[int, int, int, int]:
        """Heads of q, gate, k and v for each key head, as they lie in the joined product."""
        own = 0 if self.shares is not None else 1
        return self.group, self.group if self.gate else 0, own, 0 if self.keys_are_values else own

    @property
    def widest(self) -> int:
        """Numbers of a token's widest activation."""
        return self.kv_heads * sum(self.parts) * self.head_size

    @property
    def steady(self) -> bool:
        """See ``DecoderConfig``: a ring has no room for several new positions among those that are still seen."""
        return self.window is None

    def build(self, width: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> SelfAttention:
        """The module."""
        return SelfAttention(self, width, dtype=dtype, rngs=rngs)

    def empty(self, slots: int, positions: int, dtype: DTypeLike, key_block: int) -> KV | Ring | None:
        """What it keeps, with nothing in it."""
        if self.shares is not None:
            return None
        ring = None if self.window is None else ring_size(self.window, positions, key_block)
        size = (slots, self.kv_heads, ring or positions, self.head_size)
        kind = Ring if ring else KV
        return kind(entries(*size, dtype), entries(*size, dtype))

    def cache_shape(self, key_block: int) -> CacheShape:
        """What it keeps, in numbers."""
        if self.shares is not None:
            return CacheShape()
        most = None if self.window is None else ring_size(self.window, 1 << 62, key_block)
        return CacheShape(per_position=2 * self.kv_heads * self.head_size, most=most, heads=self.kv_heads)

    def rules(self, width: int, to: str, of: str) -> tuple[Rule, ...]:
        """Every weight: ``to`` and ``of`` are the paths of the layer here and in files, with their dots."""
        of, to, n, kv, h = f"{of}self_attn.", f"{to}mixer.", self.heads, self.kv_heads, self.head_size
        o = rule(f"{to}o.kernel", f"{of}o_proj.weight", (width, n, h), ("model", "heads", None))
        rules = [self._joined(f"{to}qkv.kernel", of, "weight", (width,)), o]
        if self.bias:
            rules.append(self._joined(f"{to}qkv.bias", of, "bias", ()))
        if self.output_bias:
            rules.append(rule(f"{to}o.bias", f"{of}o_proj.bias", (width,), (None,)))
        if self.head_norm is not None:
            names = ("q_norm",) if self.shares is not None else ("q_norm", "k_norm")
            rules += [rule(f"{to}{name}.scale", f"{of}{name}.weight", (h,), (None,)) for name in names]
        if self.sinks:
            rules.append(rule(f"{to}sinks", f"{of}sinks", (kv, self.group), ("kv_heads", None)))
        return tuple(rules)

    def _joined(self, param: str, of: str, kind: str, inputs: tuple[int, ...]) -> Rule:
        """For each key head its queries (and their gates), then the key, then the value."""
        h, kv, (group, gates, keys, values) = self.head_size, self.kv_heads, self.parts
        whole = (0, kv)
        # A gated query head is stored as its query, then its gate.
        shape = (kv, group, 2, h, *inputs) if gates else (kv, group, h, *inputs)
        order = (0, 2, 1, *range(3, len(shape))) if gates else ()
        pieces = [Piece(f"{of}q_proj.{kind}", shape, order, (whole, (0, group + gates)))]
        at = group + gates
        for name, count in (("k", keys), ("v", values)):
            if count:
                pieces.append(Piece(f"{of}{name}_proj.{kind}", (kv, 1, h, *inputs), (), (whole, (at, at + 1))))
            at += count
        axes = ("kv_heads", None, None, *("model" for _ in inputs))
        return Rule(param, (kv, at, h, *inputs), axes, (tuple(pieces),))


class SelfAttention(nnx.Module):
    """See ``AttentionConfig``.

    One product gives all: for each key head its group of query heads, then the key, then the value. So the first axis
    can be split over devices, and XLA:CPU starts one product instead of three.
    """

    def __init__(self, config: AttentionConfig, width: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        size, norm = config.head_size, config.head_norm
        outputs = (config.kv_heads, sum(config.parts), size)
        self.config = config
        self.qkv = Linear((width,), outputs, bias=config.bias, dtype=dtype, rngs=rngs)
        self.o = Linear((config.heads, size), (width,), bias=config.output_bias, dtype=dtype, rngs=rngs)
        self.q_norm = None if norm is None else RMSNorm(size, norm, dtype=dtype)
        self.k_norm = None if norm is None or config.shares is not None else RMSNorm(size, norm, dtype=dtype)
        self.sinks = nnx.Param(jnp.zeros((config.kv_heads, config.group), dtype)) if config.sinks else None

    def __call__(self, x: Float[Array, "b t d"], run: Pass, layer: int) -> tuple[Float[Array, "b t d"], object]:
        """Mixes positions; returns the output and the block's own entries ``[b, k, t, h]``."""
        config, (b, t) = self.config, x.shape[:2]
        group, gates, keys, _ = config.parts
        both = held(self.qkv(fed(x, _KERNEL, self.qkv.kernel.shape)), _SPLIT)
        q = both[:, :, :, :group].reshape(b, t, -1, config.head_size)
        q = q if self.q_norm is None else self.q_norm(q)
        q = q if config.rope is None else rotate(q, *run.rotation(config.rope, x.dtype))
        if keys:
            run.keep(layer, self._keys_and_values(both[:, :, :, group + gates :], run))
        k, v, cached = run.entries(layer if config.shares is None else config.shares)
        ring = isinstance(cached, Ring)
        out = attend(
            q,
            k,
            v,
            run.mask,
            None if cached is None else Prefix(cached.k, cached.v, run.row, run.start, run.span, ring),
            scale=config.scale,
            window=config.window,
            key_block=min(run.key_block, config.window) if ring and config.window else run.key_block,
            sinks=None if self.sinks is None else self.sinks[...].reshape(-1),
            reach=run.reach,
        )
        # Over a mesh by key heads first, as the cache is, or the cache would follow the split of the output map.
        out = held(out, _SPLIT[:4], (b, t, config.kv_heads, config.head_size))
        out = held(out, (None, None, "heads", None))
        if gates:
            out = out * jax.nn.sigmoid(both[:, :, :, group : group + gates].reshape(out.shape))
        fresh = None if not keys else Ring(k, v) if ring else KV(k, v)
        return self.o(out), fresh

    def _keys_and_values(
        self, both: Float[Array, "b t k p h"], run: Pass
    ) -> tuple[Float[Array, "b k t h"], Float[Array, "b k t h"]]:
        config = self.config
        k, v = both[:, :, :, 0], both[:, :, :, -1]
        k = k if self.k_norm is None else self.k_norm(k)
        v = v if config.value_norm is None else config.value_norm(v)
        k = k if config.rope is None else rotate(k, *run.rotation(config.rope, k.dtype))
        return k.swapaxes(1, 2), v.swapaxes(1, 2)
