"""Rows whose tokens stand at different places: put behind each other, and brought to the left.

Knows arrays and positions. Knows no model and no strategy.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int


def appended(
    tokens: Int[Array, "b s"], new: Int[Array, "b w"], at: Int[Array, " b"], count: Int[Array, " b"]
) -> Int[Array, "b s"]:
    """Puts the first ``count`` of ``new`` at positions ``at ..``; rows are short, a select will do."""
    offset = jnp.arange(tokens.shape[1]) - at[:, None]
    picked = jnp.take_along_axis(new, jnp.clip(offset, 0, new.shape[1] - 1), axis=1)
    return jnp.where((offset >= 0) & (offset < count[:, None]), picked, tokens)


def moved(leaf: Array, by: Int[Array, " b"], filler: int) -> Array:
    """Each row's positions moved to the left; fillers come in at the end."""
    source = jnp.arange(leaf.shape[1]) + by[:, None]
    trailing = (...,) + (None,) * (leaf.ndim - 2)
    picked = jnp.take_along_axis(leaf, jnp.minimum(source, leaf.shape[1] - 1)[trailing], axis=1)
    return jnp.where((source < leaf.shape[1])[trailing], picked, jnp.asarray(filler, leaf.dtype))
