"""How the next token is chosen, on the device, each row by its own parameters.

Sampling parameters are row arrays inside the program, never reasons for another program. What no row asks for is
skipped by ``lax.cond``; a row that did not ask gets the same bits on either branch, so its tokens never depend on
what its neighbours asked for. Random numbers come from (seed, absolute position) alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxserve.pytree import pytree

REMOVED = -1e30  # logit of a token that cannot be chosen; finite, so that differences stay finite
COLDEST = 1e-6  # lower temperatures count as this one: quotients stay finite, and the best token is certain anyway
CDF_BLOCK = 256  # tokens summed at a time when a draw is inverted


@pytree
class SamplingRows:
    """Sampling parameters, one row a slot; fields as in ``engine.request.SamplingParams``.

    Attributes:
        bias_ids, bias: tokens and what is added to their logits; id -1 is padding.
        stop_ids: tokens that end the row; -1 is padding.
        seed: key data of the row's random stream.
        prompt_length: tokens at positions below this are prompt.
        min_length: no stop token is chosen while fewer tokens than this are known.
        limit: the row ends when this many tokens are known.
        alternatives: whether the row wants the most likely tokens reported.
    """

    temperature: Float[Array, " b"]
    top_k: Int[Array, " b"]
    top_p: Float[Array, " b"]
    min_p: Float[Array, " b"]
    repetition_penalty: Float[Array, " b"]
    presence_penalty: Float[Array, " b"]
    frequency_penalty: Float[Array, " b"]
    bias_ids: Int[Array, "b m"]
    bias: Float[Array, "b m"]
    stop_ids: Int[Array, "b z"]
    seed: UInt32[Array, "b 2"]
    prompt_length: Int[Array, " b"]
    min_length: Int[Array, " b"]
    limit: Int[Array, " b"]
    alternatives: Bool[Array, " b"]


@pytree
class TokenScores:
    """Natural log-probabilities under the model's own distribution, before any sampling parameter."""

    chosen: Float[Array, "*n b w"]
    top_ids: Int[Array, "*n b w a"]
    top: Float[Array, "*n b w a"]


def choose(
    logits: Float[Array, "b v"], rows: SamplingRows, tokens: Int[Array, "b s"], known: Int[Array, " b"]
) -> Int[Array, " b"]:
    """The next token of each row.

    Args:
        logits: the model's scores for the token at position ``known``.
        tokens: all known tokens by position; what stands at ``known`` and beyond is not read.
        known: how many tokens each row has.
    """
    logits = _adjust(logits, rows, tokens, known)
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    sampled = rows.temperature > 0
    drawn = jax.lax.cond(
        jnp.any(sampled),
        lambda: _invert(_mass(_filter(logits, rows)), uniforms(rows.seed, known)),
        lambda: jnp.zeros_like(greedy),
    )
    return jnp.where(sampled, drawn, greedy)


def choose_each(
    logits: Float[Array, "b w v"],
    rows: SamplingRows,
    tokens: Int[Array, "b s"],
    first: Int[Array, " b"],
    step: Int[Array, " b"] | None = None,
) -> tuple[Int[Array, "b w"], Float[Array, "b w"], Float[Array, "b w"]]:
    """The token for each of several positions, as ``choose`` would choose it for each alone.

    Args:
        logits: the model's scores for the tokens at positions ``first .. first+w-1``.
        tokens: tokens by position; penalties at a position count those before it.
        step: draws of a position differ from step to step; ``None`` where each position is drawn once.

    Returns:
        The tokens; the probability of each after all filters, at temperature 1 where the row is greedy; and the
        entropy (in nats) of what it was chosen from.
    """
    b, w, v = logits.shape
    flat = adjusted_each(logits, rows, tokens, first).reshape(b * w, v)
    each, known = _positions(rows, first, w)
    greedy = jnp.argmax(flat, axis=-1).astype(jnp.int32)
    sampled = each.temperature > 0
    kept = _filter(flat, each)
    mass = _mass(kept)
    total = jnp.sum(mass, axis=-1)
    drawn = jax.lax.cond(
        jnp.any(sampled),
        lambda: _invert(mass, uniforms(each.seed, known, *(() if step is None else (jnp.repeat(step, w),)))),
        lambda: jnp.zeros_like(greedy),
    )
    token = jnp.where(sampled, drawn, greedy)
    confidence = jnp.take_along_axis(mass, token[:, None], axis=-1)[:, 0] / total
    entropy = jnp.log(total) - jnp.sum(jnp.where(mass > 0, mass * jnp.log(mass), 0.0), axis=-1) / total
    return token.reshape(b, w), confidence.reshape(b, w), entropy.reshape(b, w)


def adjusted_each(
    logits: Float[Array, "b w v"], rows: SamplingRows, tokens: Int[Array, "b s"], first: Int[Array, " b"]
) -> Float[Array, "b w v"]:
    """What ``choose_each`` chooses from, before temperatures and filters: with bias, penalties, early ends banned."""
    b, w, v = logits.shape
    each, known = _positions(rows, first, w)
    return _adjust(logits.reshape(b * w, v), each, tokens, known).reshape(b, w, v)


