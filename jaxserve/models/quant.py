"""Weights in fewer bits than they are computed in: how files hold them, which leaves they become, what they stand for.

They lie in memory as they lie in files, and become plain numbers inside the product that reads them; activations are
never quantised. Two forms, which ``quantization_config`` in ``config.json`` tells apart:

* FP8 in blocks (DeepSeek-V3 report, arXiv 2412.19437, section 3.3): e4m3 numbers and a float32 factor for each block of
  128 x 128. A leaf here may be joined of several tensors, and its rows are split over devices: so it holds a factor for
  each row of a block instead, 3 % more bytes, and any row can be anywhere.
* MXFP4 (OCP Microscaling Formats 1.0): two e2m1 numbers to a byte, the lower half first, and a power of two for each 32
  of them. gpt-oss holds its experts so.

No part of a model knows of it: the table of rules is rewritten, and an object that gives plain numbers takes the place
of the parameter.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Iterable, Mapping
from types import EllipsisType
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped, UInt8

from jaxserve.errors import CheckpointError
from jaxserve.models.weights import NARROW, Piece, Rule
from jaxserve.pytree import pytree

MXFP4_BLOCK = 32
# Stands in the names of a text model that is part of a larger one; exceptions are written with it and without.
_OUTER = "language_model."


@runtime_checkable
class Quantisation(Protocol):
    """How a model's weights are held; frozen and hashable."""

    def leaves(self, rule: Rule) -> tuple[Rule, ...]:
        """What takes the place of a leaf: its ``values`` and ``scales``, or the leaf itself if it is left alone."""


@pytree
class Packed:
    """A weight ``[*o, i]`` in blocks of its last axis.

    Attributes:
        values: bits of e4m3 numbers, or of two e2m1 numbers to each byte.
        scales: factors of the blocks: of e4m3 numbers, of e2m1 exponents of two, 127 too large.
    """

    values: UInt8[Array, "*o c w"]
    scales: Shaped[Array, "*o c"]

    def __getitem__(self, index: Int[Array, ""] | int) -> Packed:
        """One of what is stacked along the first axis."""
        return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False), self)

    def dense(self, dtype: DTypeLike) -> Float[Array, "*o i"]:
        """The numbers, exact in float32 and rounded once to another dtype."""
        on_cpu, elsewhere = (_e2m1_on_cpu, _e2m1) if self.scales.dtype == jnp.uint8 else (_e4m3_on_cpu, _e4m3)
        wide = jax.lax.platform_dependent(self.values, self.scales, cpu=on_cpu, default=elsewhere)
        return wide.reshape(*self.scales.shape[:-1], -1).astype(dtype)


def _e4m3(bits: UInt8[Array, "*o c w"], scales: Float[Array, "*o c"]) -> Float[Array, "*o c w"]:
    return jax.lax.bitcast_convert_type(bits, jnp.float8_e4m3fn).astype(jnp.float32) * scales[..., None]


def _e4m3_on_cpu(bits: UInt8[Array, "*o c w"], scales: Float[Array, "*o c"]) -> Float[Array, "*o c w"]:
    """By way of float16, which has the same layout but for eight more in the exponent: seven times as fast."""
    return _half(bits, 7) * (256 * scales)[..., None]


def _e2m1(bits: UInt8[Array, "*o c w"], scales: UInt8[Array, "*o c"]) -> Float[Array, "*o c 2*w"]:
    halves = (bits[..., None] >> jnp.array([0, 4], jnp.uint8)) & 15
    nibbles = halves.reshape(*bits.shape[:-1], -1).astype(jnp.int32)
    mantissa, exponent = nibbles & 1, (nibbles >> 1) & 3
    # Twice the number is whole: 0 and 1 below the first power of two, 2 and 3 times a power of two from there on.
    doubled = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent - 1, 0))
    signed = jnp.where(nibbles >= 8, -doubled, doubled)
    return 0.5 * signed.astype(jnp.float32) * _power_of_two(scales)[..., None]


def _e2m1_on_cpu(bits: UInt8[Array, "*o c w"], scales: UInt8[Array, "*o c"]) -> Float[Array, "*o c 2*w"]:
    """The same by way of float16, three times as fast."""
    halves = (_half((part & 7) | ((part & 8) << 4), 9) for part in (bits & 15, bits >> 4))
    numbers = jnp.stack(list(halves), axis=-1).reshape(*bits.shape[:-1], -1)
    return numbers * 16384.0 * _power_of_two(scales)[..., None]


