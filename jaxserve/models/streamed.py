"""One row times one of many stacked matrices, on the CPU, with no copy of the matrix.

XLA:CPU copies what it cuts out of an array before it multiplies with it, and with one row there is nothing to do but
read the matrix. Written as sums of slices the product is one loop over the matrix where it lies.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Columns that are summed side by side: whole vector registers, and few enough terms for the compiler.
LANES = (64, 32, 16)
MOST_TERMS = 128


def lanes(columns: int) -> int | None:
    """How many columns of a matrix are summed side by side; ``None`` of a matrix that it cannot be done with."""
    fitting = (count for count in LANES if columns % count == 0 and columns // count <= MOST_TERMS)
    # More lanes than terms would leave the work to the sum over lanes.
    return next((count for count in fitting if columns >= count * count or count == LANES[-1]), None)


def streamed(x: Float[Array, "1 k"], matrices: Float[Array, "e n k"], index: Int[Array, ""]) -> Float[Array, "1 n"]:
    """``x @ matrices[index].T``, in float32.

    Raises:
        ValueError: a number of columns that has no ``lanes``.
    """
    e, n, k = matrices.shape
    side = lanes(k)
    if side is None:
        raise ValueError(f"{k} columns cannot be summed side by side")
    row, cut = x.astype(jnp.float32).reshape(-1, side), matrices.reshape(e, n, -1, side)
    total = jnp.zeros((n, side), jnp.float32)
    for term in range(k // side):
        columns = jax.lax.dynamic_slice(cut, (index, 0, term, 0), (1, n, 1, side)).reshape(n, side)
        total = total + _wide(columns) * row[term]
    # Else the compiler would sum over lanes first, one number at a time.
    total = jax.lax.optimization_barrier(total)
    y = total[:, 0]
    for lane in range(1, side):
        y = y + total[:, lane]
    return y[None]


def _wide(numbers: Float[Array, "n k"]) -> Float[Array, "n k"]:
    """In float32. The bits of bfloat16 are its upper half; XLA:CPU's own conversion takes three times as long."""
    if numbers.dtype != jnp.bfloat16:
        return numbers.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(numbers, jnp.uint16).astype(jnp.uint32) << 16
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
