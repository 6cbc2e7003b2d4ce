from __future__ import annotations

import numpy as np
import pytest

from jaxserve.decode import jitted
from jaxserve.engine.request import Request, SamplingParams
from jaxserve.errors import InvalidRequest
from jaxserve.launch.loading import LoadedModel
from jaxserve.launch.writing import generate, score

GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)


def test_pieces_make_the_whole(loaded: LoadedModel):
    prompt = tuple(loaded.tokenizer.encode("Hello"))
    (answer,) = loaded.engine.generate([Request("whole", prompt, GREEDY)])
    pieces = list(generate(loaded, "Hello", GREEDY))
    assert "".join(pieces) == loaded.tokenizer.decode(answer.tokens)
    assert len(pieces) > 3


def test_a_message_goes_through_the_template(loaded: LoadedModel):
    ids = loaded.chat_template.encode(loaded.tokenizer, [{"role": "user", "content": "Hi"}])
    (answer,) = loaded.engine.generate([Request("chat", tuple(ids), GREEDY)])
    assert "".join(generate(loaded, "Hi", GREEDY, chat=True)) == loaded.tokenizer.decode(answer.tokens)


def test_an_abandoned_text_frees_its_slot(loaded: LoadedModel):
    pieces = generate(loaded, "Hello", SamplingParams(max_tokens=100, ignore_eos=True))
    next(pieces)
    pieces.close()
    assert "".join(generate(loaded, "Hello", GREEDY))
    with pytest.raises(InvalidRequest):
        next(generate(loaded, "Hello", SamplingParams(temperature=-1.0)))
    assert not loaded.engine.has_work


def test_scores_are_those_of_the_tokens(loaded: LoadedModel):
    text = "The capital of France is not London."
    ids = loaded.tokenizer.encode(text)
    scores = list(score(loaded, text))
    assert "".join(token for token, _ in scores) == text[len(loaded.tokenizer.decode(ids[:1])) :]
    chosen = jitted.score(loaded.graphdef, loaded.params, np.asarray([ids], np.int32)).chosen[0]
    np.testing.assert_allclose([logprob for _, logprob in scores], chosen, atol=1e-4)
    for wrong in ("", "a" * 1000):
        with pytest.raises(InvalidRequest, match="can be scored"):
            list(score(loaded, wrong))


def test_a_model_that_fills_in_text_writes_and_scores_nothing(blocks: LoadedModel):
    text = "".join(generate(blocks, "a", SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)))
    assert text
    with pytest.raises(InvalidRequest, match="fills in text"):
        next(score(blocks, "a text"))
