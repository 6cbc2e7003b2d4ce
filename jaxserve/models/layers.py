"""The small parts every decoder is made of: linear maps, norms, gated activations.

Weights live in ``flax.nnx`` modules; each call is a pure function of them. Axis letters as everywhere in the house:
b slots, t query positions, d model, n heads, h head size, f ffn, v vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxserve.errors import CheckpointError
from jaxserve.sharding import axis_size

# Up to this many rows a product is bound by reading its weights.
FEW_ROWS = 32
# Numbers from which on XLA:CPU sums rows in one order: between 2,304 and 4,096 it changes it.
LARGE = 8192
# XLA:CPU of jax 0.10 converts whole bfloat16 weights to float32 unless the result is float32, five times slower.
WIDE_RESULTS = jax.__version_info__ < (0, 11)


def parameter(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: DTypeLike, fan_in: int | None = None) -> nnx.Param[Array]:
    """A weight drawn from N(0, 1/fan_in), or ones where no fan-in is given."""
    if fan_in is None:
        return nnx.Param(jnp.ones(shape, dtype))
    draw = jax.random.normal(rngs.params(), shape, jnp.float32) / math.sqrt(fan_in)
    return nnx.Param(draw.astype(dtype))


class Linear(nnx.Module):
    """A map from trailing axes ``inputs`` to trailing axes ``outputs``; kernel ``[*outputs, *inputs]``, as in files."""

    def __init__(
        self, inputs: tuple[int, ...], outputs: tuple[int, ...], *, bias: bool, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        self.inputs, self.outputs = inputs, outputs
        self.kernel = parameter(rngs, (*outputs, *inputs), dtype, math.prod(inputs))
        self.bias = nnx.Param(jnp.zeros(outputs, dtype)) if bias else None

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Applies the map."""
        rows = x.shape[: x.ndim - len(self.inputs)]
        size = math.prod(self.inputs)
        if axis_size("expert") * axis_size("tensor") > 1:
            y = _product_unmerged(x, self.kernel[...], len(self.inputs))
            return y if self.bias is None else y + self.bias[...]
        y = product(x.reshape(-1, size), self.kernel[...].reshape(-1, size), x.dtype)
        y = y.reshape(*rows, *self.outputs)
        return y if self.bias is None else y + self.bias[...]


def product(x: Float[Array, "m k"], weights: Float[Array, "n k"], dtype: DTypeLike) -> Float[Array, "m n"]:
    """``x @ weights.T``, accumulated in float32, in the form that each platform is fast at.

    A row's numbers are the same however many rows there are: in bfloat16 both forms sum in one order for any number
    of two and more, in float32 only ``x`` first does.
    """
    if x.shape[0] > FEW_ROWS or x.dtype == jnp.float32:
        return _product(x, weights, dtype)
    return jax.lax.platform_dependent(
        x, weights, cpu=lambda x, w: _product_weights_first(x, w, dtype), default=lambda x, w: _product(x, w, dtype)
    )


def _product(x: Float[Array, "m k"], weights: Float[Array, "n k"], dtype: DTypeLike) -> Float[Array, "m n"]:
    wide = jnp.float32 if WIDE_RESULTS else dtype
    return jax.lax.dot_general(x, weights, (((1,), (1,)), ((), ())), preferred_element_type=wide).astype(dtype)


def _product_unmerged(x: Float[Array, "..."], kernel: Float[Array, "..."], inputs: int) -> Float[Array, "..."]:
    """The same over a mesh: an axis that is split there may be merged with no axis before it, or all is gathered."""
    over = tuple(range(x.ndim - inputs, x.ndim)), tuple(range(kernel.ndim - inputs, kernel.ndim))
    wide = jnp.float32 if WIDE_RESULTS else x.dtype
    return jax.lax.dot_general(x, kernel, (over, ((), ())), preferred_element_type=wide).astype(x.dtype)


def _product_weights_first(
    x: Float[Array, "m k"], weights: Float[Array, "n k"], dtype: DTypeLike
) -> Float[Array, "m n"]:
    """XLA:CPU packs the right operand anew at each call and streams the left one.

    With few rows the weights are nearly all there is to read, so they go left, four times faster in bfloat16. The
    barrier keeps XLA from turning the product round again.
    """
    y = jax.lax.dot_general(weights, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return jax.lax.optimization_barrier(y).T.astype(dtype)


def row_sums(x: Float[Array, "... d"]) -> Float[Array, "... 1"]:
    """Sums over the last axis, added in the same order however many rows there are.

    XLA:CPU adds up small arrays in another order than large ones, so small ones get rows of zeros. Over a mesh they
    stay as they are: rows may be split.
    """
    d = x.shape[-1]
    missing = -(-LARGE // d) - x.size // d
    if missing <= 0 or axis_size("expert") * axis_size("tensor") > 1:
        return jnp.sum(x, axis=-1, keepdims=True)
    rows = jnp.pad(x.reshape(-1, d), ((0, missing), (0, 0)))
    return jnp.sum(rows, axis=-1)[: x.size // d].reshape(*x.shape[:-1], 1)


@dataclasses.dataclass(frozen=True)
class Norm:
    """A kind of root-mean-square norm (Zhang & Sennrich 2019): normalised in float32, cast, then scaled.

    Attributes:
        eps: added to the mean square.
        offset: added to the stored scale; 1 where files hold it zero-centred (Gemma 1 to 3, Qwen3.5).
        wide: scaled in float32, before the cast (all that have an offset, gpt-oss, Gemma 4).
    """

    eps: float
    offset: float = 0.0
    wide: bool = False

    def __call__(self, x: Float[Array, "... d"], scale: Float[Array, " d"] | None = None) -> Float[Array, "... d"]:
        """Normalises the last axis."""
        wide = x.astype(jnp.float32)
        normal = wide * jax.lax.rsqrt(row_sums(wide * wide) / wide.shape[-1] + self.eps)
        if scale is None:
            return normal.astype(x.dtype)
        if self.wide:
            return (normal * (scale.astype(jnp.float32) + self.offset)).astype(x.dtype)
        return normal.astype(x.dtype) * (scale + self.offset if self.offset else scale)


class RMSNorm(nnx.Module):
    """A norm over the last axis with its scale."""

    def __init__(self, size: int, norm: Norm, *, dtype: DTypeLike) -> None:
        self.norm = norm
        self.scale = nnx.Param(jnp.full((size,), 1 - norm.offset, dtype))

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        """Normalises the last axis."""
        return self.norm(x, self.scale[...])


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


def _clamped(gate: Float[Array, "..."], up: Float[Array, "..."]) -> Float[Array, "..."]:
    """gpt-oss's own: both inputs are bounded, up is shifted by one, and the gate's sigmoid is steeper (model card)."""
    gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
    return (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)


# Of gate and up (Shazeer 2020).
GLUS: dict[str, Callable[[Array, Array], Array]] = {
    "silu": lambda gate, up: jax.nn.silu(gate) * up,
    "gelu_tanh": lambda gate, up: jax.nn.gelu(gate, approximate=True) * up,
    "clamped": _clamped,
}
_HF_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def activation_from_hf(name: object) -> str:
    """The name here of an activation in ``config.json``.

    Raises:
        CheckpointError: another one.
    """
    if name not in _HF_ACTIVATIONS:
        raise CheckpointError(f"config.json: hidden_act {name!r} is not supported", param="hidden_act")
    return _HF_ACTIVATIONS[str(name)]
