"""The gated delta rule over a block of tokens: what each reads of a memory, and what it corrects in it.

Yang et al. 2024, Gated Delta Networks (arXiv 2412.06464); blocks after Parallelizing Linear Transformers with the Delta
Rule (arXiv 2406.06484).

A head's memory is a matrix S ``[h, g]`` (key size x value size). Token by token, with decay e^d (d <= 0) and strength
beta::

    S <- e^d S;   u = beta (v - S^T k);   S <- S + k u^T;   out = S^T q

What a token adds is k u^T. So behind n tokens of a block the memory is e^{d_1+..+d_n} S + sum_j e^{d_{j+1}+..+d_n}
k_j u_j^T, and the u of a block solve a unit lower triangular system: a memory between its first and last token is never
made. One token is a block of one; longer passes are cut into blocks of ``BLOCK`` and scanned. Everything is float32.

Axis letters beside the house's: m value heads of a key head (n = k m), h key size, g value size.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxserve.pytree import pytree

BLOCK = 64
# Accelerators would round the operands of a float32 product.
_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def delta_rule(
    q: Float[Array, "b k t h"],
    k: Float[Array, "b k t h"],
    v: Float[Array, "b k m t g"],
    decay: Float[Array, "b k m t"],
    beta: Float[Array, "b k m t"],
    state: Float[Array, "b n h g"] | None,
    start: Int[Array, " b"],
) -> tuple[Float[Array, "b k m t g"], Float[Array, "b k m t g"]]:
    """Reads and corrects a memory, token after token.

    Args:
        state: the memory of earlier passes; rows that start at 0 have none.

    Returns:
        What each token reads, and what it adds: see the top of this module. The memory itself stays as it is.
    """
    t = q.shape[2]
    if t <= BLOCK:
        recalled = None if state is None else since_start(_recall(state, q, k), start)
        return _Block.of(q, k, decay, beta).solve(v, recalled)
    b, heads, m, _, size = v.shape
    if state is None:
        state = jnp.zeros((b, heads * m, q.shape[3], size), jnp.float32)

    def cut(rows: Array, axis: int) -> Array:
        """Whole blocks, the first axis theirs; what is missing adds nothing and decays nothing."""
        padding = [(0, -t % BLOCK if at == axis else 0) for at in range(rows.ndim)]
        padded = jnp.pad(rows, padding)
        shape = (*rows.shape[:axis], -1, BLOCK, *rows.shape[axis + 1 :])
        return jnp.moveaxis(padded.reshape(shape), axis, 0)

    q, k, v, decay, beta = cut(q, 2), cut(k, 2), cut(v, 3), cut(decay, 3), cut(beta, 3)
    blocks = _Block.of(q, k, decay, beta)

    def read(state: Array, part: tuple[_Block, Array, Array, Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        block, q, k, v, decay = part
        out, values = block.solve(v, _recall(state, q, k))
        state = after(state, k, values.reshape(b, -1, BLOCK, size), decay.reshape(b, -1, BLOCK))
        return state, (out, values)

    _, answers = jax.lax.scan(read, since_start(state, start), (blocks, q, k, v, decay))
    out, values = (jnp.moveaxis(one, 0, 3).reshape(b, heads, m, -1, size)[:, :, :, :t] for one in answers)
    return out, values


@pytree
class _Block:
    """What the tokens of a block are to each other, whatever the memory before them.

    Attributes:
        beta: how much of a value is written.
        faded: what is left of the memory before the block when a token reads it.
        inverse: of the triangular system that the corrections solve.
        mix: how much of each token's correction a token reads.
    """

    beta: Float[Array, "*n m t"]
    faded: Float[Array, "*n m t"]
    inverse: Float[Array, "*n m t t"]
    mix: Float[Array, "*n m t t"]

    @staticmethod
    def of(
        q: Float[Array, "*n t h"],
        k: Float[Array, "*n t h"],
        decay: Float[Array, "*n m t"],
        beta: Float[Array, "*n m t"],
    ) -> _Block:
        """From the block's queries, keys and gates."""
        order = jnp.arange(q.shape[-2])[:, None] - jnp.arange(q.shape[-2])
        # Each sum by itself: the difference of two long ones has lost what lies between neighbours.
        between = jnp.cumsum(jnp.where(order > 0, decay[..., None], 0), axis=-2)
        # Before the exponential: the decay of what comes later is a growth without bounds.
        fading = jnp.exp(jnp.where(order >= 0, between, -jnp.inf))
        alike, wanted = (_einsum("...ih,...jh->...ij", one, k)[..., None, :, :] for one in (k, q))
        overlap = jnp.where(order > 0, beta[..., None] * alike * fading, 0)
        return _Block(beta, jnp.exp(jnp.cumsum(decay, axis=-1)), _inverse(overlap), wanted * fading)

    def solve(
        self, v: Float[Array, "b k m t g"], recalled: Float[Array, "b k m 2 t g"] | None
    ) -> tuple[Float[Array, "b k m t g"], Float[Array, "b k m t g"]]:
        """What each token reads and what it adds.

        Args:
            recalled: what queries and keys read of the memory before the block, if there is one.
        """
        missing = v if recalled is None else v - self.faded[..., None] * recalled[..., 1, :, :]
        values = _einsum("...ij,...jg->...ig", self.inverse, self.beta[..., None] * missing)
        out = _einsum("...ij,...jg->...ig", self.mix, values)
        return out if recalled is None else out + self.faded[..., None] * recalled[..., 0, :, :], values


