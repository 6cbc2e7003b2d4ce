"""Every block type equals the reference implementation bit by bit, on random bytes."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from jaxserve.checkpoint.dequantize import BLOCK_TYPES, dequantize
from jaxserve.errors import CheckpointError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import gguf

DECODED = [code for code, kind in BLOCK_TYPES.items() if kind.decode is not None]
PLAIN = [code for code, kind in BLOCK_TYPES.items() if kind.dtype is not None]


def random_blocks(code: int, count: int) -> np.ndarray:
    rng = np.random.default_rng(code)
    return rng.integers(0, 256, (count, BLOCK_TYPES[code].bytes), dtype=np.uint8)


def test_the_table_is_the_reference_table():
    sizes = {code.value: size for code, size in gguf.GGML_QUANT_SIZES.items()}
    assert {code: (kind.weights, kind.bytes) for code, kind in BLOCK_TYPES.items()} == sizes
    assert {code: kind.name for code, kind in BLOCK_TYPES.items()} == {
        code: gguf.GGMLQuantizationType(code).name for code in sizes
    }


def test_what_must_be_decoded_is():
    names = {BLOCK_TYPES[code].name for code in DECODED}
    assert names >= {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4"}


@pytest.mark.parametrize("code", DECODED, ids=lambda code: BLOCK_TYPES[code].name)
@pytest.mark.parametrize("count", [1, 2500])
def test_equals_the_reference(code, count):
    kind = BLOCK_TYPES[code]
    packed = random_blocks(code, count)
    values = dequantize(packed.reshape(-1), kind, (count, kind.weights))
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType(code))
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, expected)
    assert np.isfinite(values).any()


@pytest.mark.parametrize("code", DECODED, ids=lambda code: BLOCK_TYPES[code].name)
def test_a_block_does_not_depend_on_its_neighbours(code):
    kind = BLOCK_TYPES[code]
    count = (1 << 18) // kind.weights + 3  # more than one slice, the last one short
    packed = random_blocks(code, count)
    together = dequantize(packed.reshape(-1), kind, (count, kind.weights))
    for block in (0, count - 4, count - 1):
        alone = dequantize(packed[block], kind, (kind.weights,))
        np.testing.assert_array_equal(together[block], alone)


@pytest.mark.parametrize("code", PLAIN, ids=lambda code: BLOCK_TYPES[code].name)
def test_plain_numbers_are_a_view(code):
    kind = BLOCK_TYPES[code]
    packed = random_blocks(code, 12).reshape(-1)
    values = dequantize(packed, kind, (3, 4))
    assert values.dtype == kind.dtype
    assert np.shares_memory(values, packed)
    assert values.tobytes() == packed.tobytes()


def test_what_is_not_decoded_says_so():
    undecoded = [kind for kind in BLOCK_TYPES.values() if kind.dtype is None and kind.decode is None]
    assert {kind.name for kind in undecoded} >= {"IQ1_S", "IQ2_XXS", "IQ3_S"}
    for kind in undecoded:
        with pytest.raises(CheckpointError, match=kind.name):
            dequantize(np.zeros(kind.bytes, np.uint8), kind, (kind.weights,))
