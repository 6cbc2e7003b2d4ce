"""Grouped products: interpreted against plain ones, lowered for devices that are not here, and chosen."""

from __future__ import annotations

import functools
import sys
import types

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from jaxserve.errors import ConfigError
from jaxserve.models.kernels import grouped as subject
from jaxserve.models.kernels.grouped import choice, gpu_tiles, grouped, tpu_tiles

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")

# Shapes [p, e, n, k]: several tiles of each axis, with remainders where they may be.
SHAPES = {"megablox": (300, 5, 640, 1152), "triton": (75, 5, 200, 100), "ragged_dot": (75, 5, 200, 100)}
INTERPRETED = {
    "megablox": functools.partial(subject._megablox, interpret=True),
    "triton": functools.partial(subject._triton, interpret=True),
    "ragged_dot": subject._ragged_dot,
}
SAFE = [jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
CALLS = {"cuda": "custom_call @__gpu$xla.gpu.triton", "tpu": "custom_call @tpu_custom_call"}
DEVICES = {"cuda": AbstractDevice("NVIDIA H100", 132, "gpu"), "tpu": AbstractDevice("TPU v5 lite", 1, "tpu")}


def layouts(p):
    """Rows of each of five experts: none, all, few, not multiples of a tile, and rows of nobody behind them."""
    few = [3, 0, p // 5, p // 3, 4]
    return {
        "spread": few,
        "no row": [0] * 5,
        "all of the first": [p, 0, 0, 0, 0],
        "all of the last": [0, 0, 0, 0, p],
        "ones": [1] * 5,
        "whole": [*few[:4], p - sum(few[:4])],
    }


def numbers(p, e, n, k, dtype):
    draw = np.random.default_rng(0).standard_normal
    return jnp.asarray(draw((p, k)), dtype), jnp.asarray(draw((e, n, k)) / k**0.5, dtype)


def plainly(rows, kernels, sizes):
    rows, kernels = np.asarray(rows, np.float32), np.asarray(kernels, np.float32)
    ends = np.cumsum(sizes)
    parts = [rows[end - size : end] @ kernel.T for kernel, end, size in zip(kernels, ends, sizes, strict=True)]
    return np.concatenate(parts)


@pytest.mark.parametrize(
    ("product", "dtype"),
    [("megablox", "bfloat16"), ("triton", "bfloat16"), ("triton", "float32"), ("ragged_dot", "float32")],
)
def test_each_row_meets_its_experts_kernel(product, dtype):
    p, e, n, k = SHAPES[product]
    rows, kernels = numbers(p, e, n, k, dtype)
    run = jax.jit(INTERPRETED[product])
    for name, sizes in layouts(p).items():
        expected = plainly(rows, kernels, sizes)
        found = np.asarray(run(rows, kernels, jnp.asarray(sizes, jnp.int32)))
        assert found.shape == (p, n)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found[: sum(sizes)], expected, atol=2e-5, err_msg=name)
        wrong = plainly(rows, np.roll(kernels, 1, axis=0), sizes)
        assert not sum(sizes) or np.abs(wrong - expected).max() > 0.1, name


@pytest.mark.parametrize("product", ["megablox", "triton"])
def test_a_row_has_the_same_bits_in_any_company_and_needs_no_tile_of_its_own(product):
    _, e, n, k = SHAPES[product]
    rows, kernels = numbers(20, e, n, k, "bfloat16")  # fewer than a tile has
    run = jax.jit(INTERPRETED[product])
    places = {(0, 20, 0, 0, 0): 7, (2, 6, 3, 4, 5): 2, (15, 1, 0, 0, 0): 15, (0, 1, 19, 0, 0): 0}
    found = []
    for sizes, at in places.items():  # each time another place, always of the second expert
        company = jnp.roll(rows, at, axis=0)
        found.append(np.asarray(run(company, kernels, jnp.asarray(sizes, jnp.int32)))[at])
    for one in found[1:]:
        np.testing.assert_array_equal(one, found[0])


# --- lowered ----------------------------------------------------------------------------------------------------------


def lowered(platform, dtype="bfloat16", setting="auto", n=256, device=True):
    rows, kernels = jax.ShapeDtypeStruct((64, 128), dtype), jax.ShapeDtypeStruct((8, n, 128), dtype)
    sizes = jax.ShapeDtypeStruct((8,), jnp.int32)
    run = jax.jit(functools.partial(grouped, setting=setting))
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=DEVICES[platform] if device else None)):
        return jax.export.export(run, platforms=[platform], disabled_checks=SAFE)(rows, kernels, sizes).mlir_module()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_the_kernel_is_lowered_for_its_platform(platform, dtype):
    text = lowered(platform, dtype)
    assert text.count(CALLS[platform]) == 1
    assert "ragged_dot" not in text


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_it_can_be_switched_off(platform):
    text = lowered(platform, setting="ragged_dot")
    assert CALLS[platform] not in text
    assert "chlo.ragged_dot" in text


