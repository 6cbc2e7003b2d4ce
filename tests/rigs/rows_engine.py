"""F9 to F15, F23 and F25: what goes wrong inside, on the device and in the threads around it."""

from __future__ import annotations

import asyncio
import json
import math
import time
from typing import Any

import httpx2

from jaxserve.server.vitals import LOOK_SECONDS
from tests.rigs.clients import Answer, ask, ask_all
from tests.rigs.faulty import MARK, PLANT
from tests.rigs.served import Served, served, started
from tests.rigs.stage import Stage, crowd, ended, long, said, speaking, until

GIVEN_UP = 70  # exit code: EX_SOFTWARE
REFUSED = 78  # exit code: EX_CONFIG


def marked(number: int, **more: Any) -> dict[str, Any]:
    """A request that a fault may be meant for; each number makes another one, for some are quarantined."""
    return {
        "prompt": [*MARK, 20 + number, *range(50, 65)],
        "max_tokens": 60,
        "ignore_eos": True,
        "temperature": 0,
    } | more


async def nan_in_a_row(stage: Stage) -> str:
    """F9: that request ends, its cache is not left to anybody, and a device that gives NaN too often is found out."""
    server = stage.server
    async with stage.unharmed():
        server.control("fail", phase="decode", how="nan", skip=2)
        async with stage.noted("jaxserve_numerical_errors_total", ended(error="numerical_error")):
            whole, stream = await ask_all(server.url, [marked(1), marked(2, stream=True, logprobs=0)])
        assert (whole.status, whole.error) == (500, "numerical_error"), (whole.status, whole.error)
        assert stream.error == "numerical_error"
        assert stream.events
        assert not stream.done
    # A row that went bad with its last token is noticed by nobody; whoever gets the slot must not notice it either.
    server.control("fail", phase="decode", how="nan")
    spoilt = await ask_all(server.url, [marked(10 + number, max_tokens=1) for number in range(16)])
    assert all(answer.complete for answer in spoilt)
    assert server.control("clear")["decode"] >= 1
    stage.compare(await ask_all(server.url, crowd()))
    await stage.normal()
    return "the row ended, its slots were used again bit for bit"


async def nan_too_often() -> str:
    """F9, second half: three in a minute ask the known request; if that is wrong too, the replica is not ready."""
    with served(faulty=True) as server:
        server.control("fail", phase="decode", how="nan")
        for number in range(3):
            assert (await ask(server.url, marked(number))).error == "numerical_error"
        question = "non-finite numbers come often: asking the known request"
        await until(lambda: bool(server.records(question)), what="the known request is asked")
        await until(lambda: server.metric("jaxserve_requests_running") == 0, what="it is answered")
        assert (await ask(server.url, None, path="/readyz")).status == 200, "bad requests made the replica unready"
        server.control("clear")
        server.control("fail", phase="decode", how="nan", marked=False)
        for number in range(3):
            assert (await ask(server.url, long(number))).error == "numerical_error"
        seconds = await until(lambda: _status(server, "/readyz") == 503, what="/readyz is 503")
        assert _status(server, "/livez") == 200
    return f"unready {seconds:.2f} s after the known request was wrong"


async def nan_in_all_rows(stage: Stage) -> str:
    """F10, first time: the device is emptied and everybody goes on."""
    async with stage.unharmed(), stage.noted("jaxserve_step_failures_total", said("recovered")):
        stage.server.control("fail", phase="decode", how="nan", marked=False, times=1)
    await stage.normal()
    return "6 of 6 streams went on bit for bit"


async def out_of_memory(stage: Stage) -> str:
    """F11, first time: as F10. The plan's own refusal at the start is a row of its own."""
    async with stage.unharmed(), stage.noted("jaxserve_step_failures_total", said("recovered")):
        stage.server.control("fail", phase="decode", how="oom", marked=False, times=1)
        await asyncio.sleep(0.2)
        stage.server.control("fail", phase="prefill", how="oom", marked=False, times=1)
        assert (await ask(stage.server.url, long(7, max_tokens=5))).complete
    await stage.normal()
    return "6 of 6 streams went on bit for bit"