def scores_each(
    logits: Float[Array, "b w v"], tokens: Int[Array, "b w"], alternatives: Bool[Array, " b"], count: int
) -> TokenScores:
    """Log-probability of each token and of the ``count`` most likely ones (zeros where no row wants them)."""
    normal = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1) - normal

    def most_likely() -> tuple[Array, Array]:
        values, ids = jax.lax.top_k(logits, count)
        return ids.astype(jnp.int32), values - normal

    def nothing() -> tuple[Array, Array]:
        shape = (*logits.shape[:-1], count)
        return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, logits.dtype)

    top_ids, top = jax.lax.cond(jnp.any(alternatives), most_likely, nothing)
    return TokenScores(chosen=chosen[..., 0], top_ids=top_ids, top=top)


def scores_if(
    wanted: Bool[Array, ""],
    logits: Float[Array, "b w v"],
    tokens: Int[Array, "b w"],
    alternatives: Bool[Array, " b"],
    count: int,
) -> TokenScores:
    """``scores_each``, looked up only where somebody wants them; else zeros."""

    def looked_up() -> TokenScores:
        return scores_each(logits, tokens, alternatives, min(count, logits.shape[-1]))

    blank = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(looked_up))
    scores: TokenScores = jax.lax.cond(wanted, looked_up, lambda: blank)
    return scores


def _positions(rows: SamplingRows, first: Int[Array, " b"], w: int) -> tuple[SamplingRows, Int[Array, " p"]]:
    """Parameters and place of each of ``w`` positions of each row, one after the other."""
    each: SamplingRows = jax.tree.map(lambda leaf: jnp.repeat(leaf, w, axis=0), rows)
    return each, (first[:, None] + jnp.arange(w)).reshape(-1)


def _adjust(
    logits: Float[Array, "b v"], rows: SamplingRows, tokens: Int[Array, "r s"], known: Int[Array, " b"]
) -> Float[Array, "b v"]:
    """Logit bias, then penalties, then the ban on early stop tokens."""
    penalised = (rows.repetition_penalty != 1) | (rows.presence_penalty != 0) | (rows.frequency_penalty != 0)
    early = known < rows.min_length
    logits = jax.lax.cond(jnp.any(rows.bias_ids >= 0), lambda x: _add_bias(x, rows), lambda x: x, logits)
    logits = jax.lax.cond(jnp.any(penalised), lambda x: _penalise(x, rows, tokens, known), lambda x: x, logits)
    return jax.lax.cond(jnp.any(early), lambda x: _ban(x, rows.stop_ids, early), lambda x: x, logits)


def _scatter_ids(ids: Int[Array, "b m"], valid: Bool[Array, "b m"], vocab: int) -> tuple[Array, Array]:
    """Row and column indices; invalid ones point past the vocabulary, where ``mode="drop"`` ignores them."""
    return jnp.arange(ids.shape[0])[:, None], jnp.where(valid, ids, vocab)


def _add_bias(logits: Float[Array, "b v"], rows: SamplingRows) -> Float[Array, "b v"]:
    at = _scatter_ids(rows.bias_ids, rows.bias_ids >= 0, logits.shape[1])
    return logits.at[at].add(rows.bias, mode="drop")