def test_what_cannot_be_lowered_is_left_to_xla():
    assert "chlo.ragged_dot" in lowered("tpu", n=200)
    assert "chlo.ragged_dot" in lowered("cuda", device=False), "no GPU is there to be asked"
    assert CALLS["tpu"] in lowered("tpu", device=False)


# --- chosen -----------------------------------------------------------------------------------------------------------


def test_the_choice_is_by_platform_shape_type_and_setting(monkeypatch):
    both = ("bfloat16", "bfloat16")
    assert [choice(platform, (8, 256, 128), both) for platform in ("cpu", "gpu", "cuda", "tpu", "rocm")] == [
        None,
        "triton",
        "triton",
        "megablox",
        None,
    ]
    assert choice("tpu", (8, 200, 128), both) == choice("tpu", (8, 256, 100), both) == "ragged_dot"
    assert choice("gpu", (8, 200, 100), both) == "triton"
    assert choice("gpu", (8, 256, 128), ("bfloat16", "float32")) == "ragged_dot"
    assert choice("gpu", (8, 256, 128), ("float16", "float16")) == "ragged_dot"
    assert choice("gpu", (8, 256, 128), both, "ragged_dot") == choice("tpu", (8, 256, 128), both, "ragged_dot")
    assert choice("cpu", (8, 256, 128), both, "tokamax") is None
    monkeypatch.setattr(subject.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="tokamax is not installed"):
        choice("gpu", (8, 256, 128), both, "tokamax")


def test_tokamax_is_asked_for_its_kernel_by_name(monkeypatch):
    asked = []

    def product(rows, kernels, sizes, over, **options):
        asked.append(options)
        if kernels.shape[1] == 512:
            raise NotImplementedError
        return subject._ragged_dot(rows, kernels, sizes)

    module = types.ModuleType("tokamax")
    module.ragged_dot_general = product
    module.__spec__ = types.SimpleNamespace(name="tokamax")
    monkeypatch.setitem(sys.modules, "tokamax", module)
    lowered("cuda", setting="tokamax")
    lowered("tpu", setting="tokamax")
    lowered("tpu", setting="tokamax", device=False)  # nobody to ask
    assert asked == [
        {"preferred_element_type": jnp.float32, "implementation": implementation}
        for implementation in ("mosaic_gpu", "mosaic_tpu")
    ]
    assert all(CALLS[platform] in lowered(platform, setting="tokamax", n=512) for platform in CALLS), "it refuses"


def test_tiles_follow_from_shapes():
    flagship = (256, 1024, 2048)
    assert [tpu_tiles(rows, flagship, 2) for rows in (8, 256, 4096, 65536, 1 << 20)] == [
        (16, 1024, 512),
        (128, 1024, 512),
        (128, 1024, 512),
        (256, 1024, 512),
        (512, 1024, 512),
    ]
    assert tpu_tiles(256, (8, 1408, 704), 2) == (128, 768, 512)
    assert tpu_tiles(256, flagship, 4)[1] == 512
    assert [gpu_tiles(rows, flagship, 2) for rows in (8, 4096, 8192, 1 << 20)] == [
        (16, 64, 128),
        (16, 64, 128),
        (32, 64, 128),
        (64, 64, 128),
    ]
    assert gpu_tiles(8, (4, 24, 24), 4) == (16, 32, 32)
    for rows in (8, 4096, 1 << 20):
        for itemsize in (2, 4):
            height, inner, columns = tpu_tiles(rows, (8, 7168, 18432), itemsize)
            operands = 2 * itemsize * (height * inner + columns * inner)
            assert operands + 3 * 4 * height * columns <= 8 << 20
            height, inner, columns = gpu_tiles(rows, (8, 7168, 18432), itemsize)
            assert 3 * itemsize * (height + columns) * inner <= 72 << 10
            assert all(size & (size - 1) == 0 for size in (height, inner, columns))
