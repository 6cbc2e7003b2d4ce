"""The toy that ships with the package: an engine to test with, the same each time it is asked for."""

from __future__ import annotations

from jaxserve.config import Pool
from jaxserve.engine.request import Request, SamplingParams
from jaxserve.testing import MARKS, TINY_EOS, hash_tokens, tiny_engine

REQUEST = Request("a", (1, 2, 3), SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))


def test_a_toy_writes_the_same_each_time_and_another_seed_writes_another_text():
    first, again, other = (tiny_engine((Pool(2, 64),), seed=seed).generate([REQUEST])[0].tokens for seed in (0, 0, 1))
    assert len(first) == 6
    assert first == again
    assert first != other


def test_a_toy_compiles_nothing_after_it_was_made():
    engine = tiny_engine((Pool(2, 64),))
    engine.generate([REQUEST])
    assert engine.metrics.registry.get_sample_value("jaxserve_recompiles_total") == 0
    assert all(0 <= token <= TINY_EOS + 1 for token in engine.generate([REQUEST])[0].tokens)


def test_a_hash_answers_each_request_in_its_own_way():
    def answer(prompt, seed=1, stop_ids=()):
        request = Request("a", prompt, SamplingParams(max_tokens=40))
        return tuple(hash_tokens(request, seed, 211, stop_ids))

    whole = answer((50, 51))
    assert len(whole) == 40
    assert len({whole, answer((51, 50)), answer((50, 52)), answer((50, 51), seed=2)}) == 4
    assert min(whole) >= MARKS
    assert answer((50, 51), stop_ids=(whole[7],)) == whole[: whole.index(whole[7]) + 1]
