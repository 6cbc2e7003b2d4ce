"""The routed product: each token through the few experts that its router chose, weighted and summed.

Knows how tokens and experts are brought together: on one device in blocks or in grouped products, and over a mesh.
It does not know who chose (``moe``), nor how packed kernels are unpacked (``quant``), nor how a grouped product is
computed (``kernels``).

A token's result does not depend on the other tokens of the batch, bit for bit: every block has the same number of
rows, and a token's experts are summed in the order of its own choice.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxserve.axes import MeshShape, split
from jaxserve.models.kernels import grouped, native
from jaxserve.models.layers import product
from jaxserve.models.passes import UNPLANNED, Routing
from jaxserve.models.quant import Packed
from jaxserve.models.streamed import lanes, streamed
from jaxserve.plan.exchange import places as places_for
from jaxserve.pytree import pytree
from jaxserve.sharding import axis_size, spec

Activation = Callable[[Array, Array], Array]
# Of rows [p, k] sorted by expert, kernels [e, n, k] and where each expert's rows end: [p, n] in float32.
GroupedProduct = Callable[[Array, Array, Array], Array]

# Tokens that an expert has on average, up to which they are read for one by one.
LONELY = 1 / 4
# Rows of a block that is multiplied: 8 cost what 2 cost, and XLA:CPU is slow at products with a single one.
FEW_ROWS, MOST_ROWS = 8, 128
# Of a kernel that is multiplied at once; XLA:CPU copies it first.
PART_BYTES = 1 << 20

_KERNEL_AXES = ("experts", None, "ffn")
_BIAS_AXES = ("experts",)


@pytree
class ExpertWeights:
    """What a layer's experts hold: ``[e, 2, f, d]`` for gate and up, ``[e, d, f]`` for down, and biases."""

    gate_up: Array | Packed
    down: Array | Packed
    gate_up_bias: Float[Array, "e 2 f"] | None = None
    down_bias: Float[Array, "e d"] | None = None

    @property
    def count(self) -> int:
        """How many experts."""
        return int(jax.tree.leaves(self.gate_up)[0].shape[0])


@pytree
class _Groups:
    """Pairs of a token and one of its experts, sorted by expert.

    Attributes:
        pairs: number ``token * c + choice`` of each, those of no expert last.
        places: where each token's choices stand among them.
        ends: where each expert's end.
    """

    pairs: Int[Array, " p"]
    places: Int[Array, "m c"]
    ends: Int[Array, " e"]


def routed(
    x: Float[Array, "m d"],
    chosen: Int[Array, "m c"],
    weights: Float[Array, "m c"],
    experts: ExpertWeights,
    activation: Activation,
    real: Bool[Array, " m"] | None = None,
    routing: Routing = UNPLANNED,
) -> Float[Array, "m d"]:
    """``sum_j weights_j * down_j(activation(gate_j(x), up_j(x)))`` over each token's experts.

    Everything behind the first product is summed in float32. Under a mesh (``jax.set_mesh``) each device computes with
    its own experts, and its own part of their feed-forward axis, only.

    Args:
        x: tokens.
        chosen: experts of each, all different.
        weights: of each, in float32.
        activation: of gate and up.
        real: tokens that matter, by default all; the others go to no expert and give zeros.
        routing: what multiplies, and over a mesh from how many tokens on each is sent to its experts' devices only.
    """
    if real is not None:
        chosen = jnp.where(real[:, None], chosen, experts.count)
    if axis_size("expert") * axis_size("tensor") == 1:
        rows = block_rows(len(x), chosen.shape[1], experts.count)
        return _together(x, chosen, weights, experts, activation, rows, routing).astype(x.dtype)
    return _over_mesh(x, chosen, weights, experts, activation, routing)


# --- on one device ----------------------------------------------------------------------------------------------------


