from __future__ import annotations

from jaxserve.models.qwen3 import family
from jaxserve.testing import TINY


def test_the_head_size_is_never_derived():
    default, stated = (family(hf).config.layers[0].mixer for hf in (TINY, TINY | {"head_dim": 24}))
    assert default.head_size == 128
    assert stated.head_size == 24
    assert stated.head_norm is not None
