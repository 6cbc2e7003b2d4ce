"""Attention of a block of new positions over a cached prefix and over itself.

One function for every pass: whole sequence (no prefix), prefill chunk, decode step, draft verification, denoising.
The prefix is always visible up to ``start``; inside the block an explicit mask decides. Softmax runs online in
float32 (Milakov & Gimelshein 2018), over key blocks that begin at multiples of their size, in the order of positions:
new keys are put among the cached ones, where they will lie. So a query's sums have the same order however its text is
cut into passes, and a key block that a row does not see changes nothing in that row, bit for bit: the numbers depend
neither on the row's company nor on drafts nor on where a chunk ends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxserve.models.cache import as_stored
from jaxserve.models.layers import row_sums
from jaxserve.pytree import pytree, static

# Large and finite: a masked score's weight is exp(MASKED - m) = 0 exactly, and no inf - inf can arise. What a query
# gathers before the first key that it sees is garbage, and exp(MASKED - m) = 0 wipes it out, too.
MASKED = -1e30
# Up to so many new positions are put among the cached ones by selects, which XLA fuses with the read.
FEW_KEYS = 8
# Keys of the block itself that are taken at a time where they cannot be put among a ring's: it bounds the scores.
OWN_KEYS = 1024


@pytree
class Prefix:
    """One layer's cached entries of rows ``row .. row+b-1``, visible at positions below ``start``.

    Attributes:
        v: values, or ``None`` where they are the first numbers of the keys (a latent, in MLA).
        span: the longest start that matters: key blocks beyond it and the new positions are not read.
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


