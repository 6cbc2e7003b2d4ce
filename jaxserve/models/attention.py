"""Attention of a block of new positions over a cached prefix and over itself.

One function for every pass: whole sequence (no prefix), prefill chunk, decode step, draft verification, denoising.
The prefix is always visible up to ``start``; inside the block an explicit mask decides. Softmax runs online in
float32 (Milakov & Gimelshein 2018), over the block first and then over as many key blocks of the prefix as the
longest row needs. A key block that a row does not see changes nothing in that row, bit for bit: the row's numbers do
not depend on its company.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxserve.models.cache import as_stored
from jaxserve.pytree import pytree, static

# Large and finite: a masked score's weight is exp(MASKED - m) = 0 exactly, and no inf - inf can arise.
MASKED = -1e30
# Keys of the block itself are taken this many at a time: it bounds the score matrix of a long whole-sequence pass.
OWN_KEYS = 1024


@pytree
class Prefix:
    """One layer's cached entries of rows ``row .. row+b-1``, visible at positions below ``start``.

    Attributes:
        v: values, or ``None`` where they are the first numbers of the keys (a latent, in MLA).
        span: the longest start that matters: key blocks beyond it are not read.
        ring: position ``p`` lies at ``p mod s``, and only the last ``s`` of them are there.
    """

    k: Shaped[Array, "slots k s h"]
    v: Shaped[Array, "slots k s g"] | None
    row: Int[Array, ""] | int
    start: Int[Array, " b"]
    span: Int[Array, ""]
    ring: bool = static(default=False)


@pytree
class _Softmax:
    """Running maximum, weight sum and weighted values of an online softmax."""

    peak: Float[Array, "b k n t 1"]
    weight: Float[Array, "b k n t 1"]
    value: Float[Array, "b k n t g"]


def attend(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b k t h"],
    v: Float[Array, "b k t g"],
    mask: Bool[Array, "b t t"],
    prefix: Prefix | None,
    *,
    scale: float,
    window: int | None,
    key_block: int,
    sinks: Float[Array, " n"] | None = None,
) -> Float[Array, "b t n g"]:
    """Grouped-query attention; query head ``n`` reads key head ``n // (heads / kv_heads)``.

    Args:
        mask: what each position of the block sees of the block; every position sees itself.
        scale: factor on the scores.
        window: a query sees only the last ``window`` positions, itself included; ``None`` sees all.
        key_block: positions of the prefix read at a time; divides the cache's length.
        sinks: a score of each query head for nothing at all: it takes its share of the weight and has no value
            (gpt-oss).
    """
    b, t, n, h = q.shape
    kv, size = k.shape[1], v.shape[-1]
    grouped = q.reshape(b, t, kv, n // kv, h).transpose(0, 2, 3, 1, 4)
    offsets = jnp.arange(t)
    if window is not None:
        mask = mask & (offsets[:, None] - offsets[None, :] < window)
    rows = (*grouped.shape[:-1], 1)
    if sinks is None:
        peak, weight = jnp.full(rows, MASKED, jnp.float32), jnp.zeros(rows, jnp.float32)
    else:
        peak = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(1, kv, n // kv, 1, 1), rows)
        weight = jnp.ones(rows, jnp.float32)
    state = _Softmax(peak, weight, jnp.zeros((*rows[:-1], size), jnp.float32))
    for at in range(0, t, OWN_KEYS):
        own = slice(at, min(at + OWN_KEYS, t))
        state = _absorb(state, grouped, k[:, :, own], v[:, :, own], mask[:, :, own], scale)
    if prefix is not None:
        state = _absorb_prefix(state, grouped, prefix, size, scale, window, key_block)
    out = (state.value / state.weight).astype(q.dtype)
    return out.transpose(0, 3, 1, 2, 4).reshape(b, t, n, size)


def _absorb_prefix(
    state: _Softmax,
    q: Float[Array, "b k n t h"],
    prefix: Prefix,
    value_size: int,
    scale: float,
    window: int | None,
    key_block: int,
) -> _Softmax:
    b, kv, _, t, h = q.shape
    queries = prefix.start[:, None] + jnp.arange(t)
    stored, last = prefix.k.shape[2], prefix.start - 1

    def absorb_block(index: Int[Array, ""], state: _Softmax) -> _Softmax:
        at = (prefix.row, 0, index * key_block, 0)
        keys = as_stored(jax.lax.dynamic_slice(prefix.k, at, (b, kv, key_block, h)), q)
        if prefix.v is None:
            values = keys[..., :value_size]
        else:
            values = as_stored(jax.lax.dynamic_slice(prefix.v, at, (b, kv, key_block, value_size)), q)
        positions = jnp.broadcast_to(index * key_block + jnp.arange(key_block), (b, key_block))
        if prefix.ring:
            positions = last[:, None] - (last[:, None] - positions) % stored
        written = (positions < prefix.start[:, None]) & (positions >= 0)
        visible = jnp.broadcast_to(written[:, None, :], (b, t, key_block))
        if window is not None:
            visible = visible & (queries[:, :, None] - positions[:, None, :] < window)
        # What lies beyond a row's start is somebody's leftover: 0 x NaN is NaN, so it is zeroed and not only masked.
        values = jnp.where(written[:, None, :, None], values, jnp.zeros_like(values))
        return _absorb(state, q, keys, values, visible, scale)

    span = jnp.minimum(prefix.span, stored)
    return jax.lax.fori_loop(0, (span + key_block - 1) // key_block, absorb_block, state)


def _absorb(
    state: _Softmax,
    q: Float[Array, "b k n t h"],
    keys: Float[Array, "b k s h"],
    values: Float[Array, "b k s g"],
    visible: Bool[Array, "b t s"],
    scale: float,
) -> _Softmax:
    b, kv, g, t, h = q.shape
    flat = q.reshape(b, kv, g * t, h)
    scores = jnp.einsum("bkqh,bksh->bkqs", flat, keys, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(visible[:, None, None], scores.reshape(b, kv, g, t, -1), MASKED)
    peak = jnp.maximum(state.peak, jnp.max(scores, axis=-1, keepdims=True))
    shrink = jnp.exp(state.peak - peak)
    weights = jnp.exp(scores - peak)
    mixed = jnp.einsum(
        "bkqs,bksh->bkqh",
        weights.astype(values.dtype).reshape(b, kv, g * t, -1),
        values,
        preferred_element_type=jnp.float32,
    )
    return _Softmax(
        peak=peak,
        weight=state.weight * shrink + jnp.sum(weights, axis=-1, keepdims=True),
        value=state.value * shrink + mixed.reshape(b, kv, g, t, -1),
    )
