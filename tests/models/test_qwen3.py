from __future__ import annotations

from jaxserve.models.qwen3 import family
from jaxserve.testing import TINY


def test_the_head_size_is_never_derived():
    assert family(TINY).config.head_size == 128
    assert family(TINY | {"head_dim": 24}).config.head_size == 24
    assert family(TINY).config.qk_norm
