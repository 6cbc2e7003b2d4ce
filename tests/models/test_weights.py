from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import CheckpointError
from jaxserve.models.weights import Piece, Rule, abstract, nest, params_of, rule

RULE = rule("layers.0.q.kernel", "q.weight", (2, 3, 4), ("model", "heads", None), order=(2, 0, 1))


def test_a_tensor_is_reshaped_and_transposed():
    source = np.arange(24, dtype=np.float32).reshape(6, 4)
    leaf = RULE.make({"q.weight": source}, np.float32)
    assert leaf.shape == RULE.shape == (4, 2, 3)
    assert leaf[1, 1, 2] == source[5, 1]


def test_a_wrong_size_is_named():
    with pytest.raises(CheckpointError, match=r"q\.weight has shape \(5, 4\)"):
        RULE.make({"q.weight": np.zeros((5, 4), np.float32)}, np.float32)


STACKED = Rule(
    "experts",
    (2, 2, 3),
    ("experts", None, None),
    (
        (Piece("fused", (2, 2, 3)),),
        tuple(
            Piece(f"{e}.{name}", (3,), (), ((e, e + 1), (i, i + 1))) for e in range(2) for i, name in enumerate("gu")
        ),
    ),
)


def test_a_leaf_is_made_of_what_the_file_has():
    fused = np.arange(12, dtype=np.float32).reshape(4, 3)
    apart = {f"{e}.{name}": fused[2 * e + i] for e in range(2) for i, name in enumerate("gu")}
    np.testing.assert_array_equal(STACKED.make({"fused": fused}, np.float32), fused.reshape(2, 2, 3))
    np.testing.assert_array_equal(STACKED.make(apart, np.float32), fused.reshape(2, 2, 3))
    del apart["1.u"]
    with pytest.raises(CheckpointError, match="fused is missing"):
        STACKED.make(apart, np.float32)


def test_some_rows_of_a_tensor():
    tensor = np.arange(12, dtype=np.float32).reshape(6, 2)
    assert Piece("x", (2, 1, 2), rows=(3, 5)).cut(tensor).tolist() == [[[6, 7]], [[8, 9]]]


def test_paths_become_a_tree():
    assert nest({"a.b": 1, "a.c": 2, "d": 3}) == {"a": {"b": 1, "c": 2}, "d": 3}


def test_shapes_need_no_memory():
    leaf = abstract([RULE], jnp.bfloat16)["layers"]["0"]["q"]["kernel"]
    assert (leaf.shape, leaf.dtype) == ((4, 2, 3), jnp.bfloat16)
    assert abstract([rule("a", "a", (2,), (None,), dtype="float32")], jnp.bfloat16)["a"].dtype == jnp.float32


def test_numbers_in_a_path_are_indices():
    assert params_of(nest({"layers.10.a": 1, "b": 2})) == {"layers": {10: {"a": 1}}, "b": 2}


def test_a_leaf_is_found_under_another_name():
    one = STACKED.also_named(lambda name: f"inner.{name}", str.upper)
    assert [piece.source for piece in one.pieces({"inner.fused"})] == ["inner.fused"]
    assert [piece.source for piece in one.pieces({"FUSED"})] == ["FUSED"]
    apart = {f"inner.{e}.{name}" for e in range(2) for name in "gu"}
    assert {piece.source for piece in one.pieces(apart)} == apart
    assert one.pieces({"nothing"}) == STACKED.ways[0]
