from __future__ import annotations

from jaxserve.models.mistral import family
from jaxserve.testing import TINY


def test_the_window_is_in_every_layer_or_in_none():
    for window in (16, None):
        layers = family(TINY | {"sliding_window": window}).config.layers
        assert [layer.mixer.window for layer in layers] == [window, window]