def _half(bits: UInt8[Array, "..."], shift: int) -> Float[Array, "..."]:
    """Numbers whose sign is the top bit and whose exponent and mantissa fit a float16's behind ``shift`` more bits.

    What is below the first power of two stays right: XLA flushes such numbers of float32, but converts float16's.
    """
    wide = bits.astype(jnp.uint16)
    moved = ((wide & 0x7F) << shift) | ((wide & 0x80) << 8)
    return jax.lax.bitcast_convert_type(moved, jnp.float16).astype(jnp.float32)


def _power_of_two(exponents: UInt8[Array, "*o c"]) -> Float[Array, "*o c"]:
    """``2 ** (exponents - 127)``, put together of bits: exact, and infinite for 255, which means "no number"."""
    wide = exponents.astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(jnp.where(wide == 0, jnp.uint32(1 << 22), wide << 23), jnp.float32)


class PackedParameter(nnx.Module):
    """Stands where a parameter stood, and reads as if it were one: ``[...]`` gives plain numbers."""

    def __init__(self, rule: Rule, values: Rule, scales: Rule, dtype: DTypeLike) -> None:
        self.shape, self.dtype = rule.shape, jnp.dtype(dtype)
        self.values = nnx.Param(jnp.zeros(values.shape, values.held(dtype)))
        self.scales = nnx.Param(jnp.ones(scales.shape, scales.held(dtype)))

    def __getitem__(self, _: EllipsisType) -> Float[Array, "..."]:
        return self.packed.dense(self.dtype).reshape(self.shape)

    @property
    def packed(self) -> Packed:
        """The weight as it is held."""
        return Packed(self.values[...], self.scales[...])


def held(weight: Any) -> Array | Packed:
    """A parameter as it lies in memory, for products that unpack it piece by piece."""
    return weight.packed if isinstance(weight, PackedParameter) else weight[...]


def pack(module: nnx.Module, rules: Iterable[Rule], quantisation: Quantisation, dtype: DTypeLike) -> None:
    """Puts a ``PackedParameter`` in the place of each parameter that the quantisation takes."""
    for rule in rules:
        leaves = quantisation.leaves(rule)
        if leaves == (rule,):
            continue
        values, scales = leaves
        *parents, name = rule.param.split(".")
        owner: Any = module
        for parent in parents:
            owner = owner[int(parent)] if parent.isdecimal() else getattr(owner, parent)
        setattr(owner, name, PackedParameter(rule, values, scales, dtype))