def _product(x: Float[Array, "r k"], kernels: Array | Packed, index: Int[Array, ""]) -> Float[Array, "r n"]:
    """With the kernel of one expert, in float32."""
    if isinstance(kernels, Packed):
        return product(x, kernels[index].dense(x.dtype).reshape(-1, x.shape[1]), jnp.float32)
    if len(x) == 1:
        return streamed(x, kernels.reshape(len(kernels), -1, x.shape[1]), index)
    parts = _parts(math.prod(kernels.shape[1:-1]), kernels)
    cut = kernels.reshape(len(kernels), parts, -1, x.shape[1])

    def multiply(at: Int[Array, ""], y: Float[Array, "p r n"]) -> Float[Array, "p r n"]:
        part = jax.lax.dynamic_slice(cut, (index, at, 0, 0), (1, 1, *cut.shape[2:])).reshape(cut.shape[2:])
        return jax.lax.dynamic_update_index_in_dim(y, product(x, part, jnp.float32), at, axis=0)

    y = jnp.zeros((parts, len(x), cut.shape[2]), jnp.float32)
    y = jax.lax.fori_loop(0, parts, multiply, y) if parts > 1 else multiply(jnp.int32(0), y)
    return y.swapaxes(0, 1).reshape(len(x), -1)


def _parts(rows: int, kernels: Array) -> int:
    """Into how many parts an expert's kernel falls, so that what XLA:CPU copies of it stays in a core's cache."""
    size, parts = rows * kernels.shape[-1] * kernels.dtype.itemsize, 1
    while size > parts * PART_BYTES and rows % (2 * parts) == 0:
        parts *= 2
    return parts


def _streams(kernels: Array | Packed) -> bool:
    return not isinstance(kernels, Packed) and lanes(kernels.shape[-1]) is not None


def block_rows(tokens: int, chosen: int, experts: int) -> int:
    """Rows of a block: one where hardly any expert has two tokens, else as many as its tokens mostly need.

    A pass over a block reads the whole expert, so a second block of the same expert reads it again; rows that stand
    for nobody cost products. Shapes alone decide, never what was chosen.
    """
    mean = tokens * chosen / experts
    if mean <= LONELY:
        return 1
    rows = 1 << max(math.ceil(math.log2(2 * mean)), 0)
    return max(min(max(rows, FEW_ROWS), MOST_ROWS, tokens), 2)


def _together(
    x: Float[Array, "m d"],
    chosen: Int[Array, "m c"],
    weights: Float[Array, "m c"],
    experts: ExpertWeights,
    activation: Activation,
    rows: int,
    routing: Routing = UNPLANNED,
) -> Float[Array, "m d"]:
    """All of it in float32, in the form that each platform is fast at; ``rows`` are those of a block."""
    groups = _sort(chosen, experts.count)
    if rows == 1 and not (_streams(experts.gate_up) and _streams(experts.down)):
        rows = 2
    blocks = functools.partial(_in_blocks, activation=activation, rows=rows)
    if isinstance(experts.gate_up, Packed) or isinstance(experts.down, Packed):
        # Unpacked one by one: all at once would need the memory that packing saves.
        return blocks(x, groups, weights, experts)
    on_accelerator = functools.partial(_on_accelerator, setting=routing.product)
    in_groups = functools.partial(_grouped, activation=activation, product=on_accelerator)
    alike = {x.dtype, experts.gate_up.dtype, experts.down.dtype} == {x.dtype}
    if routing.native and alike and native.usable(x.dtype):
        blocks = functools.partial(in_groups, product=native.grouped)
    return jax.lax.platform_dependent(x, groups, weights, experts, cpu=blocks, default=in_groups)


def _sort(chosen: Int[Array, "m c"], experts: int) -> _Groups:
    """A sort of unique numbers, and one of the order that it gives: XLA:CPU scatters one element at a time."""
    count = chosen.size
    ordered = jnp.sort(chosen.reshape(-1) * count + jnp.arange(count, dtype=chosen.dtype))
    pairs = ordered % count
    beyond = (jnp.arange(experts, dtype=ordered.dtype) + 1) * count
    ends = jnp.searchsorted(ordered, beyond, method="compare_all")
    return _Groups(pairs, jnp.argsort(pairs).astype(chosen.dtype).reshape(chosen.shape), ends)


