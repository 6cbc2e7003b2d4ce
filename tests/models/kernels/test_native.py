"""Each form of the native product against plain sums and its twin in XLA, on shapes of every kind."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.kernels import build, native
from jaxserve.models.kernels.native import FORMS, Native, grouped

there = pytest.mark.skipif(not native.native().forms, reason=f"on this CPU: {native.describe(jnp.float32)}")
each_form = pytest.mark.parametrize("form", native.native().forms)
# k of one number, of less than a vector, of whole tiles and behind them; n within and behind a block; up to 16, 32 and
# more rows of a group, more than are multiplied at once, none, and rows that are in none.
SHAPES = [
    ((1, 1, 1), [1]),
    ((1, 64, 32), [0, 1, 1]),
    ((7, 50, 33), [2, 7]),
    ((6, 3, 1000), [0, 0, 5, 6]),
    ((70, 32, 17), [68, 69]),
    ((40, 64, 64), [3, 3, 37]),
    ((40, 96, 64), [0, 0, 40]),
    ((100, 36, 1024), [1, 18, 51, 100]),
    ((700, 40, 1024), [3, 690]),
    ((9, 32, 96), [0, 0]),
    ((0, 32, 32), [0, 0]),
]
OUT_IN = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=(0,)
)


@functools.partial(jax.jit, static_argnames="form")
def multiplied(rows, kernels, ends, form):
    return grouped(rows, kernels, ends, form=form)


@jax.jit
def twin(rows, kernels, ends):
    sizes = jnp.diff(ends, prepend=0)
    return jax.lax.ragged_dot_general(rows, kernels, sizes, OUT_IN, preferred_element_type=jnp.float32)


def given(p, e, n, k, form, seed=0):
    draw = np.random.default_rng(seed)
    rows, kernels = draw.standard_normal((p, k)), draw.standard_normal((e, n, k))
    return jnp.asarray(rows, FORMS[form]), jnp.asarray(kernels, FORMS[form])


def plainly(rows, kernels, ends):
    y, first = np.zeros((len(rows), kernels.shape[1])), 0
    for kernel, end in zip(np.asarray(kernels, np.float64), ends, strict=True):
        y[first:end] = np.asarray(rows, np.float64)[first:end] @ kernel.T
        first = end
    return y


@there
@each_form
@pytest.mark.parametrize(("shape", "ends"), SHAPES)
def test_it_is_the_product(shape, ends, form):
    p, n, k = shape
    rows, kernels = given(p, len(ends), n, k, form)
    found = np.asarray(multiplied(rows, kernels, jnp.asarray(ends), form))
    assert (found.shape, found.dtype) == ((p, n), np.float32)
    expected = plainly(rows, kernels, ends)
    size = max(np.abs(expected).max(initial=0), 1)
    np.testing.assert_allclose(found, expected, atol=1e-5 * size, rtol=0)
    assert not found[ends[-1] :].any()  # rows of no group
    np.testing.assert_allclose(found, twin(rows, kernels, jnp.asarray(ends)), atol=1e-5 * size, rtol=0)


@there
@each_form
def test_the_comparison_sees_what_is_wrong(form):
    rows, kernels = given(40, 3, 64, 64, form)
    expected = plainly(rows, kernels, [3, 3, 37])
    wrong = {
        "another group": (rows, kernels[::-1], [3, 3, 37]),
        "an end off by one": (rows, kernels, [4, 4, 37]),
        "one number left out": (rows.at[:, 63].set(0), kernels, [3, 3, 37]),
        "the row beside": (rows[::-1], kernels, [3, 3, 37]),
    }
    for what, (x, w, ends) in wrong.items():
        assert np.abs(multiplied(x, w, jnp.asarray(ends), form) - expected).max() > 1e-2, what


@there
@each_form
@pytest.mark.parametrize(("n", "k"), [(36, 72), (64, 256)])
def test_a_row_has_the_same_bits_in_any_company(n, k, form):
    (one, kernels), count = given(1, 3, n, k, form), 72
    alone = np.asarray(multiplied(one, kernels, jnp.asarray([0, 1, 1]), form))[0]
    others, _ = given(count, 3, n, k, form, seed=1)
    different = 0
    for at, first, last in [(0, 0, 1), (1, 0, 2), (3, 3, 7), (20, 4, 21), (20, 3, 36), (64, 0, 65), (71, 7, 72)]:
        company = others.at[at].set(one[0])
        found = np.asarray(multiplied(company, kernels, jnp.asarray([first, last, count]), form))
        np.testing.assert_array_equal(found[at], alone)
        different += not np.array_equal(found[at - 1], alone)
    assert different == 7
    # Nor do its company's worst numbers reach it.
    spoilt = others.at[:].set(jnp.nan).at[9].set(one[0])
    np.testing.assert_array_equal(multiplied(spoilt, kernels, jnp.asarray([0, 60, count]), form)[9], alone)


@there
@each_form
def test_many_may_call_at_once(form):
    """As devices of a mesh do: every thread gets its own numbers, and none waits for ever."""
    rows, kernels = given(48, 4, 128, 256, form)
    ends = [jnp.asarray([seed, 9 + seed, 30, 48]) for seed in range(6)]
    expected = [np.asarray(multiplied(rows, kernels, end, form)) for end in ends]
    wrong: list[int] = []

    def call(number):
        for _ in range(20):
            if not np.array_equal(multiplied(rows, kernels, ends[number], form), expected[number]):
                wrong.append(number)

    threads = [threading.Thread(target=call, args=(number,), daemon=True) for number in range(len(ends))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    assert not np.array_equal(expected[0], expected[1])


@there
def test_ends_beyond_the_rows_reach_nobody():
    form = native.native().forms[0]
    rows, kernels = given(5, 3, 32, 32, form)
    found = multiplied(rows, kernels, jnp.asarray([2, 900, 7]), form)
    np.testing.assert_array_equal(found, multiplied(rows, kernels, jnp.asarray([2, 5, 5]), form))
    assert np.isfinite(multiplied(rows, kernels, jnp.asarray([-3, 2, 1]), form)).all()


PROGRAM = """
import sys
import jax, jax.numpy as jnp
from jaxserve.models.kernels import native
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("/cache_hits") else None)
rows, kernels, ends = jnp.ones((4, 32)), jnp.ones((2, 64, 32)), jnp.asarray([1, 3])
y = jax.jit(native.grouped).lower(rows, kernels, ends).compile()(rows, kernels, ends)
print(len(hits) > 0, float(y.sum()))
"""


@there
def test_programs_come_back_from_the_cache(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    told = [subprocess.run(command, capture_output=True, text=True, timeout=120, check=False) for _ in range(2)]
    assert [one.stdout for one in told] == ["False 6144.0\n", "True 6144.0\n"], told[-1].stderr


@there
def test_types_without_a_form_are_refused():
    rows, kernels = jnp.ones((2, 32), jnp.float16), jnp.ones((1, 32, 32), jnp.float16)
    assert not native.usable(jnp.float16)
    assert "none for float16" in native.describe(jnp.float16)
    with pytest.raises(ValueError, match="float16"):
        grouped(rows, kernels, jnp.asarray([2]))
    with pytest.raises(ValueError, match="bfloat16"):
        grouped(rows.astype(jnp.float32), kernels.astype(jnp.bfloat16), jnp.asarray([2]))


def test_the_best_form_of_a_type_is_taken():
    assert Native(tuple(FORMS)).form(jnp.bfloat16) == "AMX"
    assert Native(("AVX-512", "AVX-512 BF16")).form(jnp.bfloat16) == "AVX-512 BF16"
    assert Native(("AVX-512",)).form("bfloat16") is None
    assert Native().form(jnp.float32) is None


def test_what_is_missing_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "_instructions", lambda: native.NEEDED)
    assert native._load(tmp_path / "a.so").why_not == f"not built; `{build.COMMAND}` builds them"
    (tmp_path / "b.so").write_text("no library")
    assert native._load(tmp_path / "b.so").why_not.startswith("not loaded: ")
    monkeypatch.setattr(native, "_instructions", lambda: frozenset(("fma", "avx512f")))
    assert native._load(tmp_path / "c.so").why_not == "the processor lacks avx512bw, avx512dq, avx512vl"
    monkeypatch.setattr(native, "library", lambda: tmp_path / "a.so")
    assert (
        native.describe(jnp.float32) == f"XLA in blocks (no native kernels: not built; `{build.COMMAND}` builds them)"
    )
    assert native.describe(jnp.float32, allowed=False) == "XLA in blocks (native kernels are off)"
    assert not native.usable(jnp.float32)
