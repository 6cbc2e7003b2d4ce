from __future__ import annotations

from jaxserve.models.qwen2 import family, layer_windows
from jaxserve.testing import TINY


def test_biases_on_queries_keys_and_values_only():
    mixer = family(TINY).config.layers[0].mixer
    assert (mixer.bias, mixer.output_bias) == (True, False)


def test_a_window_counts_only_when_switched_on():
    window = {"num_hidden_layers": 4, "sliding_window": 8, "max_window_layers": 2}
    assert layer_windows(window) == (None,) * 4
    assert layer_windows(window | {"use_sliding_window": True}) == (None, None, 8, 8)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert layer_windows(window | {"use_sliding_window": True, "layer_types": kinds}) == (8, None, 8, None)