async def broken_for_good(how: str) -> str:
    """F10 and F11, again and again: every stream is told, and the process leaves with 70 for a supervisor to see.

    ``how`` is ``oom``, or ``weights``: they all become NaN.
    """
    with served(faulty=True) as server:
        async with speaking(server, 0.02) as streams:
            if how == "weights":
                server.control("spoil_weights")
            else:
                server.control("fail", phase="decode", how=how, marked=False)
            seconds = await _gives_up(server, await asyncio.gather(*streams), "device_fault")
    return f"exit {GIVEN_UP} after {seconds:.1f} s"


async def plan_that_does_not_fit() -> str:
    """F11, at the start: refused with the numbers before a weight is read."""
    with started("--engine.memory-limit-bytes", "500000") as server:
        assert server.wait(60) == REFUSED
        assert "MiB" in server.lines[-1] or "GiB" in server.lines[-1], server.lines[-1]
    return f"exit {REFUSED}: {server.lines[-1].strip()[:80]}"


async def compile_failure() -> str:
    """F12, at the start: the program is named, the probes say no, the exit code too."""
    plant = json.dumps([{"command": "fail", "phase": "compile"}])
    with started(faulty=True, environment={PLANT: plant}) as server:
        assert server.wait(60) != 0
        last = server.lines[-1]
        assert "prefill" in last, last
        assert "bucket 128" in last, last
        assert not server.records("ready")
    return last.strip()[:100]


async def compile_later(stage: Stage) -> str:
    """F12, later: it never happens, and would be counted. Run last: the count stays."""
    assert stage.server.metric("jaxserve_recompiles_total") == 0
    async with stage.noted("jaxserve_recompiles_total", None):
        stage.server.control("compile")
    return "0 after all other faults; a planted one is counted"


async def failed_step(stage: Stage) -> str:
    """F13, first half: a step that fails once costs nobody anything."""
    server = stage.server
    async with stage.unharmed(slow=0.04):
        for phase, how in (("decode", "error"), ("decode", "device"), ("sample", "error")):
            async with stage.noted("jaxserve_step_failures_total", said("a step failed")):
                server.control("fail", phase=phase, how=how, marked=False, times=1)
            written = server.metric("jaxserve_generated_tokens_total")
            # Three in a row without a new token would be the device's fault.
            await until(lambda: server.metric("jaxserve_generated_tokens_total") > written, what="it goes on")  # noqa: B023
    await stage.normal()
    return "3 steps failed, 6 of 6 streams went on bit for bit"


async def dead_thread() -> str:
    """F13, second half: the engine's thread dies; unready at once, streams are told, the process leaves."""
    with served(faulty=True) as server:
        async with speaking(server, 0.02) as streams:
            server.control("kill_engine")
            seconds = await _gives_up(server, await asyncio.gather(*streams), "engine_error")
    return f"exit {GIVEN_UP} after {seconds:.1f} s"


async def hang() -> str:
    """F14: unready within a second, the stacks in the log, then dead, then gone."""
    with served("--server.heartbeat-limit-s", "3", faulty=True) as server:
        async with speaking(server, 0.02) as streams:
            server.control("hang_engine")
            began = time.monotonic()
            await until(lambda: _status(server, "/readyz") == 503, what="/readyz is 503")
            unready = time.monotonic() - began
            await until(lambda: _status(server, "/livez") == 503, 10, what="/livez is 503")
            dead = time.monotonic() - began
            await until(lambda: "pass_by" in _stacks(server), what="the log shows where it hangs")
            code = await asyncio.to_thread(server.wait, 20)
            gone = time.monotonic() - began
            answers = await asyncio.gather(*streams)
        assert all(answer.error and not answer.done for answer in answers), [answer.error for answer in answers]
    assert code == GIVEN_UP
    return f"unready after {unready:.1f} s, dead after {dead:.1f}, exit {code} after {gone:.1f}"


