"""A tiny model through every pass that serving has: the whole sequence, prompts in chunks, single steps over the cache.

The passes are the server's own (``decode.step`` with the strategy that it runs); what is added remembers the scores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.decode import jitted
from jaxserve.decode.autoregressive import Autoregressive
from jaxserve.decode.sampling import TokenScores
from jaxserve.decode.step import DecodeState, Proposal, Verdict, empty_state, step
from jaxserve.decode.tally import tally
from jaxserve.models.family import Family
from tests.decode.rows import sampling_rows

POSITIONS = 128
# Of each slot, the chunks that its prompt is read in: (bucket, tokens), the rest of a bucket is padding. What is left
# of the prompt is read by single steps; in the last slot, all of it.
Chunking = Sequence[tuple[int, int]]
#
# Rings are written in one way by short chunks and in another by long ones. A size is a program to compile, so a model
# gets one of them.
SHORT: tuple[Chunking, ...] = (
    ((8, 8),) * 8,
    ((8, 5), (8, 8), (8, 1), (8, 7), (8, 8), (8, 3), (8, 6)),
    ((8, 1), (8, 2), (8, 8), (8, 8)),
    (),
)
MEDIUM: tuple[Chunking, ...] = (
    ((16, 16),) * 5,
    ((16, 1), (16, 11), (16, 16), (16, 7), (16, 13), (16, 2)),
    ((16, 5), (16, 16), (16, 8)),
    (),
)
LONG: tuple[Chunking, ...] = (
    ((32, 32), (32, 32), (32, 20)),
    ((32, 5), (32, 17), (32, 1), (32, 29), (32, 11)),
    ((32, 31), (32, 14)),
    (),
)
SIZES = (SHORT, MEDIUM, LONG)


@dataclasses.dataclass(frozen=True)
class Remembering(Autoregressive):
    """The autoregressive strategy; its memory is the scores of the last step."""

    vocab_size: int = 0

    def memory(self, slots: int, positions: int) -> Any:
        """No scores yet."""
        return jnp.zeros((slots, self.vocab_size))

    def accept(self, logits: Any, proposal: Proposal, state: DecodeState, rows: Any) -> Verdict:
        """The likeliest token, by no sampler: that would take most of the time to compile."""
        one = jnp.ones_like(state.length)
        count = jnp.where(state.known - state.length > 1, 0, one)
        token = jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32)
        nothing = jnp.zeros((len(one), 1, 0))
        none = TokenScores(jnp.zeros((len(one), 1)), nothing.astype(jnp.int32), nothing)
        return Verdict(token[:, None], count, one, none, logits[:, 0], tally(len(one)))


def as_it_is(state: DecodeState) -> DecodeState:
    """No fault."""
    return state


def whole(family: Family, params: Any, tokens: np.ndarray) -> np.ndarray:
    """Logits ``[t, v]`` of the pass without a cache."""
    tokens = jnp.asarray(tokens, jnp.int32)[None]
    return np.asarray(jitted.logits(family.graphdef(jnp.float32), params, tokens))[0]


@partial(jax.jit, static_argnames=("graphdef", "strategy", "steps", "spoil"), donate_argnames=("state",))
def _stepped(graphdef: Any, params: Any, state: Any, rows: Any, *, strategy: Any, steps: int, spoil: Any) -> Any:
    model = nnx.merge(graphdef, params)

    def one(state: DecodeState, _: None) -> tuple[DecodeState, Any]:
        after, _ = step(model, spoil(state), rows, strategy)
        return after, after.memory

    return jax.lax.scan(one, state, length=steps)


def cached(
    family: Family,
    params: Any,
    prompt: np.ndarray,
    new: int,
    chunkings: Sequence[Chunking] = LONG,
    *,
    padded: Callable[[int, int], int] = lambda _, count: count,
    spoil: Callable[[DecodeState], DecodeState] = as_it_is,
) -> tuple[list[np.ndarray], np.ndarray]:
    """Reads a prompt in every slot, each in its own chunks, then goes on by steps that take the likeliest token.

    Every slot has held another text before.

    Args:
        family: with weights in float32.
        params: its parameters.
        prompt: the ids.
        new: tokens behind the prompt.
        chunkings: of each slot.
        padded: a fault: of a chunk's bucket and count, how many of its entries are kept.
        spoil: a fault: what happens to the state before each pass; the same object for the same fault.

    Returns:
        For each slot the logits ``[t, v]`` of the positions that steps read, and all slots' tokens behind the prompt.
    """
    graphdef, slots, length = family.graphdef(jnp.float32), len(chunkings), len(prompt)
    strategy = Remembering(1, vocab_size=family.shape.vocab_size)
    state = empty_state(family.empty_cache(slots, POSITIONS, jnp.float32), strategy)

    def read(state: DecodeState, slot: int, tokens: np.ndarray, start: int, bucket: int, count: int) -> DecodeState:
        chunk = np.zeros(bucket, np.int32)
        chunk[:count] = tokens[start : start + count]
        at = (jnp.int32(slot), jnp.asarray(chunk), jnp.int32(start), jnp.int32(padded(bucket, count)))
        return jitted.prefill(graphdef, params, spoil(state), *at)

    bucket = chunkings[0][0][0]
    for slot in range(slots):
        state = read(state, slot, prompt[::-1], 0, bucket, bucket - 1)
    starts = [0] * slots
    for turn in range(max(map(len, chunkings))):  # in turns, so that a slot stands still while others are read
        for slot, chunks in enumerate(chunkings):
            if turn < len(chunks):
                state = read(state, slot, prompt, starts[slot], *chunks[turn])
                starts[slot] += chunks[turn][1]
    tokens = np.zeros((slots, POSITIONS), np.int32)
    tokens[:, :length] = prompt
    state = DecodeState(
        cache=state.cache,
        tokens=jnp.asarray(tokens),
        length=jnp.asarray(starts, jnp.int32),
        known=jnp.full(slots, length, jnp.int32),
        active=jnp.ones(slots, bool),
        memory=state.memory,
    )
    rows, steps = sampling_rows(slots, limit=length + new), length + new - 1
    state, scores = _stepped(graphdef, params, state, rows, strategy=strategy, steps=steps, spoil=spoil)
    scores = np.asarray(scores)
    logits = [scores[: length - start, slot] for slot, start in enumerate(starts)]
    return logits, np.asarray(state.tokens)[:, length : length + new]
