from __future__ import annotations

from jaxserve.models.mistral import family
from jaxserve.testing import TINY


def test_the_window_is_in_every_layer_or_in_none():
    assert family(TINY | {"sliding_window": 16}).config.windows == (16, 16)
    assert family(TINY | {"sliding_window": None}).config.windows == (None, None)
