from __future__ import annotations

import pytest

from jaxserve.errors import CheckpointError
from jaxserve.models.hf_fields import attention_from_hf, check_sizes, layer_kinds, llama_like, mlp_from_hf, need
from jaxserve.testing import TINY


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "8", 10**30, None])
def test_what_is_no_size_is_refused_by_name(wrong):
    with pytest.raises(CheckpointError, match="num_hidden_layers is no whole number from 1 to 1024"):
        check_sizes(TINY | {"num_hidden_layers": wrong})


def test_what_may_be_absent_may_be_null():
    check_sizes(TINY | {"head_dim": None, "sliding_window": None, "num_key_value_heads": None})


def test_a_missing_field_is_named():
    with pytest.raises(CheckpointError, match="lacks 'hidden_size'"):
        need({"hidden_size": None}, "hidden_size")


def test_the_head_size_is_derived_only_where_it_is_not_stated():
    assert attention_from_hf(TINY).head_size == 8
    assert attention_from_hf(TINY | {"head_dim": 24}).head_size == 24
    assert attention_from_hf(TINY | {"head_dim": 24}, head_size=16).scale == 16**-0.5


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(CheckpointError, match="4 heads do not divide among 3 key heads"):
        attention_from_hf(TINY | {"num_key_value_heads": 3})


def test_one_kind_of_layer_each():
    assert layer_kinds(TINY) is None
    assert layer_kinds(TINY | {"layer_types": ["a", "b"]}) == ("a", "b")
    with pytest.raises(CheckpointError, match="layer_types has 1 entries for 2 layers"):
        layer_kinds(TINY | {"layer_types": ["a"]})


@pytest.mark.parametrize(("name", "found"), [("silu", "silu"), ("gelu_pytorch_tanh", "gelu_tanh")])
def test_activations_have_one_name_here(name, found):
    assert mlp_from_hf(TINY | {"hidden_act": name}).activation == found
    with pytest.raises(CheckpointError, match="'relu' is not supported"):
        mlp_from_hf(TINY | {"hidden_act": "relu"})


def test_layers_may_differ_in_windows_and_feed_forward_parts():
    parts = ("first", "second")
    config = llama_like(TINY, windows=(None, 16), ffn=parts.__getitem__)
    assert [layer.mixer.window for layer in config.layers] == [None, 16]
    assert [layer.ffn for layer in config.layers] == ["first", "second"]
    with pytest.raises(CheckpointError, match="3 entries for 2 layers"):
        llama_like(TINY, windows=(None, None, None))
