"""Canvas diffusion: random tokens behind the text are refined pass by pass until they settle.

There is no mask token. A pass draws a token for every position of the canvas; the surest are accepted together, the
others become random again (entropy-bounded sampling, Ben-Hamu et al. 2025, arXiv 2505.24857). The model is told what it
made of the canvas before, as an embedding of its whole distribution. What is emitted in the end are the most likely
tokens of the last pass, not the drawn ones. A canvas's passes keep nothing in the cache: the next pass reads the tokens
as text, as a prompt is read, and keeps them.

Every slot stands at a pass of its own: in one pass some rows read text and others refine. Source: transformers'
``EntropyBoundSampler`` and ``StableAndConfidentStoppingCriteria``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxserve.decode.block_memory import by_rows, default_rows, draft_at, with_block, with_settings
from jaxserve.decode.sampling import COLDEST, SamplingRows, TokenScores, adjusted_each, choose_each, scores_if, uniforms
from jaxserve.decode.step import DecodeState, Hint, Proposal, Verdict, causal
from jaxserve.decode.tally import tally
from jaxserve.errors import ConfigError
from jaxserve.models.family import Family
from jaxserve.models.passes import Canvas
from jaxserve.pytree import pytree

# As files name what their model is best asked with (``generation_config.json``).
_RECOMMENDED = {
    "denoising_steps": "max_denoising_steps",
    "entropy_bound": "entropy_bound",
    "coldest": "t_min",
    "hottest": "t_max",
    "stable_steps": "stability_threshold",
    "certain_entropy": "confidence_threshold",
}
_LARGEST = 1e6
AT_A_TIME = 32  # positions whose scores are worked on
_RANDOM = 1  # folded into the keys of random tokens: drawn ones have the keys themselves


@pytree
class CanvasRows:
    """How each row refines its canvas, one row a slot.

    Attributes:
        denoising_steps: passes at most.
        entropy_bound: of accepted positions, in nats: how much those surer than one may have together.
        coldest, hottest: temperature, from the hottest in the first pass down to almost the coldest in the last.
        stable_steps: times in a row that the most likely tokens must have stayed the same, for a canvas to be final.
        certain_entropy: and the mean entropy of positions that this must not reach, in nats.
    """

    denoising_steps: Int[Array, " b"]
    entropy_bound: Float[Array, " b"]
    coldest: Float[Array, " b"]
    hottest: Float[Array, " b"]
    stable_steps: Int[Array, " b"]
    certain_entropy: Float[Array, " b"]


@pytree
class CanvasMemory:
    """What is known of each slot's present canvas.

    Attributes:
        canvas: what its next pass reads; in the first one random tokens are read instead.
        best: the most likely tokens of the pass before; no token's ids where there was none.
        first: those of the first pass.
        soft: the embedding of what the pass before made of each position; zeros where there was none.
        step: passes so far.
        stable: times in a row that the most likely tokens stayed the same.
        rows: how each slot refines.
        draft: the caller's guess at each slot's output; -1 where there is none.
    """

    canvas: Int[Array, "b w"]
    best: Int[Array, "b w"]
    first: Int[Array, "b w"]
    soft: Float[Array, "b w d"]
    step: Int[Array, " b"]
    stable: Int[Array, " b"]
    rows: CanvasRows
    draft: Int[Array, "b s"]


@dataclasses.dataclass(frozen=True)
class CanvasDiffusion:
    """One canvas a slot, behind whatever is known of its text.

    A request's temperature is a factor on the schedule's; at 0 the most likely token is taken instead of a drawn one,
    at the schedule's temperatures. Filters (top-k and kin) bear on what is drawn, not on entropies, nor on what the
    model is told. Penalties count the text before a position, in the canvas by its most likely tokens so far.

    A caller's draft stands in the first pass over a canvas instead of random tokens, and is refined like them.

    Attributes:
        size: positions of a canvas.
        vocab_size: tokens to draw from.
        width: numbers of an embedding, which are held in ``dtype``.
        denoising_steps, entropy_bound, coldest, hottest, stable_steps, certain_entropy: where a request does not say;
            see ``CanvasRows``. The model's publisher recommends these (``generation_config.json``).
        alternatives: most likely tokens reported beside each emitted one, where a row asks.
    """

    size: int
    vocab_size: int
    width: int
    dtype: DTypeLike = "bfloat16"
    denoising_steps: int = 48
    entropy_bound: float = 0.1
    coldest: float = 0.4
    hottest: float = 0.8
    stable_steps: int = 1
    certain_entropy: float = 0.005
    alternatives: int = 20

    @property
    def widths(self) -> tuple[int, ...]:
        """A canvas."""
        return (self.size,)

    @property
    def block(self) -> int:
        """Text is read one position after the other, a prompt up to its end: a canvas begins anywhere."""
        return 1

    @property
    def settings(self) -> tuple[str, ...]:
        """The fields of ``CanvasRows``."""
        return tuple(field.name for field in dataclasses.fields(CanvasRows))  # type: ignore[arg-type]

    def memory(self, slots: int, positions: int) -> CanvasMemory:
        """No canvas in any slot."""
        rows = default_rows(CanvasRows, slots, self._defaults())
        return self._anew(rows, jnp.full((slots, positions), -1, jnp.int32))

    def hand(self, memory: CanvasMemory, slot: Int[Array, ""], hint: Hint) -> CanvasMemory:
        """A new request's draft and settings; what it does not set is the strategy's."""
        said = dict(zip(self.settings, hint.settings, strict=True))
        rows = with_settings(memory.rows, slot, said, self._defaults())
        told = (jnp.arange(len(hint.draft)) < hint.drafted) & (hint.draft < self.vocab_size)
        draft = memory.draft.at[slot].set(jnp.where(told, hint.draft, -1))
        anew = self._anew(rows, draft)
        kept = dataclasses.replace(memory, rows=rows, draft=draft)
        return by_rows(jnp.arange(len(memory.step)) == slot, anew, kept)

    def propose(self, model: Any, state: DecodeState, rows: SamplingRows) -> Proposal:
        """Known tokens that are still to be read, or, where there are none, the canvas.

        Args:
            model: a ``models.decoder.Decoder``, which also says what distributions over tokens look like to it.
        """
        memory: CanvasMemory = state.memory
        w = self.size
        places = state.length[:, None] + jnp.arange(w)
        known = jnp.take_along_axis(state.tokens, jnp.minimum(places, state.tokens.shape[1] - 1), axis=1)
        given = jnp.minimum(state.known - state.length, w)
        reads = given > 0
        chance = self._random_tokens(rows.seed, state.length, memory.step)
        drafted = self._drafted(state, rows)
        canvas = jnp.where(memory.step[:, None] == 0, jnp.where(drafted >= 0, drafted, chance), memory.canvas)
        return Proposal(
            tokens=jnp.where(reads[:, None], known, canvas),
            mask=jnp.where(reads[:, None, None], causal(w), True),
            count=jnp.where(reads, given, w),
            memory=model.mixed,
            canvas=Canvas(~reads, memory.soft),
        )

    def accept(
        self, logits: Float[Array, "b w v"], proposal: Proposal, state: DecodeState, rows: SamplingRows
    ) -> Verdict:
        """What the pass makes of the canvas, and whether it is final; where it read text, that is kept."""
        memory: CanvasMemory = state.memory
        refines = state.known == state.length
        after, entropy = self._refined(logits, proposal, state, rows)
        steady = (after.stable >= memory.rows.stable_steps) & (entropy < memory.rows.certain_entropy)
        final = refines & (steady | (after.step >= memory.rows.denoising_steps))
        drafted = jnp.where(final, self.size, 0)
        accepted = jnp.where(final, jnp.sum(after.first == after.best, axis=1), 0)
        changed = jnp.sum(after.best != memory.best, axis=1)
        predicted = (self._drafted(state, rows) >= 0) & final[:, None]
        confirmed = predicted & (self._drafted(state, rows) == after.best)
        counted = tally(
            len(final),
            drafted=drafted,
            accepted=accepted,
            rejected=drafted - accepted,
            predicted_accepted=confirmed.sum(1),
            predicted_rejected=(predicted & ~confirmed).sum(1),
            edited=jnp.where(refines & (memory.step > 0), changed, 0),
            blocks=final.astype(jnp.int32),
        )
        return Verdict(
            tokens=jnp.where(refines[:, None], after.best, 0),
            count=drafted,
            advance=jnp.where(refines, 0, proposal.count),
            scores=self._scores(logits, after.best, final, rows),
            memory=by_rows(refines & ~final, after, self._anew(memory.rows, memory.draft)),
            tally=counted,
        )

    def _refined(
        self, logits: Float[Array, "b w v"], proposal: Proposal, state: DecodeState, rows: SamplingRows
    ) -> tuple[CanvasMemory, Float[Array, " b"]]:
        """What is known of each canvas behind the pass, and its mean entropy."""
        memory: CanvasMemory = state.memory
        drawn, best, entropy, soft = self._judged(logits, proposal, state, rows)
        step = memory.step + 1
        chance = self._random_tokens(rows.seed, state.length, step)
        after = CanvasMemory(
            canvas=jnp.where(accepted(entropy, memory.rows.entropy_bound), drawn, chance),
            best=best,
            first=jnp.where(memory.step[:, None] == 0, best, memory.first),
            soft=soft.astype(memory.soft.dtype),
            step=step,
            stable=jnp.where(jnp.all(best == memory.best, axis=1), memory.stable + 1, 0),
            rows=memory.rows,
            draft=memory.draft,
        )
        return after, jnp.mean(entropy, axis=1)

    def _judged(
        self, logits: Float[Array, "b w v"], proposal: Proposal, state: DecodeState, rows: SamplingRows
    ) -> tuple[Int[Array, "b w"], Int[Array, "b w"], Float[Array, "b w"], Float[Array, "b w d"]]:
        """For each position a drawn token, the most likely one, the entropy, and the embedding of all of it.

        Some positions at a time: it takes six copies of their scores.
        """
        memory: CanvasMemory = state.memory
        part = self.size if self.size <= AT_A_TIME else math.gcd(self.size, AT_A_TIME)
        heat = _heat(memory.rows, memory.step)
        scale = jnp.maximum(heat * jnp.where(rows.temperature > 0, rows.temperature, 1.0), COLDEST)
        text = with_block(state.tokens, memory.best, state.length)
        warm = dataclasses.replace(rows, temperature=rows.temperature * heat)

        def judged(at: Int[Array, ""]) -> tuple[Array, Array, Array, Array]:
            some = jax.lax.dynamic_slice_in_dim(logits, at, part, axis=1)
            drawn, _, _ = choose_each(some, warm, text, state.length + at, memory.step)
            scores = adjusted_each(some, rows, text, state.length + at) / scale[:, None, None]
            shares = jax.nn.softmax(scores, axis=-1)
            entropy = jax.nn.logsumexp(scores, axis=-1) - jnp.sum(shares * scores, axis=-1)
            best = jnp.argmax(scores, axis=-1).astype(jnp.int32)
            return drawn, best, entropy, shares.astype(memory.soft.dtype)

        if part == self.size:
            drawn, best, entropy, shares = judged(jnp.int32(0))
            return drawn, best, entropy, proposal.memory(shares)
        *found, shares = jax.lax.map(judged, jnp.arange(0, self.size, part, dtype=jnp.int32))
        # Their product reads all embeddings, so it is one.
        drawn, best, entropy, soft = map(_joined, (*found, proposal.memory(shares)))
        return drawn, best, entropy, soft

    def _random_tokens(
        self, seed: UInt32[Array, "b 2"], first: Int[Array, " b"], step: Int[Array, " b"]
    ) -> Int[Array, "b w"]:
        """Of each position, what stands there in the row's ``step``-th pass unless something was accepted."""

        places = (first[:, None] + jnp.arange(self.size)).reshape(-1)
        seed, step = (jnp.repeat(leaf, self.size, axis=0) for leaf in (seed, step))
        numbers = uniforms(seed, places, step, jnp.full_like(step, _RANDOM)).reshape(-1, self.size)
        return jnp.minimum((numbers * self.vocab_size).astype(jnp.int32), self.vocab_size - 1)

    def _scores(
        self, logits: Float[Array, "b w v"], tokens: Int[Array, "b w"], final: Bool[Array, " b"], rows: SamplingRows
    ) -> TokenScores:
        """Of what is emitted; nothing is looked up in passes that emit nothing."""
        return scores_if(jnp.any(final), logits, tokens, rows.alternatives, self.alternatives)

    def _drafted(self, state: DecodeState, rows: SamplingRows) -> Int[Array, "b w"]:
        """The caller's draft for each canvas; -1 where there is none."""
        return draft_at(state.memory.draft, state.length[:, None] + jnp.arange(self.size), rows)

    def _defaults(self) -> dict[str, int | float]:
        """By the names of ``settings``."""
        return {name: getattr(self, name) for name in self.settings}

    def _anew(self, rows: CanvasRows, draft: Int[Array, "b s"]) -> CanvasMemory:
        """Canvases before their first pass."""
        slots = len(draft)
        shape, zeros = (slots, self.size), jnp.zeros(slots, jnp.int32)
        nothing = jnp.full(shape, self.vocab_size, jnp.int32)
        return CanvasMemory(
            canvas=jnp.zeros(shape, jnp.int32),
            best=nothing,
            first=jnp.copy(nothing),  # a buffer of its own: states are donated
            soft=jnp.zeros((*shape, self.width), self.dtype),
            step=zeros,
            stable=jnp.zeros_like(zeros),
            rows=rows,
            draft=draft,
        )