def _penalise(
    logits: Float[Array, "b v"], rows: SamplingRows, tokens: Int[Array, "r s"], known: Int[Array, " b"]
) -> Float[Array, "b v"]:
    """Repetition penalty (Keskar et al. 2019, CTRL) over prompt and output; OpenAI's two penalties over the output.

    A row of tokens may stand for several rows of logits, one after the other.
    """
    tokens = jnp.repeat(tokens, logits.shape[0] // tokens.shape[0], axis=0)
    positions = jnp.arange(tokens.shape[1])
    past = positions < known[:, None]
    zeros = jnp.zeros(logits.shape, jnp.int32)
    seen = zeros.at[_scatter_ids(tokens, past, logits.shape[1])].add(1, mode="drop")
    generated = past & (positions >= rows.prompt_length[:, None])
    counts = zeros.at[_scatter_ids(tokens, generated, logits.shape[1])].add(1, mode="drop")
    repetition = rows.repetition_penalty[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen > 0, repeated, logits)
    logits = logits - rows.frequency_penalty[:, None] * counts
    return logits - rows.presence_penalty[:, None] * (counts > 0)


def _ban(logits: Float[Array, "b v"], ids: Int[Array, "b z"], banned: Bool[Array, " b"]) -> Float[Array, "b v"]:
    at = _scatter_ids(ids, (ids >= 0) & banned[:, None], logits.shape[1])
    return logits.at[at].set(REMOVED, mode="drop")


def _filter(logits: Float[Array, "b v"], rows: SamplingRows) -> Float[Array, "b v"]:
    """Temperature, then top-k, top-p (Holtzman et al. 2019) and min-p (Nguyen et al. 2024), in that order."""
    vocab = logits.shape[1]
    temperature = jnp.where(rows.temperature > 0, jnp.maximum(rows.temperature, COLDEST), 1.0)
    logits = logits / temperature[:, None]
    limited = (rows.top_k > 0) & (rows.top_k < vocab)
    logits = jax.lax.cond(jnp.any(limited), lambda x: _keep_top_k(x, rows.top_k, limited), lambda x: x, logits)
    nuclear = rows.top_p < 1
    logits = jax.lax.cond(jnp.any(nuclear), lambda x: _keep_top_p(x, rows.top_p, nuclear), lambda x: x, logits)
    floor = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(rows.min_p)[:, None]  # log 0 = -inf keeps all
    return jnp.where(logits >= floor, logits, REMOVED)


def _keep_top_k(x: Float[Array, "b v"], k: Int[Array, " b"], limited: Bool[Array, " b"]) -> Float[Array, "b v"]:
    ones = jnp.ones(x.shape, jnp.int32)
    threshold = _threshold(_ordered(x), ones, k)
    return jnp.where((_ordered(x) >= threshold[:, None]) | ~limited[:, None], x, REMOVED)


def _keep_top_p(x: Float[Array, "b v"], p: Float[Array, " b"], nuclear: Bool[Array, " b"]) -> Float[Array, "b v"]:
    mass = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
    threshold = _threshold(_ordered(x), mass, p * jnp.sum(mass, axis=-1))
    return jnp.where((_ordered(x) >= threshold[:, None]) | ~nuclear[:, None], x, REMOVED)


def _ordered(x: Float[Array, "b v"]) -> UInt32[Array, "b v"]:
    """Bits that compare, as unsigned integers, like the floats they come from."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _threshold(keys: UInt32[Array, "b v"], weights: Array, target: Array) -> UInt32[Array, " b"]:
    """The largest key such that the weights at and above it reach the target, found bit by bit.

    32 passes over the row instead of a sort, which XLA:CPU does on one core at ~100 ns an element. Equal keys stay
    or go together.
    """

    def refine(step: Int[Array, ""], found: UInt32[Array, " b"]) -> UInt32[Array, " b"]:
        candidate = found | (jnp.uint32(1 << 31) >> step.astype(jnp.uint32))
        reached = jnp.sum(jnp.where(keys >= candidate[:, None], weights, 0), axis=-1)
        return jnp.where(reached >= target, candidate, found)

    return jax.lax.fori_loop(0, 32, refine, jnp.zeros(keys.shape[0], jnp.uint32))


def _mass(x: Float[Array, "b v"]) -> Float[Array, "b v"]:
    """Probabilities, but for a factor of each row."""
    return jnp.where(x > REMOVED / 2, jnp.exp(x - jnp.max(x, axis=-1, keepdims=True)), 0.0)


def _invert(mass: Float[Array, "b v"], uniform: Float[Array, " b"]) -> Int[Array, " b"]:
    """Inverts the distribution's cumulative sum at one uniform number a row: one pass, no noise per token."""
    blocks = jnp.pad(mass, ((0, 0), (0, -mass.shape[1] % CDF_BLOCK))).reshape(mass.shape[0], -1, CDF_BLOCK)
    sums = jnp.sum(blocks, axis=-1)
    cumulative = jnp.cumsum(sums, axis=-1)
    goal = uniform * cumulative[:, -1]
    block = _first_beyond(cumulative, sums, goal)
    before = jnp.take_along_axis(cumulative - sums, block[:, None], axis=1)[:, 0]
    within = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return (block * CDF_BLOCK + _first_beyond(jnp.cumsum(within, axis=-1), within, goal - before)).astype(jnp.int32)


def _first_beyond(cumulative: Float[Array, "b n"], parts: Float[Array, "b n"], goal: Float[Array, " b"]) -> Array:
    """Index of the first part that has mass and a cumulative sum above the goal.

    Rounding may put the goal below the first or above the last sum: a part without mass is never taken, and behind the
    last sum it is the last part that has some.
    """
    massive = parts > 0
    beyond = massive & (cumulative > goal[:, None])
    last = jnp.max(jnp.where(massive, jnp.arange(parts.shape[1]), 0), axis=-1)
    return jnp.where(jnp.any(beyond, axis=-1), jnp.argmax(beyond, axis=-1), last)


def uniforms(seed: UInt32[Array, "b 2"], position: Int[Array, " b"], *further: Int[Array, " b"]) -> Float[Array, " b"]:
    """One number a row, which depends on its seed, its position and what else is told of it alone."""

    def draw(seed: UInt32[Array, " 2"], *data: Int[Array, ""]) -> Float[Array, ""]:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        for one in data:
            key = jax.random.fold_in(key, one)
        return jax.random.uniform(key, dtype=jnp.float32)

    return jax.vmap(draw)(seed, position, *further)
