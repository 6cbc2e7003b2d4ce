"""Counts by name become columns in their order."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.decode.tally import COLUMNS, tally


def test_columns_are_in_their_places():
    found = tally(2, drafted=jnp.asarray([3, 4]), post_steps=jnp.asarray([1, 0]))
    assert (found.shape, found.dtype) == ((2, len(COLUMNS)), jnp.int32)
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in np.asarray(found).tolist()]
    assert rows[0] == dict.fromkeys(COLUMNS, 0) | {"drafted": 3, "post_steps": 1}
    assert rows[1] == dict.fromkeys(COLUMNS, 0) | {"drafted": 4}


def test_a_name_that_nobody_knows_is_a_mistake():
    with pytest.raises(AssertionError):
        tally(1, drafts=jnp.zeros(1, jnp.int32))
