"""GGML's block formats: from packed bytes back to numbers.

It knows how many bytes a block of each type has and what its bits mean. It does not know files, tensor names or models.

Every format stores weights in blocks of 32, 64 or 256 along the last axis, each with its own scale. A decoder gets
blocks ``uint8[n, bytes]`` and fills ``float32[n, weights]``; the arithmetic is float32 in the order of the reference
implementation, so that results are equal bit by bit. Blocks go through in slices that stay in the CPU's cache.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from jaxserve.errors import CheckpointError

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Decoder = Callable[[Bytes, Floats], None]

_WEIGHTS_PER_SLICE: Final = 1 << 18
_NIBBLES: Final = np.array([0, 4], np.uint8)[:, None]
_PAIRS: Final = np.array([0, 2, 4, 6], np.uint8)[:, None]
_BITS: Final = np.arange(8, dtype=np.uint8)[:, None]
_THREES: Final = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]


def _table(*values: float) -> Floats:
    return np.array(values, np.float32)


_NONLINEAR: Final = _table(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1_TWICE: Final = _table(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_E8M0_HALF: Final = _table(*(math.ldexp(1.0, exponent - 128) for exponent in range(256)))


def _unsigned_e4m3(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    if code == 0x7F:
        return 0.0
    return mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


_E4M3_HALF: Final = _table(*(_unsigned_e4m3(code) / 2 for code in range(256)))


def _half(blocks: Bytes, start: int) -> Floats:
    """The float16 at byte ``start`` of each block, as float32[n, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _fields(packed: Bytes, width: int, shifts: NDArray[Any], mask: int) -> Bytes:
    """Splits each run of ``width`` bytes into one run per shift: uint8[n, runs * shifts, width]."""
    runs: Bytes = (packed.reshape(len(packed), -1, 1, width) >> shifts) & np.uint8(mask)
    return runs.reshape(len(packed), -1, width)


def _q4_0(blocks: Bytes, out: Floats) -> None:
    np.subtract(blocks[:, 2:] & 15, np.float32(8), out=out[:, :16])
    np.subtract(blocks[:, 2:] >> 4, np.float32(8), out=out[:, 16:])
    out *= _half(blocks, 0)


def _q4_1(blocks: Bytes, out: Floats) -> None:
    scale = _half(blocks, 0)
    np.multiply(blocks[:, 4:] & 15, scale, out=out[:, :16])
    np.multiply(blocks[:, 4:] >> 4, scale, out=out[:, 16:])
    out += _half(blocks, 2)


def _five_bits(blocks: Bytes, start: int) -> Bytes:
    """32 fifth bits (4 bytes at ``start``), then 32 nibbles: uint8[n, 32]."""
    high = np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little") << np.uint8(4)
    return _fields(blocks[:, start + 4 :], 16, _NIBBLES, 15).reshape(-1, 32) | high


def _q5_0(blocks: Bytes, out: Floats) -> None:
    np.subtract(_five_bits(blocks, 2), np.float32(16), out=out)
    out *= _half(blocks, 0)


def _q5_1(blocks: Bytes, out: Floats) -> None:
    np.multiply(_five_bits(blocks, 4), _half(blocks, 0), out=out)
    out += _half(blocks, 2)


def _q8_0(blocks: Bytes, out: Floats) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), _half(blocks, 0), out=out)


def _q2_k(blocks: Bytes, out: Floats) -> None:
    scales, minima = blocks[:, :16] & 15, blocks[:, :16] >> 4
    parts = out.reshape(-1, 16, 16)
    quants = _fields(blocks[:, 16:80], 32, _PAIRS, 3).reshape(-1, 16, 16)
    np.multiply(quants, (_half(blocks, 80) * scales)[..., None], out=parts)
    parts -= (_half(blocks, 82) * minima)[..., None]


def _q3_k(blocks: Bytes, out: Floats) -> None:
    low = _fields(blocks[:, 96:104], 8, _NIBBLES, 15).reshape(-1, 16)
    high = _fields(blocks[:, 104:108], 4, _PAIRS, 3).reshape(-1, 16)
    scales = (low | high << np.uint8(4)).astype(np.float32) - np.float32(32)
    quants = _fields(blocks[:, 32:96], 32, _PAIRS, 3) | _fields(blocks[:, :32], 32, _BITS, 1) << np.uint8(2)
    parts = out.reshape(-1, 16, 16)
    np.subtract(quants.reshape(-1, 16, 16), np.float32(4), out=parts)
    parts *= (_half(blocks, 108) * scales)[..., None]


