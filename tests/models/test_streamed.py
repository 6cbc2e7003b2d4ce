from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.streamed import lanes, streamed

E, N = 3, 24


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("columns", [16, 96, 256])
def test_it_is_the_product(columns, dtype):
    draw = np.random.default_rng(0)
    x, matrices = (jnp.asarray(draw.standard_normal(shape), dtype) for shape in ((1, columns), (E, N, columns)))
    found = jax.jit(streamed)(x, matrices, jnp.int32(2))
    wide, exact = (np.asarray(part, np.float64) for part in (matrices, x))
    np.testing.assert_allclose(found, exact @ wide[2].T, atol=1e-4)
    assert found.dtype == jnp.float32
    assert np.abs(found - exact @ wide[1].T).max() > 0.1


def test_the_matrix_is_not_copied():
    x, matrices, index = jnp.ones((1, 1024)), jnp.ones((4, 512, 1024)), jnp.int32(1)

    def multiplied(x, matrices, index):
        return jnp.tile(x, (8, 1)) @ jax.lax.dynamic_index_in_dim(matrices, index, keepdims=False).T

    needed = [
        jax.jit(form).lower(x, matrices, index).compile().memory_analysis().temp_size_in_bytes
        for form in (streamed, multiplied)
    ]
    assert needed[0] < matrices[0].nbytes / 8
    assert needed[1] >= matrices[0].nbytes


def test_how_many_columns_go_side_by_side():
    assert [lanes(columns) for columns in (16, 512, 1024, 2048, 2880, 7168)] == [16, 16, 32, 32, 32, 64]
    assert lanes(40) is None
    assert lanes(16 * 3001) is None
    with pytest.raises(ValueError, match="40 columns"):
        streamed(jnp.ones((1, 40)), jnp.ones((2, 3, 40)), jnp.int32(0))
