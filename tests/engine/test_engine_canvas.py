"""The engine's promises where canvases are refined: what transformers writes, in any company, and after a fault."""

from __future__ import annotations

import dataclasses
import random

import jax.numpy as jnp
import pytest

from jaxserve.config import Pool
from jaxserve.decode import canvas
from jaxserve.decode.canvas import strategy_of
from jaxserve.engine.engine import Engine
from jaxserve.engine.jax_device import JaxDevice
from jaxserve.engine.programs import Programs
from jaxserve.engine.request import FinishReason, Request, SamplingParams
from jaxserve.engine.scheduler import Policy
from jaxserve.testing import tiny_plan
from tests.engine.test_engine import Faults
from tests.models import tiny_checkpoints as tiny

CASE, SIZE, CANVASES = "diffusion_gemma", 20, 2

pytestmark = pytest.mark.reference


@pytest.fixture(scope="module")
def engine() -> Engine:
    family, params = tiny.load(CASE)
    plan = tiny_plan(family, (Pool(4, 128),), prefill_buckets=(32,))
    strategy = strategy_of(family, jnp.float32, plan.max_logprobs)
    plan = dataclasses.replace(plan, widths=strategy.widths, hands=True)
    programs = Programs(plan, family, family.graphdef(jnp.float32), params, strategy)
    engine = Engine(JaxDevice(programs), Policy(4, 256, 60.0, 600.0, 0.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(canvas, "AT_A_TIME", 4)  # as a canvas of 256 is worked on, in parts
        engine.warm_up()
    return engine


def requests(engine: Engine, **changes) -> list[Request]:
    """Those whose canvases transformers has filled."""
    golden = tiny.goldens(CASE)
    sampling = {"temperature": 1.0, "logprobs": 1} | changes
    found = []
    for index, (length, *settings) in enumerate(golden["requests"].tolist()):
        most = min(SIZE * CANVASES, engine.plan.max_length - int(length))  # one text is as long as its slot
        own = SamplingParams(**{"max_tokens": most, "seed": int(golden["filled_seed"][index])} | sampling)
        named = dict(zip(engine.device.programs.strategy.settings, settings, strict=True))
        found.append(Request(str(index), tuple(golden["prompt"][: int(length)].tolist()), own, settings=named))
    return found


def right(request: Request) -> list[int]:
    return tiny.goldens(CASE)["filled_tokens"][int(request.id)].tolist()[: request.sampling.max_tokens]


@pytest.fixture(scope="module")
def alone(engine: Engine) -> dict[str, object]:
    return {request.id: engine.generate([request])[0] for request in requests(engine)}


def test_requests_get_what_transformers_writes_in_any_company(engine: Engine, alone, supports):
    """Five of them and four slots: one waits, and joins in the middle of the others' canvases."""
    for order in range(2):
        company = requests(engine)
        random.Random(order).shuffle(company)
        for answer in engine.generate(company):
            assert list(answer.tokens) == right(answer.request)
            assert answer.logprobs == alone[answer.request.id].logprobs
            assert answer.finish_reason is FinishReason.LENGTH
    assert engine.recompiles == 0
    supports(CASE, "engine")


def test_penalties_do_not_tell_of_who_had_a_slot_before(engine: Engine):
    """They count the text before a canvas and the canvas's likeliest tokens so far, and nothing that lies beyond."""
    asked = {"frequency_penalty": 1.5, "repetition_penalty": 1.3, "top_k": 40}
    company = requests(engine, **asked)
    apart = {request.id: engine.generate([request])[0].tokens for request in company}
    assert all(list(apart[request.id]) != right(request) for request in company if request.id != "4")
    for order in range(3):
        random.Random(order).shuffle(company)
        assert all(answer.tokens == apart[answer.request.id] for answer in engine.generate(company))


def test_a_canvas_is_whole_at_the_end_of_a_slot(engine: Engine):
    """The last canvas of one text reaches beyond the slot's length, and the cache has room for it."""
    (text,) = (one for one in requests(engine) if len(one.prompt) + SIZE * CANVASES > engine.plan.max_length)
    assert len(text.prompt) + text.sampling.max_tokens == engine.plan.max_length == 128
    assert engine.plan.pools[0].positions == 256


def test_a_text_is_cut_at_its_limit(engine: Engine):
    for answer in engine.generate(requests(engine, max_tokens=SIZE + 3)):
        assert list(answer.tokens) == right(answer.request)


@pytest.mark.parametrize("at", [2, 5])
def test_a_lost_cache_is_filled_again_and_the_canvas_begun_anew(engine: Engine, alone, monkeypatch, at):
    faults = Faults(engine, monkeypatch)
    faults.at = at
    for answer in engine.generate(requests(engine)):
        assert answer.tokens == alone[answer.request.id].tokens
    assert faults.fired == 1