@pytree
class _Own:
    """The block's own keys and values, and what each query sees of them: ``[b, 1, key, query]``."""

    k: Float[Array, "b k t h"]
    v: Float[Array, "b k t g"]
    seen: Bool[Array, "b 1 t t"]


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
    reach: Int[Array, "b t"] | None = None,
) -> Float[Array, "b t n g"]:
    """Grouped-query attention; query head ``n`` reads key head ``n // (heads / kv_heads)``.

    Args:
        mask: what each position of the block sees of the block; every position sees itself.
        scale: factor on the scores.
        window: a query sees only the last ``window`` positions, itself included; ``None`` sees all.
        key_block: positions read at a time; divides the cache's length.
        sinks: a score of each query head for nothing at all: it takes its share of the weight and has no value
            (gpt-oss).
        reach: place in the block from which each query's window counts back; ``None`` is its own.
    """
    b, t, n, h = q.shape
    kv, size = k.shape[1], v.shape[-1]
    grouped = q.reshape(b, t, kv, n // kv, h).transpose(0, 2, 3, 1, 4)
    reach = jnp.arange(t)[None] if reach is None else reach
    if window is not None:
        mask = mask & (reach[:, :, None] - jnp.arange(t) < window)
    rows = (*grouped.shape[:-1], 1)
    if sinks is None:
        peak, weight = jnp.full(rows, MASKED, jnp.float32), jnp.zeros(rows, jnp.float32)
    else:
        peak = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(1, kv, n // kv, 1, 1), rows)
        weight = jnp.ones(rows, jnp.float32)
    state = _Softmax(peak, weight, jnp.zeros((*rows[:-1], size), jnp.float32))
    absorb = functools.partial(_absorb, q=grouped, scale=scale)
    own = _Own(k, v, mask.swapaxes(1, 2)[:, None])
    cached = functools.partial(
        _absorb_prefix, absorb=absorb, like=q, value_size=size, window=window, reach=reach, key_block=key_block
    )
    if prefix is None:
        state = _absorb_own(state, absorb, own, key_block)
    elif prefix.ring and not _fits(prefix, t, window):
        state = _absorb_own(state, absorb, own, OWN_KEYS)
        state = cached(state, prefix, None)
    else:
        state = cached(state, prefix, own)
    out = (state.value / state.weight).astype(q.dtype)
    return out.transpose(0, 3, 1, 2, 4).reshape(b, t, n, size)


def _fits(prefix: Prefix, t: int, window: int | None) -> bool:
    """Whether a ring has room for new positions beside all that the first of them sees."""
    stored = prefix.k.shape[2]
    return t <= FEW_KEYS and stored - (stored if window is None else window) >= t - 1


def _absorb_own(state: _Softmax, absorb: Callable[..., _Softmax], own: _Own, key_block: int) -> _Softmax:
    """The block's own keys alone, in whole key blocks."""
    padding = -own.k.shape[2] % key_block
    own = jax.tree.map(lambda leaf: jnp.pad(leaf, ((0, 0), (0, 0), (0, padding), (0, 0))), own)

    def absorb_block(index: Int[Array, ""], state: _Softmax) -> _Softmax:
        part = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, index * key_block, key_block, 2), own)
        return absorb(state, keys=part.k, values=part.v, visible=part.seen[:, 0].swapaxes(1, 2))

    return jax.lax.fori_loop(0, own.k.shape[2] // key_block, absorb_block, state)


def _absorb_prefix(
    state: _Softmax,
    prefix: Prefix,
    own: _Own | None,
    *,
    absorb: Callable[..., _Softmax],
    like: Float[Array, "b t n h"],
    value_size: int,
    window: int | None,
    reach: Int[Array, "#b t"],
    key_block: int,
) -> _Softmax:
    """Cached keys, with the block's own at their places among them if they come along."""
    (b, t), (_, kv, stored, h) = like.shape[:2], prefix.k.shape
    queries, last = prefix.start[:, None] + reach, prefix.start - 1

    def absorb_block(index: Int[Array, ""], state: _Softmax) -> _Softmax:
        at = (prefix.row, 0, index * key_block, 0)
        keys = as_stored(jax.lax.dynamic_slice(prefix.k, at, (b, kv, key_block, h)), like)
        if prefix.v is None:
            values = keys[..., :value_size]
        else:
            values = as_stored(jax.lax.dynamic_slice(prefix.v, at, (b, kv, key_block, value_size)), like)
        positions = jnp.broadcast_to(index * key_block + jnp.arange(key_block), (b, key_block))
        offset = positions - prefix.start[:, None]  # among the new positions
        if prefix.ring:
            offset = offset % stored
            positions = last[:, None] - (last[:, None] - positions) % stored
        written = (positions < prefix.start[:, None]) & (positions >= 0)
        visible = jnp.broadcast_to(written[:, None, :], (b, t, key_block))
        if window is not None:
            visible = visible & (queries[:, :, None] - positions[:, None, :] < window)
        # What lies beyond a row's start is somebody's leftover: 0 x NaN is NaN, so it is zeroed and not only masked.
        values = jnp.where(written[:, None, :, None], values, jnp.zeros_like(values))
        if own is not None:
            seen = visible[:, None].swapaxes(2, 3)
            keys, values, seen = _put_among((keys, values, seen), (own.k, own.v, own.seen), offset)
            visible = seen[:, 0].swapaxes(1, 2)
        return absorb(state, keys=keys, values=values, visible=visible)

    last_one = prefix.span + (t if own is not None else 0)
    return jax.lax.fori_loop(0, (jnp.minimum(last_one, stored) + key_block - 1) // key_block, absorb_block, state)


def _put_among(cached: tuple[Array, ...], own: tuple[Array, ...], offset: Int[Array, "b s"]) -> tuple[Array, ...]:
    """What is cached, and at each place whose offset is one of the block's positions that position's own."""
    t = own[0].shape[2]
    if t <= FEW_KEYS:
        for j in range(t):
            here = (offset == j)[:, None, :, None]
            cached = tuple(jnp.where(here, new[:, :, j : j + 1], old) for new, old in zip(own, cached, strict=True))
        return cached
    here = (offset >= 0) & (offset < t)

    def put(cached: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(
            jnp.where(here[:, None, :, None], _at_offsets(new, offset), old)
            for new, old in zip(own, cached, strict=True)
        )

    return jax.lax.cond(jnp.any(here), put, lambda cached: cached, cached)


def _at_offsets(own: Shaped[Array, "b k t x"], offset: Int[Array, "b s"]) -> Shaped[Array, "b k s x"]:
    """For consecutive offsets a slice of each row; beyond its ends zeros."""
    s = offset.shape[1]
    padded = jnp.pad(own, ((0, 0), (0, 0), (s, s), (0, 0)))
    first = jnp.clip(offset[:, 0] + s, 0, own.shape[2] + s)
    return jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, s, axis=1))(padded, first)


def _absorb(
    state: _Softmax,
    *,
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
        weight=state.weight * shrink + row_sums(weights),
        value=state.value * shrink + mixed.reshape(b, kv, g, t, -1),
    )
