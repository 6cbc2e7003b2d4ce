"""F1 to F8, F31, F32 and F34: what clients do to a server, knowingly or not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.rigs.clients import Answer, Line, ask, ask_all
from tests.rigs.keyring import keyed
from tests.rigs.served import served
from tests.rigs.stage import Stage, ended, long, until

CUT_OFF = ended(status=499)


async def disconnect_in_a_stream(stage: Stage) -> str:
    """F1: the slot is free within two runs."""
    async with stage.unharmed(), stage.noted("jaxserve_requests_finished_total", CUT_OFF, reason="cancelled"):
        bodies = [long(number, stream=True) for number in range(4)]
        left = await asyncio.gather(
            *(ask(stage.server.url, body, leave_after=3, reset=number % 2 == 0) for number, body in enumerate(bodies))
        )
        assert all(answer.left for answer in left)
        seconds = await until(lambda: stage.server.metric("jaxserve_requests_running") <= 6, what="slots are free")
    await stage.normal()
    return f"slots free in {seconds:.2f} s, {_runs(stage)}"


async def disconnect_before_the_answer(stage: Stage) -> str:
    """F2: nobody waits for an answer that nobody wants."""
    async with stage.unharmed(), stage.noted("jaxserve_requests_finished_total", CUT_OFF, reason="cancelled"):
        left = await ask_all(stage.server.url, [long(number) for number in range(4)], leave_in=0.2)
        assert all(answer.left for answer in left)
        seconds = await until(lambda: stage.server.metric("jaxserve_requests_running") <= 6, what="slots are free")
    await stage.normal()
    return f"slots free in {seconds:.2f} s, {_runs(stage)}"


async def disconnect_in_the_queue(stage: Stage) -> str:
    """F3: it is gone before it is ever read."""
    server = stage.server
    async with stage.unharmed(slow=0.1), _full(stage):
        before = server.control("facts")["never_seated"]
        async with stage.noted("jaxserve_requests_finished_total", CUT_OFF, reason="cancelled"):
            left = await ask_all(server.url, [long(900 + number) for number in range(3)], leave_in=0.2)
        assert all(answer.left for answer in left)
        await until(lambda: server.metric("jaxserve_requests_waiting") == 0, what="nobody waits")
        assert server.control("facts")["never_seated"] - before == 3, "one of them was scheduled"
    await stage.normal()
    return "3 of 3 never scheduled"


async def slow_reader(stage: Stage) -> str:
    """F4: a stream that nobody reads ends, and holds nothing meanwhile that others need."""
    url = stage.server.url
    async with stage.unharmed(), stage.noted(None, CUT_OFF):
        body = {"messages": [{"role": "user", "content": "a"}], "n": 16, "logprobs": True, "top_logprobs": 20}
        body |= {"max_tokens": 200, "stream": True, "ignore_eos": True, "temperature": 1}
        lines = len(stage.server.lines)
        async with Line(url, buffer=4096) as line:
            await line.send("POST", "/v1/chat/completions", body)
            stage.server.control("slow", seconds=0.005)
            began = time.monotonic()
            await until(lambda: any(map(CUT_OFF, stage.server.records()[lines:])), 25, "it is cut off")
            seconds = time.monotonic() - began
    await stage.normal()
    return f"cut off after {seconds:.1f} s"


async def slow_sender(stage: Stage) -> str:
    """F6: heads, bodies and connections that do not come are not waited for."""
    url, took = stage.server.url, {}
    body_head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    starts = {
        "no byte": b"",
        "half a head": b"GET /livez HTTP/1.1\r\nhost: loc",
        "half a body": f"{body_head}content-length: 1000\r\n\r\n{{".encode(),
    }

    async def wait(name: str, start: bytes) -> Answer:
        answer = Answer()
        async with Line(url) as line:
            began = time.monotonic()
            await line.send_bytes(start)
            with contextlib.suppress(OSError):
                await line.head(answer)
            took[name] = time.monotonic() - began
        return answer

    async with stage.unharmed(slow=0.05):
        answers = dict(zip(starts, await asyncio.gather(*(wait(*start) for start in starts.items())), strict=True))
    assert max(took.values()) < 5, took
    assert answers["half a body"].status in (0, 408), answers
    await stage.normal()
    return ", ".join(f"{name}: closed after {seconds:.1f} s" for name, seconds in took.items())


async def deadline_in_the_queue(stage: Stage) -> str:
    """F7: the server's limit is 503 ``queue_timeout``, the client's own is 408; neither costs a step."""
    server = stage.server
    async with stage.unharmed(slow=0.1), _full(stage):
        before = server.control("facts")["never_seated"]
        async with stage.noted("jaxserve_requests_finished_total", ended(error="queue_timeout"), reason="error"):
            own = ask(server.url, long(901), headers={"x-request-timeout-ms": "300"})
            waited, late = await asyncio.gather(ask(server.url, long(902)), own)
        assert (waited.status, waited.error) == (503, "queue_timeout"), (waited.status, waited.error)
        assert float(waited.headers["retry-after"]) > 0
        assert (late.status, late.error) == (408, "deadline_exceeded"), (late.status, late.error)
        assert server.control("facts")["never_seated"] - before == 2, "one of them was scheduled"
    await stage.normal()
    return f"503 after {waited.seconds:.2f} s, 408 after {late.seconds:.2f} s"


async def burst(stage: Stage) -> str:
    """F8: who finds the queue full is told at once, before a word of theirs is read."""
    server = stage.server
    async with stage.unharmed(slow=0.1), _full(stage):
        waiting = [asyncio.create_task(ask(server.url, long(500 + number))) for number in range(8)]
        await until(lambda: server.metric("jaxserve_requests_waiting") == 8, what="the queue is full")
        encoded = server.control("facts")["encoded"]
        texts = [{"prompt": f"some words {number}", "max_tokens": 4} for number in range(40)]
        refusal = ended(error="server_is_overloaded")
        async with stage.noted("jaxserve_requests_refused_total", refusal):
            refused = await ask_all(server.url, texts)
        assert server.control("facts")["encoded"] == encoded, "texts were tokenised"
        for answer in refused:
            assert answer.status in (429, 503), (answer.status, answer.error)
            assert answer.error == "server_is_overloaded"
            assert float(answer.headers["retry-after"]) > 0
            assert float(answer.headers["retry-after-ms"]) > 0
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    await stage.normal()
    return f"40 of 40 refused, in {1000 * statistics.median(answer.seconds for answer in refused):.0f} ms (median)"


async def greedy_tenant() -> str:
    """F31: a tenant that sends ten times as much does not hold up the others."""
    with tempfile.TemporaryDirectory() as folder:
        keys = keyed(Path(folder), "quiet", "greedy")
        flags = ("--engine.pools", "8x256", "--engine.max-tenant-share", "0.75", "--auth.keys", str(keys.file))
        with served(*flags, faulty=True) as server:
            server.control("slow", seconds=0.05)

            async def first_tokens() -> list[float]:
                times = []
                for number in range(12):
                    body = long(number, max_tokens=12, stream=True)
                    answer = await ask(server.url, body, headers=keys.headers("quiet"))
                    assert answer.complete, (answer.status, answer.error)
                    times.append(answer.times[0])
                return times

            async def press(number: int) -> None:
                for again in range(10_000):
                    answer = await ask(
                        server.url, long(number + 40 * again, max_tokens=60), headers=keys.headers("greedy")
                    )
                    assert answer.status in (200, 429, 503), (answer.status, answer.error)

            alone = await first_tokens()
            pressing = [asyncio.create_task(press(number)) for number in range(40)]
            await asyncio.sleep(1)
            beside = await first_tokens()
            for task in pressing:
                task.cancel()
            wrong = [
                e for e in await asyncio.gather(*pressing, return_exceptions=True) if isinstance(e, AssertionError)
            ]
            assert not wrong, wrong
    late, usual = (1000 * sorted(times)[-2] for times in (beside, alone))  # one in twelve may meet a busy machine
    assert late <= 2 * usual, f"first token after {late:.0f} ms, alone {usual:.0f} ms"
    return f"first token after {late:.0f} ms beside 40 clients of another, {usual:.0f} ms alone"


async def huge_prompt(stage: Stage) -> str:
    """F32: between two runs at most one chunk of the largest size is read."""
    server = stage.server
    async with stage.unharmed():
        server.control("trace")
        answers = await ask_all(server.url, [{"prompt": [50 + number] * 250, "max_tokens": 1} for number in range(4)])
        assert all(answer.complete for answer in answers)
        trace = server.control("trace")
    most = between = 0
    for kind, size in trace:
        between = between + size if kind == "prefill" else 0
        most = max(most, between)
    assert any(kind == "prefill" and size == 128 for kind, size in trace)
    assert most <= 128, f"{most} tokens were read between two runs"
    await stage.normal()
    return f"at most {most} prompt tokens between two runs"


async def same_request_id(stage: Stage) -> str:
    """F34: a client's id is an echo, never a key."""
    url = stage.server.url
    async with stage.unharmed():
        same = await ask_all(url, [long(number, max_tokens=20) for number in range(4)], headers={"x-request-id": "one"})
        hostile = await ask(url, long(max_tokens=2), headers={"x-request-id": "a" * 200})
    assert [answer.status for answer in (*same, hostile)] == [200] * 5
    assert {answer.headers["x-request-id"] for answer in same} == {"one"}
    assert len({json.loads(answer.body)["id"] for answer in same}) == 4
    assert len(hostile.headers["x-request-id"]) <= 128
    await stage.normal()
    return "4 at once with one id"


@contextlib.asynccontextmanager
async def _full(stage: Stage) -> Any:
    """All sixteen slots taken: by the crowd and ten others."""
    server = stage.server
    fillers = [asyncio.create_task(ask(server.url, long(number, max_tokens=240))) for number in range(10)]
    try:
        await until(lambda: server.metric("jaxserve_requests_running") == 16, what="all slots are taken")
        yield
    finally:
        for filler in fillers:
            filler.cancel()
        await asyncio.gather(*fillers, return_exceptions=True)


def _runs(stage: Stage) -> str:
    freed = stage.server.control("facts")["freed_after"]
    most = max(map(int, freed))
    assert most <= 2, f"slots of clients who left were held for {most} runs"
    return f"after {most} runs at most"
