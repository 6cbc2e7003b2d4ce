from __future__ import annotations

import jax
import numpy as np

from jaxserve.config import Pool
from jaxserve.engine.request import Request, SamplingParams
from jaxserve.engine.rows import RowTable
from jaxserve.models.family import family_of
from jaxserve.plan import MODEL_STOP_TOKENS
from jaxserve.testing import TINY, tiny_plan


def table() -> RowTable:
    plan = tiny_plan(family_of(TINY), (Pool(3, 64),), max_logit_bias=4, max_stop_token_ids=3)
    return RowTable(plan, plan.pools[0])


def test_a_request_becomes_a_row():
    rows = table()
    sampling = SamplingParams(
        max_tokens=9, min_tokens=2, temperature=0.5, top_k=4, logit_bias=((7, 1.5), (8, -2.0)), logprobs=3
    )
    rows.set(1, Request("a", (1, 2, 3), sampling), (5, 6), seed=(3 << 32) | 4)
    row = jax.tree.map(lambda leaf: np.asarray(leaf)[1].tolist(), rows.snapshot())
    assert (row.temperature, row.top_k, row.limit, row.min_length, row.prompt_length) == (0.5, 4, 12, 5, 3)
    assert row.bias_ids == [7, 8, -1, -1]
    assert row.bias == [1.5, -2.0, 0.0, 0.0]
    assert row.stop_ids == [5, 6] + [-1] * (1 + MODEL_STOP_TOKENS)
    assert row.seed == [3, 4]
    assert row.alternatives is True


def test_a_cleared_row_is_as_new():
    rows = table()
    before = jax.tree.map(np.asarray, rows.snapshot())
    rows.set(1, Request("a", (1,), SamplingParams(repetition_penalty=2.0, seed=9)), (5,), seed=9)
    rows.clear(1)
    assert jax.tree.all(jax.tree.map(lambda old, new: (old == np.asarray(new)).all(), before, rows.snapshot()))


def test_a_snapshot_never_changes():
    rows = table()
    first = rows.snapshot()
    assert rows.snapshot() is first
    rows.set(0, Request("a", (1,), SamplingParams(temperature=0.9)), (), seed=1)
    assert first.temperature.tolist() == [0.0, 0.0, 0.0]
    assert rows.snapshot().temperature[0] > 0.8