def strategy_of(
    family: Family, dtype: DTypeLike, alternatives: int, generation: Mapping[str, Any] | None = None
) -> CanvasDiffusion:
    """The strategy of a family that refines canvases.

    Args:
        dtype: of the model's weights.
        generation: the checkpoint's ``generation_config.json``, whose settings are the defaults.

    Raises:
        ConfigError: a setting there that cannot be.
    """
    decoding, config = family.decoding, family.config
    assert decoding is not None
    facts: dict[str, Any] = {"denoising_steps": decoding.denoising_steps} | _recommended(generation or {})
    return CanvasDiffusion(
        size=decoding.block,
        vocab_size=config.vocab_size,
        width=config.width,
        dtype=jnp.dtype(dtype).name,
        alternatives=alternatives,
        **facts,
    )


def _recommended(generation: Mapping[str, Any]) -> dict[str, int | float]:
    """What a file says, by the names of ``CanvasRows``."""
    sampler = generation.get("sampler_config")
    stated = {**generation, **(sampler if isinstance(sampler, Mapping) else {})}
    found = {}
    for name, theirs in _RECOMMENDED.items():
        value, whole = stated.get(theirs), isinstance(getattr(CanvasDiffusion, name), int)
        if value is None:
            continue
        least = 1 if name == "denoising_steps" else 0
        kind = type(value) is int or (type(value) is float and not whole)
        if not kind or not least <= value <= _LARGEST:
            raise ConfigError(f"generation_config.json: {theirs} {value!r} cannot be")
        found[name] = value if whole else float(value)
    return found


def accepted(entropy: Float[Array, "b w"], bound: Float[Array, " b"]) -> Bool[Array, "b w"]:
    """Positions that may be drawn independently: those surer than a position have at most ``bound`` together.

    The sum bounds what these positions tell about each other. A canvas is short: comparing all pairs costs less than a
    sort, and equal entropies have an order.
    """
    at = jnp.arange(entropy.shape[1])
    mine, other = entropy[:, :, None], entropy[:, None, :]
    surer = (other < mine) | ((other == mine) & (at[None, :] < at[:, None]))
    return jnp.sum(jnp.where(surer, other, 0.0), axis=-1) <= bound[:, None]


def _heat(rows: CanvasRows, step: Int[Array, " b"]) -> Float[Array, " b"]:
    """Temperature of the rows' ``step``-th pass."""
    left = (rows.denoising_steps - step) / jnp.maximum(rows.denoising_steps, 1)
    return rows.coldest + (rows.hottest - rows.coldest) * left.astype(jnp.float32)


def _joined(parts: Array) -> Array:
    """Of ``[n, b, w, ...]``, parts of rows, the rows."""
    n, b, w, *rest = parts.shape
    return jnp.moveaxis(parts, 0, 1).reshape(b, n * w, *rest)
