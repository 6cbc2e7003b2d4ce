from __future__ import annotations

from jaxserve.models.llama import family
from jaxserve.testing import TINY


def test_biases_by_configuration():
    plain = family(TINY).config.layers[0]
    assert (plain.mixer.bias, plain.mixer.output_bias, plain.ffn.bias) == (False, False, False)
    biased = family(TINY | {"attention_bias": True, "mlp_bias": True}).config.layers[1]
    assert (biased.mixer.bias, biased.mixer.output_bias, biased.ffn.bias) == (True, True, True)


def test_tied_models_ignore_a_head_that_repeats_the_embedding():
    tied, untied = (family(TINY | {"tie_word_embeddings": tie}) for tie in (True, False))
    assert "lm_head.weight" in tied.ignored
    assert "lm_head.weight" in {rule.ways[0][0].source for rule in untied.rules}
