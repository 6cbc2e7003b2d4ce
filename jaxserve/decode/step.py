"""One decode step: exactly one pass of the model over ``[slots, width]`` tokens, whatever the strategy.

A strategy says what the pass reads (``propose``) and what of it is kept (``accept``). The step itself runs the model,
writes the cache, appends tokens, and stops rows. ``run`` does several steps in one dispatch. Everything here is pure
and jitted by ``programs`` in this folder; a notebook calls the same functions.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxserve.decode.sampling import SamplingRows, TokenScores
from jaxserve.models.cache import Cache, write
from jaxserve.pytree import pytree


@pytree
class DecodeState:
    """All slots of a pool.

    Attributes:
        cache: entries of the model's layers.
        tokens: every known token by position, prompt and output.
        length: positions whose cache entries are final.
        known: how many tokens are known; those at ``length .. known-1`` are still to be read by a pass.
        active: the slot decodes.
        memory: what the strategy keeps between steps.
    """

    cache: Cache
    tokens: Int[Array, "b s"]
    length: Int[Array, " b"]
    known: Int[Array, " b"]
    active: Bool[Array, " b"]
    memory: Any


@pytree
class Proposal:
    """What a pass reads: ``tokens`` at positions ``length .. length+w-1``, and what each sees of the others."""

    tokens: Int[Array, "b w"]
    mask: Bool[Array, "b w w"]
    memory: Any


@pytree
class Verdict:
    """What is kept of a pass.

    Attributes:
        tokens: tokens to emit, left-aligned.
        count: how many of them.
        advance: how many of the pass's positions are final in the cache; not the same number in block diffusion.
        scores: log-probabilities of the emitted tokens.
        memory: the strategy's next memory.
    """

    tokens: Int[Array, "b w"]
    count: Int[Array, " b"]
    advance: Int[Array, " b"]
    scores: TokenScores
    memory: Any


@runtime_checkable
class Strategy(Protocol):
    """A frozen, hashable dataclass: it is a static argument of the compiled step."""

    @property
    def width(self) -> int:
        """Tokens a pass reads in each row."""

    def memory(self, slots: int) -> Any:
        """Memory of empty slots."""

    def propose(self, state: DecodeState, rows: SamplingRows) -> Proposal:
        """What the next pass reads."""

    def accept(
        self, logits: Float[Array, "b w v"], proposal: Proposal, state: DecodeState, rows: SamplingRows
    ) -> Verdict:
        """What is kept of it."""


@runtime_checkable
class Model(Protocol):
    """What a step needs of a model; see ``models.decoder.Decoder`` for the meaning of the arguments."""

    def __call__(
        self,
        tokens: Int[Array, "b t"],
        start: Int[Array, " b"],
        mask: Bool[Array, "b t t"],
        cache: Cache | None = None,
        row: Int[Array, ""] | int = 0,
        span: Int[Array, ""] | None = None,
        real: Bool[Array, "b t"] | None = None,
    ) -> tuple[Float[Array, "b t d"], tuple[Any, ...]]:
        """Hidden states and fresh cache entries."""

    def logits(self, hidden: Float[Array, "... d"]) -> Float[Array, "... v"]:
        """Scores of every token."""


@pytree
class Emission:
    """What one step gave each row, or, with a leading axis, what each of several steps gave.

    ``finite`` is false where a logit was not: such a row emits nothing and stops.
    """

    tokens: Int[Array, "*n b w"]
    count: Int[Array, "*n b"]
    scores: TokenScores
    finite: Bool[Array, "*n b"]


@pytree
class Control:
    """What the host changes before a dispatch.

    Attributes:
        keep: rows that may go on; the others stop.
        admit: rows that start: their prefix is in the cache up to ``length``.
        length: for admitted rows, positions whose cache entries are final.
        pending: for admitted rows, the known tokens from ``length`` on, left-aligned, as many as a pass is wide.
        pending_count: how many there are, at least 1. More than fit into ``pending`` stand in the state already: a
            prefill has put them there.
    """

    keep: Bool[Array, " b"]
    admit: Bool[Array, " b"]
    length: Int[Array, " b"]
    pending: Int[Array, "b w"]
    pending_count: Int[Array, " b"]


def empty_state(cache: Cache, strategy: Strategy) -> DecodeState:
    """A state with no request in any slot."""
    zeros = jnp.zeros(cache.slots, jnp.int32)
    return DecodeState(
        cache=cache,
        tokens=jnp.zeros((cache.slots, cache.length), jnp.int32),
        length=zeros,
        known=jnp.zeros_like(zeros),
        active=jnp.zeros(cache.slots, bool),
        memory=strategy.memory(cache.slots),
    )


def step(model: Model, state: DecodeState, rows: SamplingRows, strategy: Strategy) -> tuple[DecodeState, Emission]:
    """One pass over all slots; inactive rows compute garbage that is kept nowhere."""
    proposal = strategy.propose(state, rows)
    span = jnp.max(jnp.where(state.active, state.length, 0))
    real = jnp.broadcast_to(state.active[:, None], proposal.tokens.shape)
    hidden, fresh = model(proposal.tokens, state.length, proposal.mask, state.cache, span=span, real=real)
    logits = model.logits(hidden)
    finite = jnp.all(jnp.isfinite(logits), axis=(1, 2)) | ~state.active
    verdict = strategy.accept(logits, proposal, state, rows)
    alive = state.active & finite
    count, ended = _stop(verdict, state.known, rows)
    count = jnp.where(alive, count, 0)
    after = DecodeState(
        cache=write(state.cache, fresh, 0, state.length, jnp.where(alive, verdict.advance, 0)),
        tokens=_append(state.tokens, verdict.tokens, state.known, count),
        length=state.length + jnp.where(alive, verdict.advance, 0),
        known=state.known + count,
        active=alive & ~ended,
        memory=verdict.memory,
    )
    return after, Emission(verdict.tokens, count, verdict.scores, finite)


def run(
    model: Model,
    state: DecodeState,
    control: Control,
    rows: SamplingRows,
    steps: Int[Array, ""],
    strategy: Strategy,
    max_steps: int,
) -> tuple[DecodeState, Emission]:
    """Up to ``steps`` steps in one dispatch; ends early when every row has stopped.

    Returns:
        The state, and the emissions stacked along a new leading axis of ``max_steps`` (count 0 where no step ran).
    """
    state = _apply(state, control)
    blank = jax.tree.map(
        lambda leaf: jnp.zeros((max_steps, *leaf.shape), leaf.dtype),
        jax.eval_shape(lambda: step(model, state, rows, strategy)[1]),
    )

    def go_on(carry: tuple[Int[Array, ""], DecodeState, Emission]) -> Bool[Array, ""]:
        index, state, _ = carry
        return (index < jnp.minimum(steps, max_steps)) & jnp.any(state.active)

    def body(carry: tuple[Int[Array, ""], DecodeState, Emission]) -> tuple[Int[Array, ""], DecodeState, Emission]:
        index, state, log = carry
        state, emission = step(model, state, rows, strategy)
        log = jax.tree.map(lambda rows, row: jax.lax.dynamic_update_index_in_dim(rows, row, index, 0), log, emission)
        return index + 1, state, log

    blank = Emission(blank.tokens, blank.count, blank.scores, jnp.ones_like(blank.finite))
    _, state, log = jax.lax.while_loop(go_on, body, (jnp.int32(0), state, blank))
    return state, log


def prefill(
    model: Model,
    state: DecodeState,
    slot: Int[Array, ""],
    tokens: Int[Array, " t"],
    start: Int[Array, ""],
    count: Int[Array, ""],
) -> DecodeState:
    """Reads a chunk of one prompt straight into its slot's rows; the chunk may be padded behind ``count`` tokens.

    It computes no logits: the prompt's last token is left to the first step, so that every token of a request, the
    first one too, comes from the same program. The caller guarantees ``start + t <= cache.length``.
    """
    t = tokens.shape[0]
    at = start[None]
    mask, real = jnp.tril(jnp.ones((1, t, t), bool)), (jnp.arange(t) < count)[None]
    _, fresh = model(tokens[None], at, mask, state.cache, row=slot, span=start, real=real)
    return DecodeState(
        cache=write(state.cache, fresh, slot, at, count[None]),
        tokens=jax.lax.dynamic_update_slice(state.tokens, tokens[None], (slot, start)),
        length=state.length.at[slot].set(start + count),
        known=state.known.at[slot].set(start + count),
        active=state.active.at[slot].set(False),
        memory=state.memory,
    )


def scrub(state: DecodeState, slot: Int[Array, ""]) -> DecodeState:
    """Zeroes a slot: what a request with a non-finite number left there."""

    def blank(leaf: Array) -> Array:
        row = jnp.zeros((1, *leaf.shape[1:]), leaf.dtype)
        return jax.lax.dynamic_update_slice_in_dim(leaf, row, slot, axis=0)

    return DecodeState(
        cache=jax.tree.map(blank, state.cache),
        tokens=blank(state.tokens),
        length=state.length.at[slot].set(0),
        known=state.known.at[slot].set(0),
        active=state.active.at[slot].set(False),
        memory=state.memory,
    )


def _apply(state: DecodeState, control: Control) -> DecodeState:
    admit = control.admit
    length = jnp.where(admit, control.length, state.length)
    count = jnp.where(admit, control.pending_count, 0)
    return DecodeState(
        cache=state.cache,
        tokens=_append(state.tokens, control.pending, length, jnp.minimum(count, control.pending.shape[1])),
        length=length,
        known=jnp.where(admit, control.length + control.pending_count, state.known),
        active=(state.active & control.keep) | admit,
        memory=state.memory,
    )


def _append(
    tokens: Int[Array, "b s"], new: Int[Array, "b w"], at: Int[Array, " b"], count: Int[Array, " b"]
) -> Int[Array, "b s"]:
    """Puts the first ``count`` of ``new`` at positions ``at ..``; rows are short, a select will do."""
    offset = jnp.arange(tokens.shape[1]) - at[:, None]
    picked = jnp.take_along_axis(new, jnp.clip(offset, 0, new.shape[1] - 1), axis=1)
    return jnp.where((offset >= 0) & (offset < count[:, None]), picked, tokens)


def _stop(verdict: Verdict, known: Int[Array, " b"], rows: SamplingRows) -> tuple[Int[Array, " b"], Bool[Array, " b"]]:
    """Cuts what is emitted behind the first stop token and at the row's limit."""
    w = verdict.tokens.shape[1]
    stops = jnp.any(verdict.tokens[:, :, None] == rows.stop_ids[:, None, :], axis=-1)
    stops = stops & (jnp.arange(w) < verdict.count[:, None])
    until_stop = jnp.where(jnp.any(stops, axis=1), jnp.argmax(stops, axis=1) + 1, w)
    count = jnp.minimum(jnp.minimum(verdict.count, until_stop), rows.limit - known).astype(jnp.int32)
    stopped = jnp.any(stops & (jnp.arange(w) < count[:, None]), axis=1)
    return count, stopped | (known + count >= rows.limit)
