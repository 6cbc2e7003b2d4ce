"""What is remembered of each slot's block, and what is asked of a block whatever its rule.

Knows positions of a block and of a text. Knows no model and no rule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxserve.decode.levenshtein import History
from jaxserve.decode.places import appended
from jaxserve.decode.sampling import SamplingRows
from jaxserve.decode.step import Verdict
from jaxserve.decode.unmasking import BlockRows
from jaxserve.pytree import pytree

T = TypeVar("T")


@pytree
class BlockMemory:
    """What is known of each slot's present block.

    Attributes:
        canvas: its tokens; masks where nothing is decided. Given positions are read from ``DecodeState.tokens``.
        first: what each token was when it was first decided; -1 where it has not been.
        step: passes over this block so far.
        post_steps: of these, passes that found no mask (by Levenshtein's rule, none of the first masks).
        rows: how each slot decides.
        draft: the caller's guess at the output; -1 where there is none.
        history: for Levenshtein's rule, where the model knows it.
    """

    canvas: Int[Array, "b w"]
    first: Int[Array, "b w"]
    step: Int[Array, " b"]
    post_steps: Int[Array, " b"]
    rows: BlockRows
    draft: Int[Array, "b s"]
    history: History | None


def ends(
    canvas: Int[Array, "b w"],
    mask_id: int,
    fixed: Bool[Array, "b w"],
    length: Int[Array, " b"],
    rows: SamplingRows,
    settling: Int[Array, "b w"],
) -> Bool[Array, " b"]:
    """Rows whose text ends in this block, with everything up to there decided, and as it was where that matters."""
    w = canvas.shape[1]
    places = jnp.arange(w)
    decided = fixed | ((canvas != mask_id) & ((settling < 0) | (settling == canvas)))
    stops = jnp.any(canvas[..., None] == rows.stop_ids[:, None, :], axis=-1) & ~fixed
    stop = jnp.min(jnp.where(stops, places, w), axis=1)
    end = jnp.minimum(stop, rows.limit - 1 - length)
    return (end < w) & jnp.all(decided | (places > end[:, None]), axis=1)


def with_block(tokens: Int[Array, "b s"], canvas: Int[Array, "b w"], at: Int[Array, " b"]) -> Int[Array, "b s"]:
    """Texts with the present block in its place."""
    return appended(tokens, canvas, at, jnp.full_like(at, canvas.shape[1]))


def draft_at(draft: Int[Array, "b s"], places: Int[Array, "b w"], rows: SamplingRows) -> Int[Array, "b w"]:
    """The caller's draft of the output at some places of the text; -1 where there is none."""
    at = places - rows.prompt_length[:, None]
    picked = jnp.take_along_axis(draft, jnp.clip(at, 0, draft.shape[1] - 1), axis=1)
    return jnp.where((at >= 0) & (at < draft.shape[1]), picked, -1)


def default_rows(kind: Callable[..., T], slots: int, default: Mapping[str, int | float]) -> T:
    """Settings of slots whose requests say nothing: whole numbers as such, by the fields of ``kind``."""
    return kind(
        **{
            name: jnp.full(slots, value, jnp.int32 if isinstance(value, int) else jnp.float32)
            for name, value in default.items()
        }
    )


def with_settings(
    rows: T, slot: Int[Array, ""], told: Mapping[str, Float[Array, ""]], default: Mapping[str, int | float]
) -> T:
    """Settings with those of one slot's request; NaN stands for what it does not say."""
    said = {}
    for name, value in told.items():
        row = getattr(rows, name)
        said[name] = row.at[slot].set(jnp.where(jnp.isnan(value), default[name], value).astype(row.dtype))
    changed: T = dataclasses.replace(rows, **said)  # type: ignore[type-var]
    return changed


def joined(one: Verdict, two: Verdict | None, shown: Int[Array, " b"], filler: int) -> Verdict:
    """The verdicts on two blocks of a row, one behind the other, as one.

    Args:
        two: nothing but fillers where a row has none; ``None`` where no row has one.
        shown: positions of the first block that are not given: the second one's tokens come behind them.
    """
    w = one.tokens.shape[1]
    places = jnp.arange(2 * w)
    source = jnp.where(places < shown[:, None], places, w + places - shown[:, None])

    def side_by_side(first: Array, second: Array | None, filler: int) -> Array:
        blank = jnp.full_like(first, filler)
        both = jnp.concatenate([first, blank if second is None else second, blank], axis=1)
        return jnp.take_along_axis(both, source[(..., *(None,) * (first.ndim - 2))], axis=1)

    tokens = side_by_side(one.tokens, None if two is None else two.tokens, filler)
    if two is None:
        scores = jax.tree.map(lambda a: side_by_side(a, None, 0), one.scores)
        return dataclasses.replace(one, tokens=tokens, scores=scores)
    return Verdict(
        tokens=tokens,
        count=one.count + two.count,
        advance=one.advance + two.advance,
        scores=jax.tree.map(lambda a, b: side_by_side(a, b, 0), one.scores, two.scores),
        memory=two.memory,
        tally=one.tally + two.tally,
    )


def by_rows(rows: Bool[Array, " b"], chosen: T, other: T) -> T:
    """Leaf by leaf, row by row."""
    picked: T = jax.tree.map(lambda a, b: jnp.where(rows.reshape(-1, *(1,) * (a.ndim - 1)), a, b), chosen, other)
    return picked
