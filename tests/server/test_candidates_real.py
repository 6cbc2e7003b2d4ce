"""Candidates over real programs: read once a round, the same in any company, verified and corrected by block models."""

from __future__ import annotations

import asyncio
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.config import Pool
from jaxserve.decode.score import logits
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.engine.request import Request, SamplingParams
from jaxserve.models.family import family_of
from jaxserve.server.candidates import Candidates
from jaxserve.server.parallel import Asked
from jaxserve.testing import TINY_BLOCKS, tiny_engine

ASKED = Asked(candidates=4, fragment_tokens=8)


@pytest.fixture(scope="module")
def blocks():
    return tiny_engine((Pool(16, 64),), hf=TINY_BLOCKS, prefill_buckets=(32,), max_logprobs=5, max_logit_bias=8)


def request(name: str = "whole", **sampling) -> Request:
    settings = SamplingParams(**{"max_tokens": 24, "temperature": 1.0, "seed": 7, "ignore_eos": True} | sampling)
    return Request(name, tuple(range(60, 76)), settings)


def answered(model, engine, *wholes: Request, asked: Asked = ASKED):
    """Tokens of each, written side by side, and the streams."""

    async def run():
        running = AsyncEngine(engine)
        sent: list[Request] = []
        submit = running.submit

        def noted(request, *, patient=False):
            sent.append(request)
            return submit(request, patient=patient)

        running.submit = noted
        served = dataclasses.replace(model, engine=running)
        try:
            streams = [Candidates(whole, served, asked, asyncio.Lock()) for whole in wholes]
            for stream in streams:
                stream.begin()

            async def read(stream):
                return tuple([token async for delta in stream for token in delta.tokens])

            return await asyncio.gather(*map(read, streams)), streams, sent
        finally:
            running.close()

    return asyncio.run(run())


def test_the_text_so_far_is_read_once_a_round_and_company_changes_nothing(model, tiny):
    before, compiled = tiny.metrics.shared_tokens._value.get(), tiny.recompiles
    (alone,), (stream,), _ = answered(model, tiny, request())
    assert len(alone) == 24
    assert len(stream.rounds) == 3
    assert tiny.metrics.shared_tokens._value.get() - before == 3 * sum(15 + 8 * index for index in range(3))
    together, *_ = answered(model, tiny, request("other", seed=8), request(), request("third", seed=9))
    assert together[1] == alone
    assert len(set(together)) == 3
    assert tiny.recompiles == compiled


def in_blocks(model):
    return dataclasses.replace(model, decoding=family_of(TINY_BLOCKS).decoding)


def test_a_verifier_reads_the_finished_text(model, blocks):
    """Its scores are those of a pass over prompt and text, without a cache, in the tokens' own places."""
    whole = dataclasses.replace(request(max_tokens=8), settings=(("max_post_steps", 0),))  # nothing is looked at again
    asked = dataclasses.replace(ASKED, rescore="verifier")
    _, (stream,), sent = answered(in_blocks(model), blocks, whole, asked=asked)
    (one,), programs = stream.rounds, blocks.device.programs
    model_of = nnx.merge(programs._graphdef, programs._params)
    verified = [request for request in sent if request.draft]
    assert len(one.scores) == len(verified) == 4
    assert stream.generated == 8 * 8 <= 8 * asked.times
    for score, request_of in zip(one.scores, verified, strict=True):
        ids = np.zeros((1, 32), np.int32)
        ids[0, :24] = request_of.prompt + request_of.draft
        scores = jax.nn.log_softmax(logits(model_of, jnp.asarray(ids), TINY_BLOCKS["block_size"]))
        assert score == pytest.approx(np.asarray(scores)[0, np.arange(16, 24), ids[0, 16:24]].mean(), abs=1e-4)
    _, (written,), _ = answered(in_blocks(model), blocks, whole)
    pairs = zip(written.rounds[0].scores, one.scores, strict=True)
    assert max(abs(own - read) for own, read in pairs) > 0.1  # while it was written it looked otherwise


def test_the_weakest_part_is_decided_anew(model, blocks):
    texts, streams, sent = answered(
        in_blocks(model), blocks, *(request(f"r{seed}", seed=seed) for seed in range(4)), asked=ASKED
    )
    rounds = [one for stream in streams for one in stream.rounds]
    assert all(len(one.scores) == 5 for one in rounds)
    assert all(stream.generated == 24 * ASKED.times for stream in streams)
    assert 0 < sum(one.chosen == 4 for one in rounds) < len(rounds)
    assert all(one.scores[one.chosen] == max(one.scores) for one in rounds)
    for one in sent:
        if one.draft:
            fragment = one.draft[one.written :]
            masks = [place for place, token in enumerate(fragment) if token == TINY_BLOCKS["mask_token_id"]]
            assert masks == list(range(masks[0], masks[0] + 2))
            assert len(fragment) == 8
    again, *_ = answered(in_blocks(model), blocks, request("r2", seed=2))
    assert again[0] == texts[2]


@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_who_leaves_in_the_middle_leaves_nothing(model, tiny, rounds: int):
    async def run():
        running = AsyncEngine(tiny)
        try:
            stream = Candidates(
                request(max_tokens=80), dataclasses.replace(model, engine=running), ASKED, asyncio.Lock()
            )
            stream.begin()
            deltas = aiter(stream)
            for _ in range(rounds):
                await anext(deltas)
            reading = asyncio.create_task(anext(deltas))
            await asyncio.sleep(0.003)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            stream.cancel()
            for _ in range(500):
                if not tiny.has_work:
                    break
                await asyncio.sleep(0.01)
            assert not tiny.has_work
            assert tiny._scheduler.running == tiny._scheduler.waiting == 0
        finally:
            running.close()

    asyncio.run(run())
