"""Grouped products on accelerators: rows sorted by expert, each times the kernel of its expert.

Knows which product a platform has for which shapes, and the tiles of each: ``megablox``, the Pallas kernel that JAX
ships for TPUs; ``triton``, a Pallas kernel of our own for GPUs; ``tokamax``, a package by Google DeepMind, where
somebody installed it and asks for it; ``ragged_dot``, XLA's own, everywhere else. It does not know who chose the
experts, nor how the CPU multiplies (``experts`` does).

Nobody has run these kernels on the devices they are for: they are interpreted on the CPU against plain products,
lowered for both platforms in tests, and were compiled for both by hand (DECISIONS.md, 2026-12-01).
``engine.expert_product: ragged_dot`` turns them off.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas
from jax.experimental.pallas import triton
from jax.experimental.pallas.ops.tpu.megablox import gmm
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxserve.errors import ConfigError

Form = Callable[[Array, Array, Array], Array]

AUTO, RAGGED_DOT, TOKAMAX, MEGABLOX, TRITON = "auto", "ragged_dot", "tokamax", "megablox", "triton"
PLATFORMS = {"gpu": "cuda", "cuda": "cuda", "tpu": "tpu"}
# TPU. A tile's last axis has whole vector registers; two copies of each operand's tile and of the result's, and the
# sum, are 8 MiB at most, of the 16 that a kernel may take by default.
LANES, ROW_UNIT = 128, 16
TPU_ROWS, TPU_COLUMNS, TPU_INNER_BYTES = (128, 512), 512, 2048
# GPU. Sizes are powers of two; three stages of operands are 72 KiB at most, of the 99 that the smallest has.
GPU_ROWS, GPU_COLUMNS, GPU_INNER_BYTES, GPU_STAGES, GPU_WARPS = (16, 64), 128, 128, 3, 4

_OUT_IN = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=(0,)
)


def grouped(
    rows: Float[Array, "p k"], kernels: Float[Array, "e n k"], sizes: Int[Array, " e"], setting: str = AUTO
) -> Float[Array, "p n"]:
    """``rows[i] @ kernels[expert of i].T``, accumulated in float32, by the product that ``choice`` names.

    A row's numbers do not depend on where it stands nor on the other rows; those of ``ragged_dot`` are XLA's matter.

    Args:
        rows: sorted by expert; behind the last of an expert stand others, for which anything is returned.
        sizes: rows of each expert, int32.
        setting: ``engine.expert_product``.

    Raises:
        ConfigError: the setting asks for a package that is not there.
    """
    forms = {to: _form(to, kernels.shape, (rows.dtype, kernels.dtype), setting) for to in ("cuda", "tpu")}
    return jax.lax.platform_dependent(rows, kernels, sizes, **forms, default=_ragged_dot)


def choice(
    platform: str, kernels: tuple[int, ...], dtypes: tuple[DTypeLike, DTypeLike], setting: str = AUTO
) -> str | None:
    """Which product is used on a platform; ``None`` where this module has no say, as on the CPU.

    Where ``tokamax`` refuses a shape (rows that 128 does not divide, on a TPU), what ``auto`` takes stands in for it.

    Args:
        platform: ``cuda`` or ``gpu``, ``tpu``, or another one.
        kernels: their shape ``[e, n, k]``, of one device.
        dtypes: of the rows and of the kernels.
        setting: ``auto``, ``ragged_dot`` or ``tokamax``.

    Raises:
        ConfigError: the setting asks for a package that is not there.
    """
    to = PLATFORMS.get(platform)
    if to is None:
        return None
    if setting == TOKAMAX:
        if importlib.util.find_spec(TOKAMAX) is None:
            raise ConfigError(
                "engine.expert_product: tokamax is not installed (pip install 'jaxserve-engine[tokamax]')",
                param="engine.expert_product",
            )
        return TOKAMAX
    of_rows, of_kernels = (jnp.dtype(dtype) for dtype in dtypes)
    if setting == RAGGED_DOT or of_rows != of_kernels or of_rows not in (jnp.bfloat16, jnp.float32):
        return RAGGED_DOT
    if to == "cuda":
        return TRITON
    _, n, k = kernels
    return RAGGED_DOT if n % LANES or k % LANES else MEGABLOX


def _form(to: str, kernels: tuple[int, ...], dtypes: tuple[DTypeLike, DTypeLike], setting: str) -> Form:
    """The product itself; XLA's where another one cannot be lowered, because the device is not there to be asked."""
    product, forms = choice(to, kernels, dtypes, setting), {RAGGED_DOT: _ragged_dot, MEGABLOX: _megablox}
    if _target() == to:
        forms[TRITON] = _triton
        if product == TOKAMAX:
            return functools.partial(_tokamax, to=to, otherwise=_form(to, kernels, dtypes, AUTO))
    return forms.get(product or RAGGED_DOT, _ragged_dot)


