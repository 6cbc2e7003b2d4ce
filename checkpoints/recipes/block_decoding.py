"""Decoding by whole-sequence passes, to see during training what a model can do.

Knows LLaDA2.1's joint threshold (arXiv 2602.08676): masks are filled above one probability, at least one a pass, and
decided tokens overwritten above another. It shares nothing with the served strategy, so each checks the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from benchmarks.records import Record, corrupted
from checkpoints.recipes.blocks import merged, seen
from checkpoints.recipes.characters import END, MASK, decode, encode, prompt
from jaxserve.models.decoder import Decoder

# Of tokens ``[b, t]`` and a block's first position: the best token of each of its positions, and its probability.
Guess = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]

POST_STEPS = 16


@dataclasses.dataclass(frozen=True)
class Way:
    """How blocks are decided: thresholds from 1 on are never reached."""

    name: str
    fill: float
    edit: float = 1.0


ONE_BY_ONE = Way("one token a pass", fill=1.0)
PARALLEL = Way("above 0.9, edits above 0.9", fill=0.9, edit=0.9)
WAYS = (
    ONE_BY_ONE,
    Way("above 0.95, no edits", fill=0.95),
    Way("above 0.9, no edits", fill=0.9),
    PARALLEL,
    Way("above 0.7, edits above 0.5", fill=0.7, edit=0.5),
    Way("above 0.5, edits above 0", fill=0.5, edit=0.0),
)


@dataclasses.dataclass
class Found:
    """What came of some records: texts and the passes and edits that each took."""

    texts: list[str]
    tokens: np.ndarray
    passes: np.ndarray
    edits: np.ndarray


def guesser(graphdef: nnx.GraphDef[Decoder], leaves: dict[str, Array], block: int) -> Guess:
    """What a model would write. What stands behind a block is seen by nobody in it, so one program does for all."""

    @jax.jit
    def passed(
        leaves: dict[str, Array], tokens: Int[Array, "b t"], first: Int[Array, ""]
    ) -> tuple[Int[Array, "b w"], Float[Array, "b w"]]:
        b, t = tokens.shape
        model = merged(graphdef, leaves)
        mask = jnp.broadcast_to(jnp.asarray(seen(t, block)), (b, t, t))
        hidden, _ = model(tokens, jnp.zeros(b, jnp.int32), mask)
        own = jax.lax.dynamic_slice_in_dim(hidden, first, block, axis=1)
        logits = model.logits(own).at[..., MASK].set(-jnp.inf)
        return jnp.argmax(logits, axis=-1), jnp.max(jax.nn.softmax(logits, axis=-1), axis=-1)

    def guess(tokens: np.ndarray, first: int) -> tuple[np.ndarray, np.ndarray]:
        best, share = passed(leaves, jnp.asarray(tokens), jnp.int32(first))
        return np.asarray(best), np.asarray(share)

    return guess


def answer(
    guess: Guess, records: Sequence[Record], positions: int, block: int, way: Way, drafts: Sequence[str] | None = None
) -> Found:
    """Answers records, all at once, block by block; ``drafts`` stand there already and are edited only."""
    tokens = np.full((len(records), positions), MASK, np.int32)
    given = np.zeros(tokens.shape, bool)
    for row, record in enumerate(records):
        asked = prompt(record.question)
        given[row, : len(asked)] = True
        drafted = [] if drafts is None else encode(drafts[row])
        drafted = drafted and drafted + [END] * (positions - len(asked) - len(drafted))
        tokens[row, : len(asked) + len(drafted)] = asked + drafted
    passes, edits = np.zeros((2, len(records)), int)
    ended = np.zeros(len(records), bool)
    for first in range(0, positions, block):
        canvas, fixed = tokens[:, first : first + block], given[:, first : first + block]
        busy, post = ~(ended | fixed.all(axis=1)), np.zeros(len(records), int)
        while busy.any():
            best, share = guess(tokens, first)
            masked = (canvas == MASK) & ~fixed & ~_behind_end(canvas, fixed)
            post += ~masked.any(axis=1)
            surest = np.argmax(np.where(masked, share, -1.0), axis=1)
            fill = masked & ((share > way.fill) | (np.arange(block) == surest[:, None]))
            edit = ~masked & ~fixed & (best != canvas) & (share > way.edit) & (post <= POST_STEPS)[:, None]
            changed = (fill | edit) & busy[:, None]
            passes, edits = passes + busy, edits + (edit & busy[:, None]).sum(axis=1)
            canvas[changed] = best[changed]
            busy &= changed.any(axis=1)
        ended |= ((canvas == END) & ~fixed).any(axis=1)
        if ended.all():
            break
    texts = [decode(row[mine.sum() :].tolist()) for row, mine in zip(tokens, given, strict=True)]
    return Found(texts, tokens, passes, edits)


def _behind_end(canvas: np.ndarray, fixed: np.ndarray) -> np.ndarray:
    """Positions behind an end token that nothing undecided stands before: nobody waits for them."""
    ends = np.logical_and.accumulate(canvas != MASK, axis=1) & (canvas == END) & ~fixed
    return np.cumsum(ends, axis=1) > ends


def exact(guess: Guess, records: Sequence[Record], positions: int, block: int, way: Way) -> dict[str, float]:
    """How many of the records are right to the letter, in how many passes."""
    found = answer(guess, records, positions, block, way)
    right = sum(text == record.answer for text, record in zip(found.texts, records, strict=True))
    count = sum(len(record.answer) + 1 for record in records)
    return {
        "exact": right / len(records),
        "tokens_per_pass": round(count / int(found.passes.sum()), 2),
        "edits": int(found.edits.sum()),
    }


def repaired(guess: Guess, records: Sequence[Record], positions: int, block: int, count: int) -> dict[str, int]:
    """What becomes of right answers of which ``count`` characters were replaced."""
    drafts = [corrupted(record.answer, count, seed=0)[0] for record in records]
    found = answer(guess, records, positions, block, PARALLEL, drafts)
    sums = {"corrupted": 0, "repaired": 0, "broken": 0}
    for record, draft, row in zip(records, drafts, found.tokens, strict=True):
        right, first = encode(record.answer), len(prompt(record.question))
        for was, is_now, should in zip(encode(draft), row[first:].tolist(), right, strict=False):
            sums["corrupted"] += was != should
            sums["repaired"] += was != should == is_now
            sums["broken"] += was == should != is_now
    return sums
