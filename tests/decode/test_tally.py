"""Counts by name."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest

from jaxserve.decode.tally import COLUMNS, tally
from jaxserve.engine.request import Account


def test_columns_are_found_by_name():
    counts = tally(2, accepted=jnp.asarray([3, 4]), passes=jnp.asarray([1, 1]))
    assert counts[:, COLUMNS.index("accepted")].tolist() == [3, 4]
    assert counts.sum() == 9
    assert counts.dtype == jnp.int32


def test_the_host_counts_the_same():
    assert [field.name for field in dataclasses.fields(Account)] == list(COLUMNS)


def test_an_unknown_name_is_refused():
    with pytest.raises(AssertionError):
        tally(1, guessed=jnp.asarray([1]))