def _inverse(lower: Float[Array, "*n t t"]) -> Float[Array, "*n t t"]:
    """Of 1 + a strictly lower triangular matrix, by blocks that double.

    The inverse of [[A, 0], [B, C]] is [[A', 0], [-C' B A', C']]. Products only, so it runs on every backend and for all
    heads at once, and as exact as substitution; the powers of the matrix, a shorter way, grow without bounds where keys
    repeat.
    """
    size = lower.shape[-1]

    def double(level: Int[Array, ""], inverse: Float[Array, "*n t t"]) -> Float[Array, "*n t t"]:
        block = jnp.arange(size) >> level
        corner = (block[:, None] % 2 == 1) & (block[:, None] - 1 == block)
        between = _einsum("...ij,...jk->...ik", inverse, jnp.where(corner, lower, 0))
        return inverse - _einsum("...ij,...jk->...ik", between, inverse)

    start = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape)
    return jax.lax.fori_loop(0, (size - 1).bit_length(), double, start)


def _recall(
    state: Float[Array, "b n h g"], q: Float[Array, "b k t h"], k: Float[Array, "b k t h"]
) -> Float[Array, "b k m 2 t g"]:
    """What queries and keys read of the memory, which is read once for both."""
    b, heads, t, h = q.shape
    m = state.shape[1] // heads
    rows = jnp.concatenate([q, k], axis=2)
    rows = jnp.broadcast_to(rows[:, :, None], (b, heads, m, 2 * t, h)).reshape(b, -1, 2 * t, h)
    return _einsum("bnih,bnhg->bnig", rows, state).reshape(b, heads, m, 2, t, -1)


def after(
    state: Float[Array, "b n h g"],
    keys: Float[Array, "b k t h"],
    values: Float[Array, "b n t g"],
    decay: Float[Array, "b n t"],
) -> Float[Array, "b n h g"]:
    """The memory behind a block."""
    keys = jnp.repeat(keys, values.shape[1] // keys.shape[1], axis=1)
    if keys.shape[2] == 1:
        return state * jnp.exp(decay)[..., None] + keys.swapaxes(2, 3) * values
    # Summed from the end: what is nearly all forgotten may be rounded, not what was just learnt.
    later = jnp.pad(decay[..., 1:], ((0, 0), (0, 0), (0, 1)))
    later = jax.lax.cumsum(later, axis=2, reverse=True)
    whole = (later[..., :1] + decay[..., :1])[..., None]
    return state * jnp.exp(whole) + _einsum("bnth,bntg->bnhg", keys, values * jnp.exp(later)[..., None])


def since_start(leaf: Shaped[Array, "b ..."], start: Int[Array, " b"]) -> Shaped[Array, "b ..."]:
    """Nothing where a row begins: what its slot kept is somebody else's. Selected, since 0 x NaN is NaN."""
    begun: Bool[Array, " b"] = start > 0
    return jnp.where(begun.reshape(-1, *(1,) * (leaf.ndim - 1)), leaf, jnp.zeros((), leaf.dtype))