async def pause(stage: Stage) -> str:
    """F14, and it was only a pause: ready again by itself, and nobody lost a token."""
    server = stage.server
    async with stage.unharmed(), stage.noted("jaxserve_stalls_total", said("goes on"), part="engine"):
        server.control("stop_engine")
        unready = await until(lambda: _status(server, "/readyz") == 503, what="/readyz is 503")
        assert _status(server, "/livez") == 200
        await asyncio.sleep(3 * LOOK_SECONDS)  # a probe sees it at once, the watchdog that counts only when it looks
        server.control("release")
        ready = await until(lambda: _status(server, "/readyz") == 200, what="/readyz is 200")
    await stage.normal()
    return f"unready after {unready:.1f} s, ready {ready:.1f} s after it went on"


async def blocked_loop(stage: Stage) -> str:
    """F15: the probes answer on, and say so."""
    server = stage.server
    async with stage.unharmed(), stage.noted("jaxserve_stalls_total", said("stalled"), part="event_loop"):
        server.control("block_loop", seconds=2.5)
        slowest, statuses, end = 0.0, set(), time.monotonic() + 2
        while time.monotonic() < end:
            probe = await ask(server.probe_url, None, path="/livez")
            slowest = max(slowest, probe.seconds)
            assert probe.status == 200
            statuses.add((await ask(server.probe_url, None, path="/readyz")).status)
            await asyncio.sleep(0.02)
        assert 503 in statuses
        await until(lambda: _status(server, "/readyz") == 200, what="/readyz is 200")
        assert server.metric("jaxserve_event_loop_lag_seconds") > 1.5
    await stage.normal()
    return f"slowest probe {1000 * slowest:.0f} ms"


async def clock_jump(stage: Stage) -> str:
    """F23: the wall clock jumps an hour forward and two back; nobody's time is up."""
    server = stage.server
    async with stage.unharmed():
        patient = asyncio.create_task(ask(server.url, long(3), headers={"x-request-timeout-ms": "60000"}))
        for seconds in (3600, -7200):
            await asyncio.sleep(0.2)
            server.control("jump", seconds=seconds)
        body = json.loads((await ask(server.url, long(4, max_tokens=4))).body)
        assert body["created"] < time.time() - 3000, "`created` does not follow the wall clock"
        assert (await patient).complete
    server.control("jump", seconds=3600)
    for name in ("jaxserve_request_seconds_sum", "jaxserve_http_request_seconds_sum"):
        assert 0 <= server.metric(name) < 3000, f"{name}: {server.metric(name)}"
    assert _status(server, "/readyz") == 200
    await stage.normal()
    return "no deadline passed, no negative duration"


async def poisoned_request(stage: Stage) -> str:
    """F25: found by halves, ended, and refused when it comes again; ``poison`` tries every phase."""
    server, body = stage.server, marked(5)
    async with stage.unharmed():
        server.control("trace")
        server.control("fail", phase="decode", how="device", skip=3)
        async with stage.noted("jaxserve_step_failures_total", said("recovered")):
            offender = await ask(server.url, body)
        assert (offender.status, offender.error) == (500, "engine_error"), (offender.status, offender.error)
        assert offender.headers.get("x-should-retry") == "false"
        again = await ask(server.url, body)
        assert (again.status, again.error) == (400, "quarantined"), (again.status, again.error)
        failed = server.control("clear")["decode"]
    most = math.ceil(math.log2(7)) + 2 + 1
    assert failed <= most, f"{failed} steps failed until it was found"
    await stage.normal()
    return f"{failed} failed steps until it was found among 7"


def _stacks(server: Served) -> str:
    """What was written about an engine that stands still."""
    return "".join(one["stacks"] for one in server.records("stands still") if one["part"] == "engine")


def _status(server: Served, path: str) -> int:
    return int(httpx2.get(server.probe_url + path, timeout=10).status_code)


async def _gives_up(server: Served, answers: list[Answer], code: str) -> float:
    began = time.monotonic()
    exit_code = await asyncio.to_thread(server.wait, 20)
    seconds = time.monotonic() - began
    assert exit_code == GIVEN_UP, f"exit code {exit_code}"
    assert seconds <= 6, f"it took {seconds:.1f} s to leave"
    for answer in answers:
        assert answer.error == code, (answer.status, answer.error)
        assert not answer.done
    assert server.records("the engine has failed") or server.records("the engine has given up")
    return seconds
