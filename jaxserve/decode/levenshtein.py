"""Editing a block by inserting and deleting tokens: LLaDA2.2's rule, with static shapes.

The vocabulary has two tokens that are instructions. DELETE, predicted for a position, removes it; INSERT puts a mask
before it. What follows moves, the end is filled up with masks or cut off. Knows nothing of models; which candidates
there are is the sampler's affair.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxserve.decode.unmasking import BlockRows, filled, overwritten
from jaxserve.models.decoding import DYNAMIC
from jaxserve.pytree import pytree

POST_STEPS = 16  # passes at most that edit when none of the first masks is left, whatever a row asks for

Resample = Callable[[Int[Array, " b"], Int[Array, "b n"]], Int[Array, " b"]]


def most_passes(block: int) -> int:
    """Passes that can change a block: one for each first mask, those behind them, and the last, which cleans up."""
    return block + POST_STEPS + 1


@dataclasses.dataclass(frozen=True)
class Instructions:
    """The three tokens that are no text."""

    mask: int
    delete: int
    insert: int

    def among(self, tokens: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Where they stand."""
        return (tokens == self.mask) | (tokens == self.delete) | (tokens == self.insert)


@pytree
class History:
    """What a row remembers of its block.

    Attributes:
        original: positions that hold, or held, one of the block's first masks; the mark moves with the token.
        seen: the block before each pass so far; what is still to come is -1. States and not hashes of them: there are
            few, and no two can be taken for each other.
        tried: the tokens that each pass wrote, by position; -1 where it wrote none.
    """

    original: Bool[Array, "b w"]
    seen: Int[Array, "b n w"]
    tried: Int[Array, "b n w"]


@pytree
class Edited:
    """A block behind a pass.

    Attributes:
        first: what each token was when it was first decided.
        history: ``None`` where nothing is remembered.
        final: nothing more will change.
        changed: this pass changed something, so it has not read what stands here now.
        post_steps: passes so far that began without a first mask.
        edited, inserted, deleted: events of this pass.
    """

    canvas: Int[Array, "b w"]
    first: Int[Array, "b w"]
    history: History | None
    final: Bool[Array, " b"]
    changed: Bool[Array, " b"]
    post_steps: Int[Array, " b"]
    edited: Int[Array, " b"]
    inserted: Int[Array, " b"]
    deleted: Int[Array, " b"]


def blank(slots: int, block: int) -> History:
    """Of blocks that are all mask."""
    shape = (slots, most_passes(block), block)
    return History(jnp.ones((slots, block), bool), jnp.full(shape, -1, jnp.int32), jnp.full(shape, -1, jnp.int32))


def left(history: History, canvas: Int[Array, "b w"], fixed: Bool[Array, "b w"], mask: int) -> Bool[Array, "b w"]:
    """First masks that are still masks."""
    return history.original & ~fixed & (canvas == mask)


def cleans_up(
    rows: BlockRows, first_masks: Bool[Array, "b w"], step: Int[Array, " b"], post_steps: Int[Array, " b"]
) -> Bool[Array, " b"]:
    """Rows whose pass is the last that changes anything: it may predict none of the three tokens."""
    budget = jnp.minimum(rows.max_post_steps, POST_STEPS)
    behind = post_steps + ~jnp.any(first_masks, axis=1)
    return (behind > budget) | (step >= most_passes(first_masks.shape[1]) - 1)


