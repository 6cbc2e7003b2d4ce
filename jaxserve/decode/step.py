"""One decode step: exactly one pass of the model over ``[slots, width]`` tokens, whatever the strategy.

A strategy says what the pass reads (``propose``) and what of it is kept (``accept``). The step itself runs the model,
writes the cache, appends tokens, and stops rows. ``run`` does several steps in one dispatch. Everything here is pure
and jitted by ``programs`` in this folder; a notebook calls the same functions.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxserve.decode.places import appended
from jaxserve.decode.sampling import SamplingRows, TokenScores
from jaxserve.decode.tally import tally
from jaxserve.models.cache import Cache, write
from jaxserve.models.passes import Canvas
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
    """What a pass reads: ``tokens`` at positions ``length .. length+w-1``, and what each sees of the others.

    Attributes:
        count: how many of its columns matter in each row; a pass no wider than the most of them will do.
        memory: whatever ``accept`` needs of it.
        canvas: rows that refine a canvas, for models that can.
    """

    tokens: Int[Array, "b w"]
    mask: Bool[Array, "b w w"]
    count: Int[Array, " b"]
    memory: Any
    canvas: Canvas | None = None


@pytree
class Verdict:
    """What is kept of a pass.

    Attributes:
        tokens: tokens to emit, left-aligned; where ``count`` is 0, what a block looks like so far.
        count: how many of them are emitted.
        advance: how many of the pass's positions are final in the cache; not the same number in block diffusion.
        scores: log-probabilities of ``tokens``.
        memory: the strategy's next memory.
        tally: what the pass did, by ``tally.COLUMNS``.
    """

    tokens: Int[Array, "b w"]
    count: Int[Array, " b"]
    advance: Int[Array, " b"]
    scores: TokenScores
    memory: Any
    tally: Int[Array, "b c"]


@pytree
class Hint:
    """What a request brings along for its strategy.

    Attributes:
        draft: the caller's guess at the output, token by token.
        drafted: how many tokens it has.
        settings: by the strategy's own names, in its order; NaN where the request says nothing.
    """

    draft: Int[Array, " s"]
    drafted: Int[Array, ""]
    settings: Float[Array, " c"]


@runtime_checkable
class Strategy(Protocol):
    """A frozen, hashable dataclass: it is a static argument of the compiled step."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Tokens that a pass may read in each row, ascending; each is compiled, and a pass takes what it needs."""

    @property
    def block(self) -> int | None:
        """Positions that see each other, counted from the text's beginning; ``None`` where each sees those before it.

        A block is read as a whole: ``length`` stays a multiple of it, and prompts are read up to the last whole one.
        """

    @property
    def settings(self) -> tuple[str, ...]:
        """What a request may set, by name."""

    def memory(self, slots: int, positions: int) -> Any:
        """Memory of empty slots: arrays that have the slots as their first axis, or ``None``."""

    def hand(self, memory: Any, slot: Int[Array, ""], hint: Hint) -> Any:
        """The memory with a request that starts anew in a slot. Not called where there is no memory."""

    def propose(self, model: Model, state: DecodeState, rows: SamplingRows) -> Proposal:
        """What the next pass reads, as wide as the widest."""

    def accept(
        self, logits: Float[Array, "b w v"], proposal: Proposal, state: DecodeState, rows: SamplingRows
    ) -> Verdict:
        """What is kept of it; ``w`` is the width that was taken, and the proposal is cut to it."""


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

    Attributes:
        tokens, count, scores, tally: as in ``Verdict``, cut at the end of the text.
        finite: false where a logit was not: such a row emits nothing and stops.
    """

    tokens: Int[Array, "*n b w"]
    count: Int[Array, "*n b"]
    scores: TokenScores
    finite: Bool[Array, "*n b"]
    tally: Int[Array, "*n b c"]


@pytree
class Control:
    """What the host changes before a dispatch.

    Attributes:
        keep: rows that may go on; the others stop.
        admit: rows that start: their prefix is in the cache up to ``length``.
        length: for admitted rows, positions whose cache entries are final.
        pending: for admitted rows, the known tokens from ``length`` on, left-aligned, as many as a pass is wide.
        pending_count: how many there are. More than fit into ``pending`` stand in the state already: a prefill has put
            them there.
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
        memory=strategy.memory(cache.slots, cache.length),
    )


def step(model: Model, state: DecodeState, rows: SamplingRows, strategy: Strategy) -> tuple[DecodeState, Emission]:
    """One pass over all slots; inactive rows compute garbage that is kept nowhere."""
    proposal = strategy.propose(model, state, rows)
    verdict, fresh, finite = _judged(model, state, rows, strategy, proposal)
    alive = state.active & finite
    count, ended = _stop(verdict, state.known, rows)
    count = jnp.where(alive, count, 0)
    counted = verdict.tally + tally(len(alive), passes=jnp.ones_like(count), wasted=verdict.count - count)
    after = DecodeState(
        cache=write(state.cache, fresh, 0, state.length, jnp.where(alive, verdict.advance, 0)),
        tokens=appended(state.tokens, verdict.tokens, state.known, count),
        length=state.length + jnp.where(alive, verdict.advance, 0),
        known=state.known + count,
        active=alive & ~ended,
        memory=verdict.memory,
    )
    counted = jnp.where(alive[:, None], counted, 0)
    return after, Emission(verdict.tokens, count, verdict.scores, finite, counted)


