"""SmolLM3's fields; its numbers are compared with transformers' in test_family_passes.py."""

from __future__ import annotations

import pytest

from jaxserve.errors import CheckpointError
from jaxserve.models.family import family_of
from jaxserve.testing import TINY

BASE = TINY | {"model_type": "smollm3", "num_hidden_layers": 5}


def turned(**fields):
    return [layer.mixer.rope is not None for layer in family_of(BASE | fields).config.layers]


def test_every_fourth_layer_does_not_turn():
    assert turned() == [True, True, True, False, True]
    assert turned(no_rope_layer_interval=2) == [True, False, True, False, True]
    assert turned(no_rope_layers=[0, 1, 1, 1, 0]) == [False, True, True, True, False]


def test_windows_are_where_nothing_turns():
    layers = family_of(BASE | {"use_sliding_window": True, "sliding_window": 7}).config.layers
    assert [layer.mixer.window for layer in layers] == [None, None, None, 7, None]
    layers = family_of(BASE | {"sliding_window": 7}).config.layers
    assert {layer.mixer.window for layer in layers} == {None}


def test_rotations_for_fewer_layers_are_refused():
    with pytest.raises(CheckpointError, match="2 entries for 5 layers"):
        family_of(BASE | {"no_rope_layers": [1, 0]})
