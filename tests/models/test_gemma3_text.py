from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jaxserve.errors import CheckpointError
from jaxserve.models.family import family_of
from jaxserve.models.gemma3_text import FULL, WINDOWED, family

# All that a published file of the 4B size says of its text model.
SILENT = {
    "model_type": "gemma3_text",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}
ORACLE = json.loads((Path(__file__).parents[1] / "reference" / "oracle.json").read_text())["frequencies"]


def test_what_a_file_does_not_say():
    config = family(SILENT).config
    mixers = [layer.mixer for layer in config.layers]
    assert [index for index, mixer in enumerate(mixers) if mixer.window is None] == [5, 11, 17, 23, 29]
    assert {mixer.window for mixer in mixers} == {1024, None}
    assert (mixers[0].heads, mixers[0].kv_heads, mixers[0].head_size, mixers[0].scale) == (8, 4, 256, 1 / 16)
    assert (config.vocab_size, config.max_positions, config.tied, config.softcap) == (262_208, 131_072, True, None)
    assert config.embedding_scale == pytest.approx(2560**0.5)
    assert config.layers[0].ffn.activation == "gelu_tanh"


def test_the_kinds_of_layers_rotate_differently():
    windowed, full = (family(SILENT).config.layers[index].mixer.rope for index in (0, 5))
    assert windowed.frequencies[1] == pytest.approx(10_000.0 ** (-2 / 256))
    assert full.frequencies[1] == pytest.approx(1_000_000.0 ** (-2 / 256) / 8)


@pytest.mark.reference
@pytest.mark.parametrize("case", [case for case in ORACLE if case["layer_type"]], ids=lambda case: case["name"])
def test_frequencies_are_those_of_transformers(case):
    assert case["config"]["model_type"] == "gemma3_text"
    layer = {WINDOWED: 0, FULL: 5}[case["layer_type"]]
    rope = family(case["config"]).config.layers[layer].mixer.rope
    np.testing.assert_allclose(rope.frequencies, case["inv_freq"], rtol=2e-6)


def test_both_spellings_of_the_rotation_mean_the_same():
    old = {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    new = {
        WINDOWED: {"rope_type": "default", "rope_theta": 2e4},
        FULL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
    }
    plain = {name: value for name, value in SILENT.items() if name != "rope_scaling"}
    assert family(plain | old).config == family(plain | {"rope_parameters": new}).config
    assert family(plain | old).config != family(plain).config


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"attn_logit_softcapping": 50.0}, "cap"),
        ({"use_bidirectional_attention": True}, "later tokens"),
        ({"layer_types": [WINDOWED] * 33 + ["chunked_attention"]}, "chunked_attention"),
        ({"layer_types": [WINDOWED] * 33}, "33 entries"),
        ({"sliding_window_pattern": 0}, "ZeroDivisionError"),
        ({"head_dim": None}, "Type"),
        ({"hidden_activation": "relu"}, "relu"),
    ],
)
def test_what_the_family_does_not_have_is_refused(wrong, named):
    with pytest.raises(CheckpointError, match=named):
        family_of(SILENT | wrong)