def _six_bit_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Eight scales and eight minima of six bits in 12 bytes: two uint8[n, 8]."""
    first, second, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, rest & 15 | first >> 2 & 48], axis=1)
    minima = np.concatenate([second & 63, rest >> 4 | second >> 2 & 48], axis=1)
    return scales, minima


def _scale_and_shift(blocks: Bytes, quants: Bytes, out: Floats) -> None:
    scales, minima = _six_bit_scales(blocks[:, 4:16])
    parts = out.reshape(-1, 8, 32)
    np.multiply(quants, (_half(blocks, 0) * scales)[..., None], out=parts)
    parts -= (_half(blocks, 2) * minima)[..., None]


def _q4_k(blocks: Bytes, out: Floats) -> None:
    _scale_and_shift(blocks, _fields(blocks[:, 16:], 32, _NIBBLES, 15), out)


def _q5_k(blocks: Bytes, out: Floats) -> None:
    high = _fields(blocks[:, 16:48], 32, _BITS, 1) << np.uint8(4)
    _scale_and_shift(blocks, _fields(blocks[:, 48:], 32, _NIBBLES, 15) | high, out)


def _q6_k(blocks: Bytes, out: Floats) -> None:
    low = _fields(blocks[:, :128], 64, _NIBBLES, 15).reshape(-1, 8, 32)
    high = _fields(blocks[:, 128:192], 32, _PAIRS, 3) << np.uint8(4)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8)
    parts = out.reshape(-1, 16, 16)
    np.subtract((low | high).reshape(-1, 16, 16), np.float32(32), out=parts)
    parts *= scales[..., None]


def _iq4_nl(blocks: Bytes, out: Floats) -> None:
    np.take(_NONLINEAR, _fields(blocks[:, 2:], 16, _NIBBLES, 15).reshape(-1, 32), out=out, mode="clip")
    out *= _half(blocks, 0)


def _iq4_xs(blocks: Bytes, out: Floats) -> None:
    pairs = np.ascontiguousarray(blocks[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16)
    low = _fields(blocks[:, 4:8], 1, _NIBBLES, 15).reshape(-1, 8)
    scales = (low | (pairs & 3).astype(np.uint8) << np.uint8(4)).astype(np.float32) - np.float32(32)
    parts = out.reshape(-1, 8, 32)
    np.take(_NONLINEAR, _fields(blocks[:, 8:], 16, _NIBBLES, 15).reshape(-1, 8, 32), out=parts, mode="clip")
    parts *= (_half(blocks, 0) * scales)[..., None]


def _tq1_0(blocks: Bytes, out: Floats) -> None:
    def trits(packed: Bytes, width: int, powers: Bytes) -> Bytes:
        # A byte holds five base-3 digits as a fraction: multiplying (mod 256) brings a digit to the top.
        digits = packed.reshape(len(packed), -1, 1, width) * powers
        return (digits.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(len(packed), -1)

    parts = [trits(blocks[:, :32], 32, _THREES), trits(blocks[:, 32:48], 16, _THREES)]
    parts.append(trits(blocks[:, 48:52], 4, _THREES[:4]))
    np.subtract(np.concatenate(parts, axis=1), np.float32(1), out=out)
    out *= _half(blocks, 52)


def _tq2_0(blocks: Bytes, out: Floats) -> None:
    np.subtract(_fields(blocks[:, :64], 32, _PAIRS, 3).reshape(-1, 256), np.float32(1), out=out)
    out *= _half(blocks, 64)


def _mxfp4(blocks: Bytes, out: Floats) -> None:
    np.take(_E2M1_TWICE, _fields(blocks[:, 1:], 16, _NIBBLES, 15).reshape(-1, 32), out=out, mode="clip")
    out *= _E8M0_HALF[blocks[:, :1]]


def _nvfp4(blocks: Bytes, out: Floats) -> None:
    parts = out.reshape(-1, 4, 16)
    np.take(_E2M1_TWICE, _fields(blocks[:, 4:], 8, _NIBBLES, 15).reshape(-1, 4, 16), out=parts, mode="clip")
    parts *= _E4M3_HALF[blocks[:, :4]][..., None]


@dataclasses.dataclass(frozen=True, slots=True)
class BlockType:
    """One of GGML's types.

    Attributes:
        name: as GGML writes it, ``Q4_K``.
        weights, bytes: size of a block.
        dtype: set for the types whose bytes are plain numbers.
        decode: fills float32[n, weights] from uint8[n, bytes]; ``None`` where this version cannot.
    """

    name: str
    weights: int
    bytes: int
    dtype: np.dtype[Any] | None = None
    decode: Decoder | None = None

    @property
    def quantised(self) -> bool:
        """Whether a block has a scale, so that its bytes are no plain numbers."""
        return self.dtype is None


BLOCK_TYPES: Final[dict[int, BlockType]] = {
    0: BlockType("F32", 1, 4, np.dtype(np.float32)),
    1: BlockType("F16", 1, 2, np.dtype(np.float16)),
    2: BlockType("Q4_0", 32, 18, decode=_q4_0),
    3: BlockType("Q4_1", 32, 20, decode=_q4_1),
    6: BlockType("Q5_0", 32, 22, decode=_q5_0),
    7: BlockType("Q5_1", 32, 24, decode=_q5_1),
    8: BlockType("Q8_0", 32, 34, decode=_q8_0),
    9: BlockType("Q8_1", 32, 40),
    10: BlockType("Q2_K", 256, 84, decode=_q2_k),
    11: BlockType("Q3_K", 256, 110, decode=_q3_k),
    12: BlockType("Q4_K", 256, 144, decode=_q4_k),
    13: BlockType("Q5_K", 256, 176, decode=_q5_k),
    14: BlockType("Q6_K", 256, 210, decode=_q6_k),
    15: BlockType("Q8_K", 256, 292),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18, decode=_iq4_nl),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136, decode=_iq4_xs),
    24: BlockType("I8", 1, 1, np.dtype(np.int8)),
    25: BlockType("I16", 1, 2, np.dtype(np.int16)),
    26: BlockType("I32", 1, 4, np.dtype(np.int32)),
    27: BlockType("I64", 1, 8, np.dtype(np.int64)),
    28: BlockType("F64", 1, 8, np.dtype(np.float64)),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2, np.dtype(ml_dtypes.bfloat16)),
    34: BlockType("TQ1_0", 256, 54, decode=_tq1_0),
    35: BlockType("TQ2_0", 256, 66, decode=_tq2_0),
    39: BlockType("MXFP4", 32, 17, decode=_mxfp4),
    40: BlockType("NVFP4", 64, 36, decode=_nvfp4),
    41: BlockType("Q1_0", 128, 18),
}


def dequantize(packed: Bytes, kind: BlockType, shape: tuple[int, ...]) -> NDArray[Any]:
    """The numbers of one tensor.

    Args:
        packed: uint8[prod(shape) / kind.weights * kind.bytes], the tensor as it lies in the file.
        kind: its type; ``shape[-1]`` is a multiple of ``kind.weights``.
        shape: row-major, the fastest axis last.

    Returns:
        float32[shape]; types that hold plain numbers keep their own dtype and are a view of ``packed``.

    Raises:
        CheckpointError: this version cannot decode the type.
    """
    if kind.dtype is not None:
        return packed.view(kind.dtype).reshape(shape)
    if kind.decode is None:
        raise CheckpointError(f"Tensors of GGML type {kind.name} cannot be decoded by this version.")
    blocks = packed.reshape(-1, kind.bytes)
    out = np.empty((len(blocks), kind.weights), np.float32)
    step = _WEIGHTS_PER_SLICE // kind.weights
    with np.errstate(invalid="ignore", over="ignore"):  # a broken scale gives NaN: the converter refuses it by name
        for start in range(0, len(blocks), step):
            kind.decode(blocks[start : start + step], out[start : start + step])
    return out.reshape(shape)
