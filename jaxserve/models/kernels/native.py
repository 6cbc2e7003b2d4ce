"""Products of the CPU that XLA is slow at, compiled from ``cpu.cc`` and called through ``jax.ffi``.

Knows whether they may be used here: that a library was built for this jaxlib, and that the processor has the
instructions. Does not know who multiplies what, nor whether somebody wants it otherwise. Nothing is loaded before
somebody asks.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxserve.models.kernels.build import COMMAND, library

NAME, TARGET = "native kernels", "jaxserve_grouped"
# What the whole library needs; the forms behind more are chosen one by one.
NEEDED = frozenset(("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma"))
# In the order of their bits in `jaxserve_forms`, of one type the better one last.
FORMS = {"AVX-512": jnp.float32, "AVX-512 BF16": jnp.bfloat16, "AMX": jnp.bfloat16}
_WORD_BYTES, _TILE = 4, 16  # as in cpu.cc: rows are packed by so many, in multiples of so many words
_lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Native:
    """What there is.

    Attributes:
        forms: names of the instructions that may be used.
        why_not: why there are none, in a sentence.
    """

    forms: tuple[str, ...] = ()
    why_not: str = ""

    def form(self, dtype: DTypeLike) -> str | None:
        """The best form for numbers of a type."""
        return next((name for name in reversed(self.forms) if FORMS[name] == jnp.dtype(dtype)), None)


def native() -> Native:
    """What may be used here; loads it at the first call."""
    with _lock:
        return _load(library())


def describe(dtype: DTypeLike, *, allowed: bool = True) -> str:
    """For people: what multiplies numbers of a type, and if it is not native, why."""
    if not allowed:
        return f"XLA in blocks ({NAME} are off)"
    there = native()
    why = there.why_not or f"they have none for {jnp.dtype(dtype).name} on this processor"
    form = there.form(dtype)
    return f"XLA in blocks (no {NAME}: {why})" if form is None else f"{NAME} ({form})"


def usable(dtype: DTypeLike) -> bool:
    """Whether numbers of a type may be multiplied here."""
    return native().form(dtype) is not None


def grouped(
    rows: Float[Array, "p k"], kernels: Float[Array, "e n k"], ends: Int[Array, " e"], *, form: str | None = None
) -> Float[Array, "p n"]:
    """Each row times the kernel of its group, as ``jax.lax.ragged_dot_general`` has it: ``kernels[group] @ row``.

    Each number is summed in float32 in one order, whatever else is in the call, so that a row's bits do not depend on
    its company. Numbers too small to be normal count as zero. On a CPU only: put it under
    ``jax.lax.platform_dependent``.

    Args:
        rows: sorted by group.
        kernels: of each group, of the same type.
        ends: where each group's rows end, ascending; rows behind the last give zeros.
        form: one of ``FORMS``; by default the best there is.

    Raises:
        ValueError: numbers of a type for which there is none.
    """
    form = form or native().form(rows.dtype)
    if form is None or FORMS[form] != rows.dtype or kernels.dtype != rows.dtype:
        raise ValueError(f"no native product of {rows.dtype} and {kernels.dtype} numbers")
    (p, k), (e, n, _) = rows.shape, kernels.shape
    words = -(-max(k * rows.dtype.itemsize, 1) // (_WORD_BYTES * _TILE)) * _TILE
    # Of each group the last tile may not be full.
    tiles = p // _TILE + min(p, e) if form == "AMX" else 0
    packed = jax.ShapeDtypeStruct((tiles, words, _TILE), jnp.uint32)
    call = jax.ffi.ffi_call(TARGET, (jax.ShapeDtypeStruct((p, n), jnp.float32), packed))
    return call(rows, kernels, ends.astype(jnp.int32), form=np.int32(list(FORMS).index(form)))[0]


@functools.cache
def _load(path: Path) -> Native:
    lacking = sorted(NEEDED - _instructions())
    if lacking:
        return Native(why_not=f"the processor lacks {', '.join(lacking)}")
    if not path.exists():
        return Native(why_not=f"not built; `{COMMAND}` builds them")
    try:
        built = ctypes.CDLL(str(path))
    except OSError as error:
        return Native(why_not=f"not loaded: {error}")
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(built.jaxserve_grouped), platform="cpu")
    bits = built.jaxserve_forms()
    return Native(tuple(name for bit, name in enumerate(FORMS) if bits >> bit & 1))


def _instructions() -> frozenset[str]:
    """What the processor and the operating system offer, as Linux names it."""
    if sys.platform != "linux":
        return frozenset()
    with Path("/proc/cpuinfo").open(encoding="ascii", errors="replace") as lines:
        return frozenset(next((line for line in lines if line.startswith("flags")), "").split())
