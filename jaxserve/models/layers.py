"""The small parts every decoder is made of: linear maps, norms, the gated feed-forward block.

Weights live in ``flax.nnx`` modules; each call is a pure function of them. Axis letters as everywhere in the house:
b slots, t query positions, d model, n heads, h head size, f ffn, v vocabulary.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def parameter(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: DTypeLike, fan_in: int | None = None) -> nnx.Param[Array]:
    """A weight drawn from N(0, 1/fan_in), or ones where no fan-in is given."""
    if fan_in is None:
        return nnx.Param(jnp.ones(shape, dtype))
    draw = jax.random.normal(rngs.params(), shape, jnp.float32) / math.sqrt(fan_in)
    return nnx.Param(draw.astype(dtype))


class Linear(nnx.Module):
    """Contracts the trailing axes ``inputs`` of its argument with a kernel ``[*inputs, *outputs]``."""

    def __init__(
        self, inputs: tuple[int, ...], outputs: tuple[int, ...], *, bias: bool, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        self.contracted = len(inputs)
        self.kernel = parameter(rngs, (*inputs, *outputs), dtype, math.prod(inputs))
        self.bias = nnx.Param(jnp.zeros(outputs, dtype)) if bias else None

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Applies the map."""
        y = jnp.tensordot(x, self.kernel[...], self.contracted)
        return y if self.bias is None else y + self.bias[...]


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis: normalised in float32, cast, then scaled (Zhang & Sennrich 2019)."""

    def __init__(self, size: int, *, eps: float, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.eps = eps
        self.scale = parameter(rngs, (size,), dtype)

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        """Normalises the last axis."""
        wide = x.astype(jnp.float32)
        normal = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return normal.astype(x.dtype) * self.scale[...]


class GatedMLP(nnx.Module):
    """``down(silu(gate(x)) * up(x))`` (Shazeer 2020, SwiGLU)."""

    def __init__(self, width: int, ffn: int, *, bias: bool, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.gate = Linear((width,), (ffn,), bias=bias, dtype=dtype, rngs=rngs)
        self.up = Linear((width,), (ffn,), bias=bias, dtype=dtype, rngs=rngs)
        self.down = Linear((ffn,), (width,), bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """Applies the block, without the residual."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))