def _in_blocks(
    x: Float[Array, "m d"],
    groups: _Groups,
    weights: Float[Array, "m c"],
    experts: ExpertWeights,
    *,
    activation: Activation,
    rows: int,
) -> Float[Array, "m d"]:
    """The sorted pairs block by block: only experts that somebody chose are read.

    A block's last rows may belong to the next expert's tokens; the next block writes those anew.
    """
    sizes = jnp.diff(groups.ends, prepend=0)
    last = jnp.cumsum(-(-sizes // rows))
    choices = groups.places.shape[1]
    pairs = jnp.pad(groups.pairs, (0, rows))

    def compute(index: Int[Array, ""], out: Float[Array, "r d"]) -> Float[Array, "r d"]:
        expert = jnp.sum(last <= index)
        before = jnp.where(expert > 0, last[expert - 1], 0)  # blocks of the experts before it
        at = groups.ends[expert] - sizes[expert] + (index - before) * rows
        tokens = jax.lax.dynamic_slice_in_dim(pairs, at, rows) // choices
        return jax.lax.dynamic_update_slice_in_dim(out, _expert(x[tokens], experts, expert, activation), at, axis=0)

    out = jnp.zeros((len(groups.pairs) + rows, x.shape[1]), jnp.float32)
    return _combine(jax.lax.fori_loop(0, last[-1], compute, out), groups, weights)


def _combine(y: Float[Array, "r d"], groups: _Groups, weights: Float[Array, "m c"]) -> Float[Array, "m d"]:
    """Sums what each token's experts gave, in the order of its choice; behind the last pair stands garbage."""
    there, total = groups.places < groups.ends[-1], jnp.zeros((len(weights), y.shape[1]), jnp.float32)
    for choice in range(weights.shape[1]):
        part = weights[:, choice, None] * y[groups.places[:, choice]]
        total = total + jnp.where(there[:, choice, None], part, 0)
    return total


def _expert(
    x: Float[Array, "r d"], experts: ExpertWeights, index: Int[Array, ""], activation: Activation
) -> Float[Array, "r d"]:
    both = _product(x, experts.gate_up, index).reshape(len(x), 2, -1)
    if experts.gate_up_bias is not None:
        both = both + experts.gate_up_bias[index]
    inner = activation(both[:, 0], both[:, 1]).astype(x.dtype)
    y = _product(inner, experts.down, index)
    return y if experts.down_bias is None else y + experts.down_bias[index]


def _grouped(
    x: Float[Array, "m d"],
    groups: _Groups,
    weights: Float[Array, "m c"],
    experts: ExpertWeights,
    *,
    activation: Activation,
    product: GroupedProduct,
) -> Float[Array, "m d"]:
    """The same by grouped products of all pairs at once."""
    expert = jnp.searchsorted(groups.ends, jnp.arange(len(groups.pairs)), side="right", method="scan_unrolled")
    assert isinstance(experts.gate_up, jax.Array)
    assert isinstance(experts.down, jax.Array)
    tokens = x[groups.pairs // groups.places.shape[1]]
    both = product(tokens, experts.gate_up.reshape(experts.count, -1, x.shape[1]), groups.ends)
    both = both.reshape(len(tokens), 2, -1)
    if experts.gate_up_bias is not None:
        both = both + experts.gate_up_bias[expert]
    y = product(activation(both[:, 0], both[:, 1]).astype(x.dtype), experts.down, groups.ends)
    return _combine(y if experts.down_bias is None else y + experts.down_bias[expert], groups, weights)


def _on_accelerator(
    rows: Float[Array, "p k"], kernels: Float[Array, "e n k"], ends: Int[Array, " e"], setting: str = grouped.AUTO
) -> Float[Array, "p n"]:
    return grouped.grouped(rows, kernels, jnp.diff(ends, prepend=0), setting)


# --- over a mesh ------------------------------------------------------------------------------------------------------


def _over_mesh(
    x: Float[Array, "m d"],
    chosen: Int[Array, "m c"],
    weights: Float[Array, "m c"],
    experts: ExpertWeights,
    activation: Activation,
    routing: Routing,
) -> Float[Array, "m d"]:
    held = (experts.gate_up, experts.down, experts.gate_up_bias, experts.down_bias)
    mesh = MeshShape(axis_size("expert"), axis_size("tensor"))
    kernels = jax.tree.leaves(held[:3])
    apart = mesh.expert > 1 and all(split(_BIAS_AXES, leaf.shape, mesh)[0] for leaf in kernels)
    halved = all(split(_KERNEL_AXES, leaf.shape, mesh)[2] for leaf in kernels)
    devices = mesh.expert if apart else 1
    enough = routing.exchange_tokens is not None and len(x) >= routing.exchange_tokens
    exchange = enough and devices > 1 and len(x) % devices == 0
    # Of all tokens and experts, so that no token's numbers depend on where the others go.
    rows = block_rows(len(x), chosen.shape[1], experts.count)
    axes = _KERNEL_AXES if halved else _BIAS_AXES
    in_specs = tuple(
        jax.tree.map(lambda leaf, axes=axes: spec(axes, leaf.shape), part)
        for part, axes in zip(held, (axes, axes, axes, _BIAS_AXES), strict=True)
    )

    def on_device(x: Array, chosen: Array, weights: Array, *held: Any) -> Array:
        own = ExpertWeights(*held)
        if own.down_bias is not None and halved:
            bias = jnp.where(jax.lax.axis_index("tensor") == 0, own.down_bias, 0)
            own = ExpertWeights(own.gate_up, own.down, own.gate_up_bias, bias)
        compute = functools.partial(_own_share, experts=own, activation=activation, rows=rows, routing=routing)
        if exchange:
            y = _exchange(x, chosen, weights, compute, devices, own.count)
        else:
            first = jax.lax.axis_index("expert") * own.count if apart else 0
            y = compute(x, chosen - first, weights)
        over = ("expert",) * (apart and not exchange) + ("tensor",) * halved
        return (jax.lax.psum(y, over) if over else y).astype(x.dtype)

    operands = (x, chosen, weights)
    tokens = tuple(spec(("tokens" if exchange else None, None), part.shape) for part in operands)
    run = jax.shard_map(on_device, in_specs=(*tokens, *in_specs), out_specs=tokens[0], check_vma=False)
    return run(*operands, *held)


def _own_share(
    x: Float[Array, "m d"],
    chosen: Int[Array, "m c"],
    weights: Float[Array, "m c"],
    experts: ExpertWeights,
    activation: Activation,
    rows: int,
    routing: Routing,
) -> Float[Array, "m d"]:
    """What this device's experts give; ``chosen`` counts from its first one, and others are nobody here."""
    here = (chosen >= 0) & (chosen < experts.count)
    return _together(x, jnp.where(here, chosen, experts.count), weights, experts, activation, rows, routing)


def _exchange(
    x: Float[Array, "i d"],
    chosen: Int[Array, "i c"],
    weights: Float[Array, "i c"],
    compute: Callable[[Array, Array, Array], Array],
    devices: int,
    own: int,
) -> Float[Array, "i d"]:
    """Sends this device's tokens to the devices of their experts, ``own`` on each, and sums what comes back.

    Nothing is ever dropped: where a device is chosen by more tokens than there are places, all devices take the way
    that has a place for every token.
    """
    count = len(x)
    wanted = jnp.any(chosen // own == jnp.arange(devices)[:, None, None], axis=-1)
    number = jnp.cumsum(wanted, axis=1)  # [devices, i]: how many of the tokens so far go there

    def travel(places: int) -> Float[Array, "i d"]:
        seats = jnp.arange(1, places + 1)
        find = functools.partial(jnp.searchsorted, method="scan_unrolled")
        token = jax.vmap(lambda row: find(row, seats))(number)
        there = (token < count)[..., None]
        token = jnp.minimum(token, count - 1)
        first = jnp.arange(devices)[:, None, None] * own
        sent = (x[token], jnp.where(there, chosen[token] - first, own), weights[token])
        sent = jax.tree.map(_swap, sent)
        y = compute(*(part.reshape(devices * places, -1) for part in sent)).reshape(devices, places, -1)
        y = _swap(y)
        total = jnp.zeros(x.shape, jnp.float32)
        for device in range(devices):
            back = y[device, jnp.clip(number[device] - 1, 0, places - 1)]
            total = total + jnp.where(wanted[device, :, None], back, 0)
        return total

    places = places_for(count, chosen.shape[1], devices)
    if places == count:
        return travel(count)
    crowded = jax.lax.pmax(jnp.max(number[:, -1]), "expert") > places
    return jax.lax.cond(crowded, lambda: travel(count), lambda: travel(places))


def _swap(parts: Array) -> Array:
    """Part ``r`` goes to device ``r``; what comes from device ``r`` becomes part ``r``."""
    return jax.lax.all_to_all(parts, "expert", 0, 0, tiled=True)
