"""The crossing of threads: streams, cancels, refusals, and an end that everybody hears of."""

from __future__ import annotations

import asyncio

import pytest

from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.engine.engine import Engine
from jaxserve.engine.request import FinishReason, Request, SamplingParams
from jaxserve.engine.scheduler import Policy
from jaxserve.errors import EngineError, InvalidRequest, Overloaded, ShuttingDown
from jaxserve.testing import tiny_engine
from tests.engine.test_engine import mixed


@pytest.fixture
def crossing(tiny: Engine):
    engine = AsyncEngine(tiny)
    yield engine
    engine.close()
    assert not engine.alive


async def read(stream):
    tokens, last = [], None
    async for delta in stream:
        tokens += delta.tokens
        last = delta
    return tuple(tokens), last


def endless(name: str) -> Request:
    return Request(name, (1, 2), SamplingParams(max_tokens=120, ignore_eos=True))


def test_streams_give_what_generate_gives(tiny: Engine):
    requests = [mixed(seed) for seed in range(6)]
    expected = {one.request.id: (one.tokens, one.finish_reason) for one in tiny.generate(requests)}
    engine = AsyncEngine(tiny)

    async def serve():
        return await asyncio.gather(*(read(engine.submit(request)) for request in requests))

    try:
        answers = asyncio.run(serve())
    finally:
        engine.close()
    found = {
        request.id: (tokens, last.finish_reason) for request, (tokens, last) in zip(requests, answers, strict=True)
    }
    assert found == expected


def test_what_waits_for_a_slow_reader_is_merged(crossing: AsyncEngine):
    async def serve():
        stream = crossing.submit(Request("slow", (3, 4), SamplingParams(max_tokens=30, ignore_eos=True, logprobs=0)))
        await asyncio.sleep(0.5)
        return [delta async for delta in stream]

    deltas = asyncio.run(serve())
    assert len(deltas) == 1
    assert len(deltas[0].tokens) == len(deltas[0].logprobs) == 30
    assert deltas[0].finish_reason is FinishReason.LENGTH


def test_a_cancel_frees_the_slot_and_ends_the_stream(crossing: AsyncEngine, tiny: Engine):
    async def serve():
        streams = [crossing.submit(endless(f"c{index}")) for index in range(4)]
        await anext(streams[0])
        for stream in streams:
            stream.cancel()
            stream.cancel()
        assert [delta async for delta in streams[1]] == []
        return await read(crossing.submit(Request("after", (5,), SamplingParams(max_tokens=2, ignore_eos=True))))

    tokens, last = asyncio.run(serve())
    assert (len(tokens), last.finish_reason) == (2, FinishReason.LENGTH)
    assert crossing._crossing.streams == 0
    assert tiny.metrics.running._value.get() == tiny.metrics.waiting._value.get() == 0


def test_too_many_are_refused_at_once():
    inner = tiny_engine(policy=Policy(3, 4, 60, 600, 0))
    engine = AsyncEngine(inner)

    async def serve():
        streams = [engine.submit(endless(f"o{index}")) for index in range(7)]
        with pytest.raises(Overloaded):
            engine.submit(endless("late"))
        assert inner.metrics.refused._value.get() == 1
        with pytest.raises(InvalidRequest, match="in use"):
            engine.submit(endless("o1"))
        await asyncio.gather(*(anext(stream) for stream in streams[:3]))
        for stream in streams:
            stream.cancel()

    try:
        asyncio.run(serve())
    finally:
        engine.close()
    assert inner.metrics.finished.labels("cancelled")._value.get() == 7
    assert inner.metrics.finished.labels("error")._value.get() == 0


def test_who_found_a_stop_string_did_not_cancel(tiny: Engine, crossing: AsyncEngine):
    before = tiny.metrics.finished.labels("stop")._value.get()

    async def serve():
        stream = crossing.submit(endless("found"))
        await anext(stream)
        stream.cancel(FinishReason.STOP)
        await read(crossing.submit(Request("next", (5,), SamplingParams(max_tokens=1, ignore_eos=True))))

    asyncio.run(serve())
    assert tiny.metrics.finished.labels("stop")._value.get() == before + 1


def test_a_wrong_request_is_refused_at_once(crossing: AsyncEngine):
    async def serve():
        with pytest.raises(InvalidRequest) as caught:
            crossing.submit(Request("wrong", (1, 999), SamplingParams()))
        assert caught.value.param == "prompt"

    asyncio.run(serve())


def test_closing_drains_and_then_tells_the_rest(tiny: Engine):
    engine = AsyncEngine(tiny)

    async def serve():
        quick = asyncio.create_task(
            read(engine.submit(Request("q", (1,), SamplingParams(max_tokens=3, ignore_eos=True))))
        )
        await asyncio.sleep(0)
        await asyncio.to_thread(engine.close, 5.0)
        with pytest.raises(ShuttingDown):
            engine.submit(endless("late"))
        return await quick

    tokens, last = asyncio.run(serve())
    assert (len(tokens), last.finish_reason) == (3, FinishReason.LENGTH)
    engine = AsyncEngine(tiny)

    async def cut():
        streams = [asyncio.create_task(read(engine.submit(endless(f"x{index}")))) for index in range(6)]
        await asyncio.sleep(0)
        await asyncio.to_thread(engine.close, 0.0)
        return await asyncio.gather(*streams)

    assert all(isinstance(last.error, ShuttingDown) for _, last in asyncio.run(cut()))
    assert not tiny.has_work


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_dead_thread(tiny: Engine, monkeypatch):
    engine = AsyncEngine(tiny)

    def broken() -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(tiny, "tick", broken)

    async def serve():
        _, last = await asyncio.wait_for(read(engine.submit(endless("lost"))), 10)
        assert isinstance(last.error, EngineError)
        with pytest.raises(EngineError):
            engine.submit(endless("late"))

    asyncio.run(serve())
    engine._thread.join(10)
    assert not engine.alive
    assert engine.heartbeat() == float("inf")
    monkeypatch.undo()
    tiny.cancel("lost")


def test_the_heart_beats_only_while_there_is_work(crossing: AsyncEngine):
    async def serve():
        await read(crossing.submit(Request("beat", (1,), SamplingParams(max_tokens=3, ignore_eos=True))))
        await asyncio.sleep(0.2)

    asyncio.run(serve())
    assert crossing.heartbeat() == 0.0


def test_waiting_for_company_does_not_spin(monkeypatch):
    inner, ticks = tiny_engine(policy=Policy(4, 8, 60, 600, batch_window=0.2)), []
    tick = inner.tick
    monkeypatch.setattr(inner, "tick", lambda: (ticks.append(1), tick())[1])
    engine = AsyncEngine(inner)

    async def serve():
        return await read(engine.submit(Request("lonely", (1,), SamplingParams(max_tokens=2, ignore_eos=True))))

    try:
        _, last = asyncio.run(serve())
    finally:
        engine.close()
    assert last.finish_reason is FinishReason.LENGTH
    assert len(ticks) < 250  # a loop without rest makes tens of thousands
