from __future__ import annotations

from jaxserve.models.llama import family
from jaxserve.testing import TINY


def test_biases_by_configuration():
    plain = family(TINY).config
    assert (plain.qkv_bias, plain.output_bias, plain.mlp_bias) == (False, False, False)
    biased = family(TINY | {"attention_bias": True, "mlp_bias": True}).config
    assert (biased.qkv_bias, biased.output_bias, biased.mlp_bias) == (True, True, True)


def test_tied_models_ignore_a_head_that_repeats_the_embedding():
    tied, untied = (family(TINY | {"tie_word_embeddings": tie}) for tie in (True, False))
    assert "lm_head.weight" in tied.ignored
    assert "lm_head.weight" in {rule.source for rule in untied.rules}
