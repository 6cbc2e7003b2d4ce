"""What a program needs beside its arguments: nothing that grows with the cache, on any jax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxserve.config import EngineConfig, Pool
from jaxserve.decode.autoregressive import Autoregressive
from jaxserve.engine.programs import Programs
from jaxserve.models.family import family_of
from jaxserve.models.weights import abstract, params_of
from jaxserve.plan import Program, make_plan
from jaxserve.testing import TINY


def make_programs(dtype: str, length: int) -> Programs:
    """The programs of the tiny model, not compiled, without a weight in memory."""
    family = family_of(TINY | {"max_position_embeddings": 8192})
    engine = EngineConfig(pools=(Pool(8, length),), prefill_buckets=(32,))
    size = jnp.dtype(dtype).itemsize
    plan = make_plan(family.shape, engine, dtype=dtype, dtype_bytes=size, memory_limit=2**34)
    params = params_of(abstract(family.rules, jnp.dtype(dtype)))
    return Programs(plan, family, family.graphdef(jnp.dtype(dtype)), params, Autoregressive(4))


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
@pytest.mark.parametrize("program", [Program("prefill", 0, 32), Program("run", 0)])
def test_it_lowers_for_every_platform(program, platform):
    """Without such a device: the same program, and the form of products that only XLA:CPU wants on CPU only."""
    text = make_programs("bfloat16", 256)._trace(program).lower(lowering_platforms=(platform,)).as_text()
    assert "stablehlo.while" in text
    assert ("optimization_barrier" in text) == (platform == "cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("program", [Program("prefill", 0, 32), Program("run", 0)])
def test_the_cache_is_updated_in_place(program, dtype):
    """XLA:CPU copies it for a scatter, a select, an unrolled loop, or an update scheduled before the last read."""
    programs = make_programs(dtype, 8192)
    analysis = programs._trace(program).lower().compile().memory_analysis()
    state = jax.eval_shape(lambda: programs.empty(0))
    cache = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.cache))
    assert analysis.temp_size_in_bytes < cache / 5  # one layer's keys are a quarter
    assert analysis.alias_size_in_bytes >= cache  # the state that goes in is the state that comes out