def edit(
    rows: BlockRows,
    ids: Instructions,
    history: History,
    canvas: Int[Array, "b w"],
    first: Int[Array, "b w"],
    fixed: Bool[Array, "b w"],
    token: Int[Array, "b w"],
    confidence: Float[Array, "b w"],
    step: Int[Array, " b"],
    post_steps: Int[Array, " b"],
    resample: Resample,
) -> Edited:
    """One pass's update.

    While some of the first masks are left, one mask more than edits have introduced is filled at least, by the dynamic
    rule, so that one of the first is among them; then all masks at once. Decided tokens are edited meanwhile. A block
    that has been seen before would run in a circle: of the positions that change, the least sure one takes a token that
    was not tried there.

    Args:
        fixed: given tokens at the head of the block; they never move.
        token: candidates; none is the mask where a first mask is left, nor one of the three in a row that cleans up.
        confidence: probability of each.
        step: passes over this block before.
        resample: of a position in each row, the candidate without some tokens (-1 is padding).
    """
    masked = (canvas == ids.mask) & ~fixed
    first_masks = left(history, canvas, fixed, ids.mask)
    cleaning = cleans_up(rows, first_masks, step, post_steps)
    behind = ~jnp.any(first_masks, axis=1)
    count = (1 + jnp.sum(masked & ~first_masks, axis=1)).astype(jnp.int32)
    dynamic = dataclasses.replace(rows, rule=jnp.full_like(rows.rule, DYNAMIC))
    chosen = filled(dynamic, masked, confidence, jnp.zeros_like(confidence), count)
    chosen = jnp.where((behind | cleaning)[:, None], masked, chosen)
    chosen = chosen | overwritten(rows, canvas, ~masked & ~fixed, token, confidence)
    token = _without_circles(history, canvas, chosen, token, confidence, ~cleaning, resample)
    written = jnp.where(chosen, token, canvas)
    now = jnp.arange(history.seen.shape[1]) == step[:, None]
    seen = jnp.where(now[..., None], canvas[:, None], history.seen)
    tried = jnp.where(now[..., None], jnp.where(chosen, token, -1)[:, None], history.tried)
    drafts = jnp.where(masked & chosen & ~ids.among(token), token, first)
    after, first, original = _spliced(ids, written, canvas, drafts, history.original & ~fixed)
    changed = jnp.any(after != canvas, axis=1)
    over = chosen & ~masked
    return Edited(
        canvas=after,
        first=first,
        history=History(original, seen, tried),
        final=cleaning | ~jnp.any(chosen, axis=1),
        changed=changed,
        post_steps=(post_steps + behind).astype(jnp.int32),
        edited=_count(over & (token != canvas) & (token != ids.delete) & (token != ids.insert)),
        inserted=_count(chosen & (token == ids.insert)),
        deleted=_count(over & (token == ids.delete)),
    )


def _without_circles(
    history: History,
    canvas: Int[Array, "b w"],
    chosen: Bool[Array, "b w"],
    token: Int[Array, "b w"],
    confidence: Float[Array, "b w"],
    may: Bool[Array, " b"],
    resample: Resample,
) -> Int[Array, "b w"]:
    """Candidates, one of them replaced in rows whose block stood like this before."""
    changing = chosen & (token != canvas)
    again = jnp.any(jnp.all(history.seen == canvas[:, None], axis=-1), axis=-1)
    again = again & may & jnp.any(changing, axis=1)

    def replaced() -> Int[Array, "b w"]:
        at = jnp.argmin(jnp.where(changing, confidence, jnp.inf), axis=1).astype(jnp.int32)
        other = resample(at, jnp.take_along_axis(history.tried, at[:, None, None], axis=2)[..., 0])
        here = again[:, None] & (jnp.arange(canvas.shape[1]) == at[:, None])
        return jnp.where(here, other[:, None], token)

    return jax.lax.cond(jnp.any(again), replaced, lambda: token)


def _spliced(
    ids: Instructions,
    written: Int[Array, "b w"],
    before: Int[Array, "b w"],
    first: Int[Array, "b w"],
    original: Bool[Array, "b w"],
) -> tuple[Int[Array, "b w"], Int[Array, "b w"], Bool[Array, "b w"]]:
    """Carries the instructions out: each position becomes none, one or two, and a gather finds whose each is."""
    inserts = written == ids.insert
    size = jnp.where(written == ids.delete, 0, jnp.where(inserts, 2, 1))
    ends = jnp.cumsum(size, axis=1)
    places = jnp.arange(written.shape[1])
    source = jnp.sum(ends[:, None, :] <= places[:, None], axis=-1)
    there = source < written.shape[1]
    source = jnp.minimum(source, written.shape[1] - 1)

    def at_source(rows: Array) -> Array:
        return jnp.take_along_axis(rows, source, axis=1)

    kept = there & ~(at_source(inserts) & (places == at_source(ends) - 2))
    tokens = jnp.where(inserts, before, written)
    return (
        jnp.where(kept, at_source(tokens), ids.mask).astype(jnp.int32),
        jnp.where(kept, at_source(first), -1).astype(jnp.int32),
        kept & at_source(original),
    )


def _count(events: Bool[Array, "b w"]) -> Int[Array, " b"]:
    return jnp.sum(events, axis=1).astype(jnp.int32)
