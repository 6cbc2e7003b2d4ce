"""Gated DeltaNet: linear attention whose memory is one matrix a head, decayed and corrected by each token.

Yang et al. 2024, Gated Delta Networks (arXiv 2412.06464), as the Qwen3-Next model card describes its use: a causal
depthwise convolution over queries, keys and values, unit keys, an output gate.

A pass returns what its tokens add to the memory (``delta_rule.py``) and what the convolution read, and the cache
computes the memory after any count of them: padding and rejected drafts need no mask.

The memory is float32 whatever the model's dtype: in bfloat16 it loses what it knows, and nothing fails to show it.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from jaxserve.models.cache import as_stored, entries
from jaxserve.models.delta_rule import after, delta_rule, since_start
from jaxserve.models.layers import Linear, Norm, RMSNorm, parameter
from jaxserve.models.passes import Pass
from jaxserve.models.weights import Piece, Rule, rule
from jaxserve.plan import CacheShape
from jaxserve.pytree import pytree
from jaxserve.sharding import held


@dataclasses.dataclass(frozen=True)
class DeltaConfig:
    """Gated DeltaNet. Value heads ``i * group .. (i + 1) * group - 1`` read with key head ``i``.

    Attributes:
        kernel: tokens that the convolution sees, the newest included.
        norm: of each value head's output, before its gate.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    kernel: int
    norm: Norm

    @property
    def group(self) -> int:
        """Value heads that share a key head."""
        return self.value_heads // self.key_heads

    @property
    def channels(self) -> int:
        """Numbers of a key head's query, key and values, which the convolution goes over."""
        return 2 * self.key_size + self.group * self.value_size

    @property
    def widest(self) -> int:
        """Numbers of a token's widest activation."""
        return self.key_heads * (self.channels + self.group * self.value_size)

    def build(self, width: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> GatedDeltaNet:
        """The module."""
        return GatedDeltaNet(self, width, dtype=dtype, rngs=rngs)

    def empty(self, slots: int, positions: int, dtype: DTypeLike, key_block: int) -> Recurrent:  # noqa: ARG002
        """What it keeps, with nothing in it; as much for a long text as for a short one."""
        return Recurrent(
            jnp.zeros((slots, self.value_heads, self.key_size, self.value_size), jnp.float32),
            entries(slots, self.key_heads, self.kernel - 1, self.channels, dtype),
        )

    def cache_shape(self, key_block: int) -> CacheShape:  # noqa: ARG002
        """What it keeps, in numbers."""
        return CacheShape(
            fixed=self.key_heads * (self.kernel - 1) * self.channels,
            fixed_float32=self.value_heads * self.key_size * self.value_size,
            heads=self.key_heads,
            added=self.key_heads * (self.key_size + self.channels) + self.value_heads * (self.value_size + 1),
        )

    def rules(self, width: int, to: str, of: str) -> tuple[Rule, ...]:
        """Every weight: ``to`` and ``of`` are the paths of the layer here and in files, with their dots."""
        of, to, heads, group = f"{of}linear_attn.", f"{to}mixer.", self.key_heads, self.group
        gates = tuple(
            Piece(f"{of}in_proj_{name}.weight", (heads, 1, group, width), region=((0, heads), (at, at + 1)))
            for at, name in enumerate("ba")
        )
        values = (self.channels, self.channels + group * self.value_size)
        z = Piece(f"{of}in_proj_z.weight", (heads, group * self.value_size, width), region=((0, heads), values))
        return (
            Rule(
                f"{to}qkvz.kernel",
                (heads, values[1], width),
                ("kv_heads", None, "model"),
                ((*self._parts(f"{of}in_proj_qkv.weight", width), z),),
            ),
            Rule(f"{to}ba.kernel", (heads, 2, group, width), ("kv_heads", None, None, "model"), (gates,)),
            Rule(
                f"{to}conv",
                (heads, self.channels, self.kernel),
                ("kv_heads", None, None),
                (self._parts(f"{of}conv1d.weight", self.kernel),),
            ),
            rule(f"{to}rate", f"{of}A_log", (heads, group), ("kv_heads", None), dtype="float32"),
            rule(f"{to}time_bias", f"{of}dt_bias", (heads, group), ("kv_heads", None), dtype="float32"),
            rule(f"{to}norm.scale", f"{of}norm.weight", (self.value_size,), (None,)),
            rule(
                f"{to}o.kernel",
                f"{of}out_proj.weight",
                (width, heads, group * self.value_size),
                ("model", "kv_heads", None),
            ),
        )

    def _parts(self, source: str, last: int) -> tuple[Piece, ...]:
        """Rows of all queries, then of all keys, then of all values: each key head takes its own of them."""
        pieces, row, at = [], 0, 0
        for size in (self.key_size, self.key_size, self.group * self.value_size):
            count = self.key_heads * size
            region = ((0, self.key_heads), (at, at + size))
            pieces.append(Piece(source, (self.key_heads, size, last), region=region, rows=(row, row + count)))
            row, at = row + count, at + size
        return tuple(pieces)


@pytree
class Updates:
    """What a pass adds to a layer's memory.

    Attributes:
        keys: unit keys.
        values: what the memory lacked of each value.
        decay: logarithm of the factor on the memory before each token.
        inputs: of the convolution.
    """

    keys: Float[Array, "b k t h"]
    values: Float[Array, "b n t g"]
    decay: Float[Array, "b n t"]
    inputs: Float[Array, "b k t c"]


@pytree
class Recurrent:
    """A layer's memory, and the last inputs of its convolution."""

    state: Float[Array, "b n h g"]
    inputs: Shaped[Array, "b k s c"]

    def put(
        self,
        fresh: Updates,
        r: Int[Array, ""],
        row: Int[Array, ""] | int,
        start: Int[Array, " b"],
        count: Int[Array, " b"],
    ) -> Recurrent:
        """See ``LayerCache``. A row of which nothing is kept is not touched at all: it may be two megabytes."""
        one, starts, counts = jax.tree.map(
            lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, r, 1, axis=0), (fresh, start, count)
        )
        return jax.lax.fori_loop(
            0, jnp.minimum(counts[0], 1), lambda _, kept: kept.put_all(one, row + r, starts, counts), self
        )

    def put_all(
        self, fresh: Updates, row: Int[Array, ""] | int, start: Int[Array, " b"], count: Int[Array, " b"]
    ) -> Recurrent:
        """See ``LayerCache``."""
        b, _, t, _ = fresh.keys.shape
        kept = jnp.arange(t) < count[:, None]
        # Products with 0 would keep what is no number.
        keys = jnp.where(kept[:, None, :, None], fresh.keys, 0)
        values = jnp.where(kept[:, None, :, None], fresh.values, 0)
        decay = jnp.where(kept[:, None], fresh.decay, 0)

        def keep(old: Array, new: Array) -> Array:
            return jnp.where((count > 0)[:, None, None, None], new, old)

        state, inputs = (_rows(leaf, row, b) for leaf in (self.state, self.inputs))
        before = since_start(inputs, start)
        window = jnp.concatenate([before, as_stored(fresh.inputs, self.inputs)], axis=2)
        last = jax.vmap(lambda one, n: jax.lax.dynamic_slice_in_dim(one, n, inputs.shape[2], axis=1))(window, count)
        learnt = after(since_start(state, start), keys, values, decay)
        return Recurrent(
            jax.lax.dynamic_update_slice_in_dim(self.state, keep(state, learnt), row, axis=0),
            jax.lax.dynamic_update_slice_in_dim(self.inputs, keep(inputs, last), row, axis=0),
        )