_Judged = tuple[Verdict, tuple[Any, ...], Bool[Array, " b"]]


def _judged(model: Model, state: DecodeState, rows: SamplingRows, strategy: Strategy, proposal: Proposal) -> _Judged:
    """The verdict on a proposal, fresh cache entries, and whether all scores of a row were finite.

    The pass is as narrow as the proposal allows. What comes back has the shape of the widest one: only then can the
    cache, which is large, be written behind the choice and in place.
    """
    span = jnp.max(jnp.where(state.active, state.length, 0))
    most = jnp.max(jnp.where(state.active, proposal.count, 0))

    def passed(width: int) -> _Judged:
        part = _narrowed(proposal, width)
        real = state.active[:, None] & (jnp.arange(width) < part.count[:, None])
        only: dict[str, Any] = {} if part.canvas is None else {"canvas": part.canvas}
        hidden, fresh = model(part.tokens, state.length, part.mask, state.cache, span=span, real=real, **only)
        logits = model.logits(hidden)
        finite = jnp.all(jnp.isfinite(logits) | ~real[..., None], axis=(1, 2))
        return strategy.accept(logits, part, state, rows), fresh, finite | ~state.active

    widths = strategy.widths
    if len(widths) == 1:
        return passed(widths[0])
    widest = jax.eval_shape(lambda: passed(widths[-1]))

    def widened(width: int) -> _Judged:
        judged: _Judged = jax.tree.map(_padded, passed(width), widest)
        return judged

    choice = sum(most > width for width in widths[:-1])
    return jax.lax.switch(choice, [partial(widened, width) for width in widths])


def _narrowed(proposal: Proposal, width: int) -> Proposal:
    canvas = proposal.canvas
    if canvas is not None:
        canvas = Canvas(canvas.refined, canvas.soft[:, :width])
    tokens, mask = proposal.tokens[:, :width], proposal.mask[:, :width, :width]
    return Proposal(tokens, mask, proposal.count, proposal.memory, canvas)


def _padded(leaf: Array, like: jax.ShapeDtypeStruct) -> Array:
    """With zeros behind the end of each axis that is too short."""
    return jnp.pad(leaf, [(0, want - have) for have, want in zip(leaf.shape, like.shape, strict=True)])


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

    blank = Emission(blank.tokens, blank.count, blank.scores, jnp.ones_like(blank.finite), blank.tally)
    _, state, log = jax.lax.while_loop(go_on, body, (jnp.int32(0), state, blank))
    return state, log


def prefill(
    model: Model,
    state: DecodeState,
    slot: Int[Array, ""],
    tokens: Int[Array, " t"],
    start: Int[Array, ""],
    count: Int[Array, ""],
    block: int | None = None,
) -> DecodeState:
    """Reads a chunk of one prompt straight into its slot's rows; the chunk may be padded behind ``count`` tokens.

    Positions see those before them, and with a ``block`` all of their own, too; ``start`` is then a multiple of it.

    It computes no logits: the prompt's last token is left to the first step, so that every token of a request, the
    first one too, comes from the same program. The caller guarantees ``start + t <= cache.length``.
    """
    t = tokens.shape[0]
    at = start[None]
    mask, real = causal(t, block)[None], (jnp.arange(t) < count)[None]
    _, fresh = model(tokens[None], at, mask, state.cache, row=slot, span=start, real=real)
    return DecodeState(
        cache=write(state.cache, fresh, slot, at, count[None]),
        tokens=jax.lax.dynamic_update_slice(state.tokens, tokens[None], (slot, start)),
        length=state.length.at[slot].set(start + count),
        known=state.known.at[slot].set(start + count),
        active=state.active.at[slot].set(False),
        memory=state.memory,
    )


def hand(state: DecodeState, slot: Int[Array, ""], hint: Hint, strategy: Strategy) -> DecodeState:
    """Gives the strategy what a request brings along, before it is admitted."""
    memory = strategy.hand(state.memory, slot, hint)
    return DecodeState(state.cache, state.tokens, state.length, state.known, state.active, memory)


def causal(t: int, block: int | None = None) -> Bool[Array, "t t"]:
    """What each of ``t`` positions sees: those up to itself, or up to the end of its block."""
    place = jnp.arange(t) if block is None else jnp.arange(t) // block
    return place[:, None] >= place[None, :]


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
        tokens=appended(state.tokens, control.pending, length, jnp.minimum(count, control.pending.shape[1])),
        length=length,
        known=jnp.where(admit, control.length + control.pending_count, state.known),
        active=(state.active & control.keep) | admit,
        memory=state.memory,
    )


def _stop(verdict: Verdict, known: Int[Array, " b"], rows: SamplingRows) -> tuple[Int[Array, " b"], Bool[Array, " b"]]:
    """Cuts what is emitted behind the first stop token and at the row's limit."""
    w = verdict.tokens.shape[1]
    stops = jnp.any(verdict.tokens[:, :, None] == rows.stop_ids[:, None, :], axis=-1)
    stops = stops & (jnp.arange(w) < verdict.count[:, None])
    until_stop = jnp.where(jnp.any(stops, axis=1), jnp.argmax(stops, axis=1) + 1, w)
    count = jnp.minimum(jnp.minimum(verdict.count, until_stop), rows.limit - known).astype(jnp.int32)
    stopped = jnp.any(stops & (jnp.arange(w) < count[:, None]), axis=1)
    return count, stopped | (known + count >= rows.limit)