@dataclasses.dataclass(frozen=True)
class FP8:
    """e4m3 in blocks, in every map of the layers but routers and what the configuration excepts.

    Attributes:
        block: rows and columns.
        excepted: modules, or what stands above them, or ends of their names, that are plain.
        patterns: the same with ``*`` for anything; elsewhere they are regular expressions, which no stranger gets here.
    """

    block: tuple[int, int]
    excepted: frozenset[str] = frozenset()
    patterns: tuple[str, ...] = ()

    def leaves(self, rule: Rule) -> tuple[Rule, ...]:
        """See ``Quantisation``.

        Raises:
            CheckpointError: some of the tensors of one leaf are excepted, some not.
        """
        ways = [way for way in rule.ways if all(map(self._may_take, way))]
        whole = rule.dtype is not None or not rule.param.startswith("layers.") or ".router." in rule.param
        if whole or len(rule.shape) < 2 or not ways:
            return (rule,)
        taken = {piece.source: self._excepts(piece.source) for piece in ways[0]}
        if all(taken.values()):
            return (rule,)
        if any(taken.values()):
            plain, narrow = (next(name for name, out in taken.items() if out is kind) for kind in (True, False))
            raise CheckpointError(
                f"config.json: {plain} is no fp8, {narrow} is, but both are read in one product",
                param="quantization_config.modules_to_not_convert",
            )
        inputs = _inputs(rule)
        size = math.gcd(math.prod(rule.shape[-inputs:]), self.block[1])
        spread = (self.block[0], self.block[1] // size)

        def scales(piece: Piece) -> Piece:
            outputs = piece.shape[: len(piece.shape) - inputs]
            count = math.prod(piece.shape[len(outputs) :]) // size
            order = (*piece.order[: len(outputs)], len(outputs)) if piece.order else ()
            return Piece(f"{piece.source}_scale_inv", (*outputs, count), order, piece.region, piece.rows, spread)

        factors = tuple(tuple(map(scales, way)) for way in ways)
        return _pair(rule, inputs, size, self.block[1], (size, NARROW), "float32", tuple(ways), factors)

    def _may_take(self, piece: Piece) -> bool:
        return piece.source.endswith(".weight") and ".conv1d." not in piece.source

    def _excepts(self, source: str) -> bool:
        parts = source.removesuffix(".weight").replace(_OUTER, "").split(".")
        names = {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
        names |= {".".join(parts[start:]) for start in range(len(parts))}
        return not names.isdisjoint(self.excepted) or any(
            fnmatch.fnmatchcase(name, pattern) for pattern in self.patterns for name in names
        )


@dataclasses.dataclass(frozen=True)
class MXFP4:
    """e2m1 in blocks of 32, in the experts; nothing else is touched."""

    def leaves(self, rule: Rule) -> tuple[Rule, ...]:
        """See ``Quantisation``.

        Raises:
            CheckpointError: inputs that blocks of 32 do not divide.
        """
        (*_, last) = rule.shape
        if rule.axes[0] != "experts" or not all(piece.source.endswith("_proj") for piece in rule.ways[0]):
            return (rule,)
        if last % MXFP4_BLOCK:
            raise CheckpointError(f"config.json: mxfp4 cannot hold {rule.param}, {last} is no multiple of 32")
        count = last // MXFP4_BLOCK

        def piece(plain: Piece, kind: str, tail: tuple[int, ...]) -> Piece:
            """Packed files put the inputs last, plain ones have them wherever ``order`` finds them."""
            axes = plain.order or tuple(range(len(plain.shape)))
            kept = [axis for axis in range(len(axes)) if axis != axes[-1]]
            order = tuple(kept.index(axis) for axis in axes[:-1]) + tuple(len(kept) + n for n in range(len(tail)))
            return Piece(f"{plain.source}_{kind}", (*(plain.shape[axis] for axis in kept), *tail), order, plain.region)

        width = MXFP4_BLOCK // 2
        values, scales = (
            (tuple(piece(plain, kind, tail) for plain in rule.ways[0]),)
            for kind, tail in (("blocks", (count, width)), ("scales", (count,)))
        )
        return _pair(rule, 1, MXFP4_BLOCK, MXFP4_BLOCK, (width, "uint8"), "uint8", values, scales)


def _pair(
    rule: Rule,
    inputs: int,
    size: int,
    whole: int,
    held: tuple[int, str],
    scale: str,
    values: tuple[tuple[Piece, ...], ...],
    scales: tuple[tuple[Piece, ...], ...],
) -> tuple[Rule, Rule]:
    """A leaf's values, ``held`` as so many entries a block of such a dtype, and the factors of its blocks.

    Both have an axis of blocks with the logical axis of the inputs: the mesh divides them alike, or not at all. What
    experts put out between their two products comes in such blocks, too, so that the mesh divides both products alike:
    else one of them would be gathered at each step.
    """
    shape, axes = [*rule.shape[:-inputs]], [*rule.axes[:-inputs]]
    if axes[0] == "experts" and "ffn" in axes:
        at = axes.index("ffn")
        block = math.gcd(shape[at], whole)
        shape[at : at + 1], axes[at : at + 1] = [shape[at] // block, block], ["ffn", None]
    shape.append(math.prod(rule.shape[-inputs:]) // size)
    axes.append(rule.axes[-inputs])
    return (
        Rule(f"{rule.param}.values", (*shape, held[0]), (*axes, None), values, held[1]),
        Rule(f"{rule.param}.scales", tuple(shape), tuple(axes), scales, scale),
    )


def _inputs(rule: Rule) -> int:
    """How many of a map's axes are inputs: the last, or, where it writes the model's width, all behind that."""
    return len(rule.axes) - 1 - rule.axes.index("model") if "model" in rule.axes[:-1] else 1


def quantisation_from_hf(hf: Mapping[str, Any]) -> Quantisation | None:
    """What ``quantization_config`` says; ``None`` where there is none.

    Raises:
        CheckpointError: another form than the two.
    """
    fields = hf.get("quantization_config")
    if not fields:
        return None
    method, block = fields.get("quant_method"), fields.get("weight_block_size")
    if method == "mxfp4":
        return MXFP4()
    if method != "fp8":
        raise CheckpointError(f"config.json: quantisation {method!r} is not supported", param="quantization_config")
    kind = fields.get("fmt", "e4m3")
    if kind != "e4m3":
        raise CheckpointError(f"config.json: fp8 of kind {kind!r} is not supported", param="quantization_config")
    two = isinstance(block, list) and len(block) == 2
    if not two or not all(type(size) is int and 1 <= size <= 1 << 14 for size in block):
        raise CheckpointError("config.json: fp8 without blocks is not supported", param="quantization_config")
    names = frozenset(str(name).replace(_OUTER, "") for name in fields.get("modules_to_not_convert") or ())
    patterns = tuple(sorted(name for name in names if "*" in name))
    return FP8((block[0], block[1]), names, patterns)