class GatedDeltaNet(nnx.Module):
    """See ``DeltaConfig``. It looks back whatever the pass's mask says: what comes later is not in its memory."""

    def __init__(self, config: DeltaConfig, width: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        heads, group, values = config.key_heads, config.group, config.group * config.value_size
        self.config = config
        self.qkvz = Linear((width,), (heads, config.channels + values), bias=False, dtype=dtype, rngs=rngs)
        self.ba = Linear((width,), (heads, 2, group), bias=False, dtype=dtype, rngs=rngs)
        self.conv = parameter(rngs, (heads, config.channels, config.kernel), dtype, config.kernel)
        self.rate = nnx.Param(jnp.zeros((heads, group), jnp.float32))
        self.time_bias = nnx.Param(jnp.ones((heads, group), jnp.float32))
        self.norm = RMSNorm(config.value_size, config.norm, dtype=dtype)
        self.o = Linear((heads, values), (width,), bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "b t d"], run: Pass, layer: int) -> tuple[Float[Array, "b t d"], Updates]:
        """Mixes positions; returns the output and what the block adds to the memory."""
        config, (b, t) = self.config, x.shape[:2]
        cached: Recurrent | None = run.cached(layer)
        both = held(self.qkvz(x), (None, None, "kv_heads", None))
        inputs, z = both[..., : config.channels].swapaxes(1, 2), both[..., config.channels :]
        q, k, v = self._heads(inputs, self._before(inputs, cached, run))
        decay, beta = self._gates(x)
        state = None if cached is None else _rows(cached.state, run.row, b)
        out, values = delta_rule(q, k, v, decay, beta, state, run.start)
        out = self.norm(out.transpose(0, 3, 1, 2, 4))
        out = out * jax.nn.silu(z.astype(jnp.float32).reshape(out.shape))
        fresh = Updates(k, values.reshape(b, -1, *values.shape[3:]), decay.reshape(b, -1, t), inputs)
        return self.o(out.astype(x.dtype).reshape(b, t, config.key_heads, -1)), fresh

    def _before(self, inputs: Float[Array, "b k t c"], cached: Recurrent | None, run: Pass) -> Float[Array, "b k s c"]:
        """What the convolution read last."""
        b, heads, _, channels = inputs.shape
        if cached is None:
            return jnp.zeros((b, heads, self.config.kernel - 1, channels), inputs.dtype)
        return since_start(as_stored(_rows(cached.inputs, run.row, b), inputs), run.start)

    def _heads(
        self, inputs: Float[Array, "b k t c"], before: Float[Array, "b k s c"]
    ) -> tuple[Float[Array, "b k t h"], Float[Array, "b k t h"], Float[Array, "b k m t g"]]:
        """Queries, unit keys and values behind the convolution; a key head's ``m`` value heads lie side by side."""
        config, t = self.config, inputs.shape[2]
        window = jnp.concatenate([before, inputs], axis=2).astype(jnp.float32)
        taps = self.conv[...].astype(jnp.float32)
        mixed = functools.reduce(
            jnp.add, (window[:, :, at : at + t] * taps[:, None, :, at] for at in range(config.kernel))
        )
        q, k, v = jnp.split(jax.nn.silu(mixed), (config.key_size, 2 * config.key_size), axis=-1)
        v = v.reshape(*v.shape[:3], config.group, config.value_size).swapaxes(2, 3)
        return _unit(q) / math.sqrt(config.key_size), _unit(k), v

    def _gates(self, x: Float[Array, "b t d"]) -> tuple[Float[Array, "b k m t"], Float[Array, "b k m t"]]:
        """Logarithm of the decay, and how much of a value is written."""
        both = held(self.ba(x), (None, None, "kv_heads", None, None)).astype(jnp.float32).transpose(3, 0, 2, 4, 1)
        decay = -jnp.exp(self.rate[...])[..., None] * jax.nn.softplus(both[1] + self.time_bias[...][..., None])
        return decay, jax.nn.sigmoid(both[0])


def _rows(leaf: Shaped[Array, "slots ..."], row: Int[Array, ""] | int, b: int) -> Shaped[Array, "b ..."]:
    return jax.lax.dynamic_slice_in_dim(leaf, row, b, axis=0)


def _unit(x: Float[Array, "... h"]) -> Float[Array, "... h"]:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
