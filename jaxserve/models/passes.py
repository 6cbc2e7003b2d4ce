"""What all layers of one forward pass have in common: positions, what sees what, and the cached rows.

Lives while a program is traced and no longer.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxserve.models.cache import Cache, heads_of, in_place
from jaxserve.models.rope import Rope
from jaxserve.pytree import pytree


@dataclasses.dataclass(frozen=True)
class Routing:
    """How tokens meet their experts, which the plan decides.

    Attributes:
        product: what multiplies on GPU and TPU, see ``kernels.grouped``.
        exchange_tokens: over a mesh, tokens of a pass from which on each goes to the devices of its experts only; fewer
            go to all devices, as all do where this is ``None``. The results are the same but for the order of sums.
        native: on a CPU, products of ``kernels.native`` may be used where they are there.
    """

    product: str = "auto"
    exchange_tokens: int | None = None
    native: bool = True


UNPLANNED = Routing()


@pytree
class Canvas:
    """Rows whose tokens are no text yet but a canvas that a model refines (DiffusionGemma); the others read text.

    Attributes:
        refined: which rows. What they see of the block is the mask's affair, as everywhere; of the prefix each of
            their positions sees what the first one does.
        soft: what the pass before made of each position, as an embedding; zeros in a canvas's first pass.
    """

    refined: Bool[Array, " b"]
    soft: Float[Array, "b t d"]


class Pass:
    """One pass over ``b`` rows of ``t`` tokens.

    Attributes:
        start: positions that stand before each row.
        mask: what each position of the block sees of the block.
        row: cache row of the first token row.
        span: the longest start that matters.
        real: tokens whose output matters; ``None`` is all.
        positions: of each token.
        length: positions that a row may have, cached and new.
        key_block: cached positions that attention reads at a time.
        side: what the model computes once and every layer may use.
        routing: how tokens meet their experts.
        canvas: rows that refine one; ``None`` where all read text.
    """

    def __init__(
        self,
        start: Int[Array, " b"],
        mask: Bool[Array, "b t t"],
        cache: Cache | None,
        row: Int[Array, ""] | int,
        span: Int[Array, ""] | None,
        real: Bool[Array, "b t"] | None,
        key_block: int,
        positions: Int[Array, "b t"] | None = None,
    ) -> None:
        self.start, self.mask, self.row, self.real = start, mask, row, real
        self.span = jnp.max(start) if span is None else span
        self.positions = start[:, None] + jnp.arange(mask.shape[1]) if positions is None else positions
        self.length = mask.shape[1] if cache is None else cache.length
        self.key_block = min(key_block, self.length)
        self.side: Any = None
        self.routing = UNPLANNED
        self.canvas: Canvas | None = None
        self._cache = cache
        self._rotations: dict[tuple[Rope, Any], tuple[Array, Array]] = {}
        self._kept: dict[int, tuple[Array, Array]] = {}

    @property
    def reach(self) -> Int[Array, "b t"] | None:
        """Of each token the place in the block from which its window counts back; ``None`` is its own."""
        if self.canvas is None:
            return None
        return jnp.where(self.canvas.refined[:, None], 0, jnp.arange(self.mask.shape[1]))

    def rotation(self, rope: Rope, dtype: DTypeLike) -> tuple[Float[Array, "b t r"], Float[Array, "b t r"]]:
        """Cosine and sine for all tokens."""
        key = (rope, jnp.dtype(dtype))
        if key not in self._rotations:
            self._rotations[key] = rope.table(self.positions, self.length, jnp.dtype(dtype))
        return self._rotations[key]

    def cached(self, layer: int) -> Any:
        """What a layer has kept of earlier passes; ``None`` in the whole-sequence pass."""
        if self._cache is None:
            return None
        kept = self._cache.layers[layer]
        return in_place(kept, *heads_of((kept,)))

    def keep(self, layer: int, keys_and_values: tuple[Array, Array]) -> None:
        """Remembers a layer's new keys and values, for itself and for later layers that share them."""
        self._kept[layer] = keys_and_values

    def entries(self, layer: int) -> tuple[Array, Array, Any]:
        """New keys and values of this or an earlier layer, and what it has kept."""
        return (*self._kept[layer], self.cached(layer))