def _target() -> str | None:
    """What is being traced for: the mesh's devices, which may be those of another machine, else what is here."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return PLATFORMS.get(jax.default_backend() if device is None else device.platform)


def _ragged_dot(
    rows: Float[Array, "p k"], kernels: Float[Array, "e n k"], sizes: Int[Array, " e"]
) -> Float[Array, "p n"]:
    return jax.lax.ragged_dot_general(rows, kernels, sizes, _OUT_IN, preferred_element_type=jnp.float32)


def _tokamax(
    rows: Float[Array, "p k"], kernels: Float[Array, "e n k"], sizes: Int[Array, " e"], *, to: str, otherwise: Form
) -> Float[Array, "p n"]:
    """Its Mosaic kernels by name: left to itself it would take XLA's product where they refuse."""
    product: Any = importlib.import_module(TOKAMAX).ragged_dot_general
    mosaic = {"cuda": "mosaic_gpu", "tpu": "mosaic_tpu"}[to]
    try:
        y: Array = product(rows, kernels, sizes, _OUT_IN, preferred_element_type=jnp.float32, implementation=mosaic)
    except NotImplementedError:
        return otherwise(rows, kernels, sizes)
    return y


# --- TPU --------------------------------------------------------------------------------------------------------------


def tpu_tiles(rows: int, kernels: tuple[int, ...], itemsize: int) -> tuple[int, int, int]:
    """Rows, inner and outer columns of a tile.

    An expert's kernel is read once for each tile of rows: with as many rows as an expert has on average most are read
    once, and below 128 reading takes longer than multiplying. An axis of a kernel falls into as few tiles as fit, of
    nearly the same size.
    """
    experts, n, k = kernels
    least, most = TPU_ROWS
    height = min(max(_power(rows / experts), least), most, _up(rows, ROW_UNIT))
    return height, _even(k, TPU_INNER_BYTES // itemsize), _even(n, TPU_COLUMNS)


def _even(size: int, most: int) -> int:
    return _up(-(-size // -(-size // most)), LANES)


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _power(mean: float) -> int:
    """The power of two at or above a number, at least 1."""
    return 1 << max(math.ceil(math.log2(mean)), 0) if mean > 0 else 1


def _megablox(
    rows: Float[Array, "p k"], kernels: Float[Array, "e n k"], sizes: Int[Array, " e"], *, interpret: bool = False
) -> Float[Array, "p n"]:
    """Rows are padded to whole tiles; a tile that several experts share is visited by each, which writes its own."""
    tiles = tpu_tiles(len(rows), kernels.shape, rows.dtype.itemsize)
    padded = jnp.pad(rows, ((0, -len(rows) % tiles[0]), (0, 0)))
    y: Array = gmm(padded, kernels, sizes, jnp.float32, tiles, transpose_rhs=True, interpret=interpret)
    return y[: len(rows)]


# --- GPU --------------------------------------------------------------------------------------------------------------


def gpu_tiles(rows: int, kernels: tuple[int, ...], itemsize: int) -> tuple[int, int, int]:
    """Rows, inner and outer columns of a tile: as many rows as an expert has on average, of 16 to 64."""
    experts, n, _ = kernels
    least, most = GPU_ROWS
    return (
        min(max(_power(rows / experts), least), most),
        GPU_INNER_BYTES // itemsize,
        min(max(_power(float(n)), 16), GPU_COLUMNS),
    )


def _triton(
    rows: Float[Array, "p k"], kernels: Float[Array, "e n k"], sizes: Int[Array, " e"], *, interpret: bool = False
) -> Float[Array, "p n"]:
    """Blocks of rows of one expert each, as many as there may be; one that nobody needs ends at once."""
    (p, k), (e, n, _) = rows.shape, kernels.shape
    height, inner, columns = gpu_tiles(p, kernels.shape, rows.dtype.itemsize)
    blocks = -(-sizes // height)
    ends, last = jnp.cumsum(sizes), jnp.cumsum(blocks)
    number = jnp.arange((p + min(e, p) * (height - 1)) // height, dtype=jnp.int32)
    expert = jnp.sum(last[:, None] <= number, axis=0, dtype=jnp.int32)
    there, expert = expert < e, jnp.minimum(expert, e - 1)
    first = (ends - sizes)[expert] + (number - (last - blocks)[expert]) * height
    count = jnp.where(there, jnp.minimum(ends[expert] - first, height), 0)
    # Who asks for float32 wants its digits, not those of TF32.
    precision = jax.lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None

    def body(rows: Any, kernels: Any, expert: Any, first: Any, count: Any, y: Any) -> None:
        block, right = pallas.program_id(0), pallas.program_id(1) * columns
        own = triton.load(count.at[block])

        @pallas.when(own > 0)
        def multiply() -> None:
            of, top = triton.load(expert.at[block]), triton.load(first.at[block])
            below, beside = jnp.arange(height) < own, jnp.arange(columns) < n - right

            def add(step: Array, total: Array) -> Array:
                within = jnp.arange(inner) < k - step * inner
                at = pallas.ds(step * inner, inner)
                x = triton.load(rows.at[pallas.ds(top, height), at], mask=below[:, None] & within, other=0)
                w = triton.load(kernels.at[of, pallas.ds(right, columns), at], mask=beside[:, None] & within, other=0)
                over = (((1,), (1,)), ((), ()))
                return total + jax.lax.dot_general(x, w, over, precision, preferred_element_type=jnp.float32)

            total = jax.lax.fori_loop(0, -(-k // inner), add, jnp.zeros((height, columns), jnp.float32))
            at = y.at[pallas.ds(top, height), pallas.ds(right, columns)]
            triton.store(at, total, mask=below[:, None] & beside)

    call = pallas.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((p, n), jnp.float32),
        grid=(len(number), -(-n // columns)),
        compiler_params=triton.CompilerParams(num_warps=GPU_WARPS, num_stages=GPU_STAGES),
        interpret=interpret,
        name="grouped",
    )
    y: Array = call(rows, kernels, expert, first, count)
    return y
