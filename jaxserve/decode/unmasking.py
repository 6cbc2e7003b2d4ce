"""Which masks of a block a pass turns into tokens, and which decided tokens it overwrites.

Knows positions, candidates and how sure the model is of them; rules and thresholds are row arrays, so that each request
has its own. Knows no model, no cache and no random number: candidates come from the sampler.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxserve.decode.sampling import REMOVED
from jaxserve.models.decoding import ENTROPY, NO_EDITS, PREFIX, SEQUENTIAL, STATIC
from jaxserve.pytree import pytree


@pytree
class BlockRows:
    """How each row decides its blocks, one row a slot.

    Attributes:
        rule: which masks are filled, an index of ``RULES``. A pass has a number of masks due, at least one (``due``).
            The static rule fills the surest that are due (SDAR, arXiv 2510.06303); the dynamic one fills all above the
            threshold, and the surest that are due where those are fewer (SDAR; LLaDA2.0, arXiv 2512.15745, and the
            mask-to-token half of LLaDA2.1's joint threshold); the sequential one fills the leftmost that are due; the
            left prefix goes on from there while candidates are above the threshold; the entropy-bounded one fills
            those of the lowest entropy whose sum stays within a bound. Levenshtein's is in ``levenshtein``.
        threshold: a mask is filled where the candidate's probability is above it.
        edit_threshold: a decided token is overwritten where another candidate's probability is above it
            (token-to-token, LLaDA2.1); from 1 on nothing is.
        max_post_steps: passes at most that go on editing when no mask is left; where it is 0 nothing is edited.
        denoising_steps: passes among which the masks that are due are spread.
        penalty: taken off the logit of the token that stands just before a position, against stuttering.
        entropy_bound: in nats.
    """

    rule: Int[Array, " b"]
    threshold: Float[Array, " b"]
    edit_threshold: Float[Array, " b"]
    max_post_steps: Int[Array, " b"]
    denoising_steps: Int[Array, " b"]
    penalty: Float[Array, " b"]
    entropy_bound: Float[Array, " b"]

    @property
    def edits(self) -> Bool[Array, " b"]:
        """Rows that overwrite decided tokens."""
        return (self.edit_threshold < NO_EDITS) & (self.max_post_steps > 0)


def due(rows: BlockRows, step: Int[Array, " b"], block: int) -> Int[Array, " b"]:
    """How many masks the rows' ``step``-th pass over a block has to fill: the block spread evenly, at least one."""
    steps = jnp.clip(rows.denoising_steps, 1, block)
    return jnp.maximum(block // steps + (step < block % steps), 1).astype(jnp.int32)


def filled(
    rows: BlockRows,
    masked: Bool[Array, "b w"],
    confidence: Float[Array, "b w"],
    entropy: Float[Array, "b w"],
    count: Int[Array, " b"],
) -> Bool[Array, "b w"]:
    """The masks that become tokens: never none of them where there is one.

    Args:
        masked: positions that hold a mask.
        confidence: probability of each position's candidate.
        entropy: of each position's distribution, in nats.
        count: masks that are due. Of equal ones the leftmost come first.
    """
    count = count[:, None]
    surest = masked & (_ahead(-confidence, masked).sum(-1) < count)
    above = masked & (confidence > rows.threshold[:, None])
    dynamic = jnp.where(above.sum(-1, keepdims=True) >= count, above, surest)
    leftmost = masked & (jnp.cumsum(masked, axis=1) <= count)
    unbroken = jnp.cumsum(masked & ~above & ~leftmost, axis=1) == 0
    before = _ahead(entropy, masked)
    spent = jnp.sum(jnp.where(before, entropy[:, None, :], 0.0), axis=-1)
    bounded = masked & ((before.sum(-1) == 0) | (spent + entropy <= rows.entropy_bound[:, None]))
    rule = rows.rule[:, None]
    return jnp.select(
        [rule == STATIC, rule == SEQUENTIAL, rule == PREFIX, rule == ENTROPY],
        [surest, leftmost, masked & unbroken, bounded],
        dynamic,
    )


def overwritten(
    rows: BlockRows,
    canvas: Int[Array, "b w"],
    decided: Bool[Array, "b w"],
    token: Int[Array, "b w"],
    confidence: Float[Array, "b w"],
) -> Bool[Array, "b w"]:
    """Decided tokens that give way to the candidate; which positions count as decided is the caller's affair."""
    surer = confidence > rows.edit_threshold[:, None]
    return rows.edits[:, None] & decided & surer & (token != canvas)


def admissible(
    logits: Float[Array, "b w v"],
    rows: BlockRows,
    canvas: Int[Array, "b w"],
    before: Int[Array, " b"],
    banned: tuple[tuple[int, Bool[Array, "b w"]], ...],
) -> Float[Array, "b w v"]:
    """What candidates are chosen from: without what a position may not become, and against stuttering.

    Args:
        before: the token before the block, -1 where there is none.
        banned: a token, and where it may not stand.
    """
    ids = jnp.arange(logits.shape[-1])
    left = jnp.concatenate([before[:, None], canvas[:, :-1]], axis=1)
    logits = logits - jnp.where(ids == left[..., None], rows.penalty[:, None, None], 0.0)
    for token, where in banned:
        logits = jnp.where((ids == token) & where[..., None], REMOVED, logits)
    return logits


def _ahead(key: Float[Array, "b w"], among: Bool[Array, "b w"]) -> Bool[Array, "b w w"]:
    """Whether, for each position, another one (last axis) comes before it in rising order of the key.

    A block is short: comparing all pairs is cheaper than a sort, and equal keys have an order.
    """
    at = jnp.arange(key.shape[1])
    mine, other = key[:, :, None], key[:, None, :]
    return among[:, None, :] & ((other < mine) | ((other == mine) & (at[None, :] < at[:, None])))
