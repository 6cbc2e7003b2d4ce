"""What requests are told that they took adds up, token by token, and is what the metrics count."""

from __future__ import annotations

import dataclasses
import random

import pytest

from jaxserve.config import Pool
from jaxserve.decode.speculative import price_of
from jaxserve.decode.tally import COLUMNS
from jaxserve.engine.engine import Engine
from jaxserve.engine.metrics import COUNTED, Metrics
from jaxserve.engine.request import NOTHING, Account, Delta, FinishReason, Request, SamplingParams
from jaxserve.models.decoding import RULES
from jaxserve.testing import TINY_BLOCKS, tiny_engine

COUNT, BLOCK, DRAFTS = 1000, TINY_BLOCKS["block_size"], 3


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine((Pool(16, 64),), hf=TINY_BLOCKS, prefill_buckets=(32,), max_logprobs=5, max_logit_bias=8)


def request(dice: random.Random, name: str, **more) -> Request:
    """Of any kind; some end at a stop token, some at their limit, in the middle of a block or not."""
    settings = {"threshold": dice.choice([0.0, 0.1, 0.5]), "edit_threshold": dice.choice([0.05, 0.3, 1.0])}
    settings |= {"rule": dice.randrange(len(RULES) - 1), "max_post_steps": dice.choice([0, 1, 4])}
    prompt = tuple(dice.randrange(256) for _ in range(dice.randint(1, 24)))
    sampling = SamplingParams(
        max_tokens=dice.randint(1, 32),
        temperature=dice.choice([0.0, 0.7, 1.3]),
        seed=dice.randrange(100),
        stop_token_ids=tuple(dice.randrange(256) for _ in range(4)) if dice.random() < 0.5 else (),
        ignore_eos=dice.random() < 0.5,
    )
    draft = tuple(dice.randrange(256) for _ in range(dice.choice([0, 0, 5, 40])))
    return Request(name, prompt, sampling, settings=tuple(settings.items()), draft=draft, **more)


def run(engine: Engine, requests: list[Request]) -> dict[str, list[Delta]]:
    """The deltas of each."""
    said: dict[str, list[Delta]] = {one.id: [] for one in requests}
    ahead = list(reversed(requests))
    while ahead or engine.has_work:
        while ahead and engine._scheduler.arrivals < engine.capacity:
            engine.submit(ahead.pop())
        for name, delta in engine.tick():
            said[name].append(delta)
    return said


def counted(metrics: Metrics, kind: str = "block") -> dict[str, float]:
    """What the metrics say, by the account's names."""
    value = metrics.registry.get_sample_value
    return {name: value(metric, {"kind": kind}) or 0.0 for name, (metric, _) in COUNTED.items()}


def test_a_thousand_requests_add_up_and_equal_the_metrics(engine: Engine):
    dice = random.Random(0)
    requests = [request(dice, str(index), traced=dice.random() < 0.2) for index in range(COUNT)]
    engine.metrics = Metrics()
    said = run(engine, requests)
    total = NOTHING
    for one in requests:
        deltas = said[one.id]
        account, tokens = deltas[-1].account, sum(len(delta.tokens) for delta in deltas)
        assert deltas[-1].finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        assert account.drafted == account.accepted + account.rejected
        # Whatever was decided is text or was cut away behind its end.
        assert tokens + account.wasted <= account.drafted + account.inserted
        assert account.passes >= account.blocks >= 1
        if one.traced:
            passes = [each for delta in deltas for each in delta.passes]
            assert sum((each.account for each in passes), NOTHING) == account
            assert [token for each in passes for token in each.tokens] == [t for delta in deltas for t in delta.tokens]
            assert all(not (each.tokens and each.canvas) for each in passes)
        else:
            assert not any(delta.passes for delta in deltas)
        assert not any(delta.canvas for delta in deltas)
        total += account
    assert total.drafted > COUNT
    assert min(total.rejected, total.edited, total.wasted, total.post_steps) > 0
    assert {name: total.counts()[name] for name in COUNTED} == counted(engine.metrics)
    assert engine.metrics.registry.get_sample_value("jaxserve_tokens_per_pass_count", {"kind": "block"}) == COUNT
    assert engine.recompiles == 0


def test_drafts_of_a_model_that_continues_text_add_up_too():
    """Each pass makes one token more than the drafts that it keeps."""
    engine = tiny_engine(
        (Pool(16, 64),), prefill_buckets=(32,), max_logprobs=5, max_logit_bias=8, draft_tokens=(DRAFTS,)
    )
    dice, total = random.Random(0), NOTHING
    requests, free = [], ((price_of(1 + DRAFTS), 1.0),)  # what passes cost here is nothing to this test
    for index in range(300):
        settings = (("drafts", dice.choice([0, 1, DRAFTS])), *free) if dice.random() < 0.6 else free
        requests.append(dataclasses.replace(request(dice, str(index)), settings=settings))
    engine.metrics = Metrics()
    said = run(engine, requests)
    for one in requests:
        account, tokens = said[one.id][-1].account, sum(len(delta.tokens) for delta in said[one.id])
        assert account.drafted == account.accepted + account.rejected
        assert tokens + account.wasted == account.passes + account.accepted
        if dict(one.settings).get("drafts") == 0:
            assert (account.drafted, account.passes) == (0, tokens)
        total += account
    assert min(total.accepted, total.rejected, total.predicted_rejected) > 0
    assert {name: total.counts()[name] for name in COUNTED} == counted(engine.metrics, "speculative")
    assert engine.recompiles == 0


def test_canvases_are_for_who_asks_and_change_nothing(engine: Engine):
    dice = random.Random(1)
    plain = [request(dice, str(index)) for index in range(24)]
    asking = [dataclasses.replace(one, provisional=True) for one in plain]
    told = run(engine, asking)
    assert any(delta.canvas for deltas in told.values() for delta in deltas)
    assert all(len(delta.canvas) <= 2 * BLOCK for deltas in told.values() for delta in deltas)
    for name, deltas in run(engine, plain).items():
        assert [t for d in deltas for t in d.tokens] == [t for d in told[name] for t in d.tokens]
        assert deltas[-1].account == told[name][-1].account


def test_one_token_a_pass_is_what_it_says(engine: Engine):
    """The sequential rule without edits: no more passes than tokens and commits, and nothing is rejected."""
    settings = {"rule": RULES.index("sequential"), "denoising_steps": BLOCK, "max_post_steps": 0}
    sampling = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    one = Request("one", tuple(range(BLOCK)), sampling, settings=tuple(settings.items()), traced=True)
    deltas = run(engine, [one])["one"]
    account = deltas[-1].account
    assert (account.drafted, account.accepted, account.edited, account.blocks) == (24, 24, 0, 3)
    assert 24 <= account.passes <= 24 + account.blocks
    masks = [each.canvas.count(TINY_BLOCKS["mask_token_id"]) for d in deltas for each in d.passes if each.canvas]
    assert masks[: BLOCK - 1] == list(range(BLOCK - 1, 0, -1))


def test_account_and_columns_have_the_same_names():
    assert tuple(NOTHING.counts()) == COLUMNS
    one, two = Account(passes=1, drafted=2), Account(passes=2, wasted=3)
    assert one + two == Account.of([one, two]) == Account(passes=3, drafted=2, wasted=3)
    assert Account.of([]) == NOTHING
