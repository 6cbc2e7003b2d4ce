from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import CheckpointError
from jaxserve.models.weights import Rule, abstract, nest

RULE = Rule("layers.0.q.kernel", "q.weight", (2, 3, 4), (2, 0, 1), ("model", "heads", None))


def test_a_rule_reshapes_and_transposes():
    source = np.arange(24, dtype=np.float32).reshape(6, 4)
    leaf = RULE.apply(source)
    assert leaf.shape == RULE.leaf_shape == (4, 2, 3)
    assert leaf[1, 1, 2] == source[5, 1]


def test_a_wrong_size_is_named():
    with pytest.raises(CheckpointError, match=r"q\.weight has shape \(5, 4\)"):
        RULE.apply(np.zeros((5, 4), np.float32))


def test_paths_become_a_tree():
    assert nest({"a.b": 1, "a.c": 2, "d": 3}) == {"a": {"b": 1, "c": 2}, "d": 3}


def test_shapes_need_no_memory():
    leaf = abstract([RULE], jnp.bfloat16)["layers"]["0"]["q"]["kernel"]
    assert (leaf.shape, leaf.dtype) == ((4, 2, 3), jnp.bfloat16)
