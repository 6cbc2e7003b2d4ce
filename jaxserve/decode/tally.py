"""What passes did to each row, counted on the device: one column a kind, so that a dispatch reads one small array.

Knows the columns' names and nothing else. The host's side is ``engine.request.Account``.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int

# Column by column. ``drafted = accepted + rejected`` at the end of each request: tokens that were proposed for a place,
# and whether they are what stands there. Passes and wasted tokens are counted by the step, the others by strategies.
COLUMNS = (
    "passes",
    "drafted",
    "accepted",
    "rejected",
    "predicted_accepted",  # of the caller's own draft
    "predicted_rejected",
    "edited",
    "inserted",
    "deleted",
    "wasted",  # decided, but behind the end
    "blocks",
    "post_steps",  # passes over a block without a mask
)


def tally(rows: int, **columns: Int[Array, " b"]) -> Int[Array, "b c"]:
    """Counts by name; what is not named is 0."""
    assert set(columns) <= set(COLUMNS), columns
    zeros = jnp.zeros(rows, jnp.int32)
    return jnp.stack([columns.get(name, zeros).astype(jnp.int32) for name in COLUMNS], axis=-1)
