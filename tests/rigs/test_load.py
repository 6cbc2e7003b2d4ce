"""The load client itself: it keeps its plan, misses nobody's waiting, and counts what it sees."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import statistics
from collections.abc import Awaitable, Callable

import pytest

from tests.rigs import overload, slow
from tests.rigs.load import Shot, closed_loop, completion, open_loop, poisson, quantile, summary

pytestmark = pytest.mark.rig

EVENTS = b'data: {"choices":[{"text":"a"}]}\n\ndata: {"choices":[],"usage":{"completion_tokens":7}}\n\ndata: [DONE]\n\n'
OK = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(EVENTS) + EVENTS
FULL = b'{"error":{"code":"server_is_overloaded"}}'
REFUSAL = b"HTTP/1.1 503 No\r\nretry-after: 1\r\ncontent-length: %d\r\n\r\n" % len(FULL) + FULL


class Toy:
    """A server that answers each request as a test says, one after the other."""

    def __init__(self, answer: Callable[[int], Awaitable[bytes]]) -> None:
        self.connections = 0
        self._answer = answer
        self._count = 0

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return f"http://{host}:{port}"

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
                await reader.readexactly(length)
                self._count += 1
                answer = await self._answer(self._count)
                if not answer:
                    break
                writer.write(answer)
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()


def fired(answer: Callable[[int], Awaitable[bytes]], count: int = 20, apart: float = 0.01) -> list[Shot]:
    shots = [Shot(number * apart, completion(random.Random(number), "x")) for number in range(count)]

    async def run() -> None:
        async with Toy(answer) as url:
            await open_loop(url, shots, patience=1.0)

    asyncio.run(run())
    return shots


async def at_once(_: int) -> bytes:
    return OK


def test_arrivals_come_at_their_rate_and_independently():
    moments = list(poisson(50, 200, random.Random(3)))
    gaps = [after - before for before, after in itertools.pairwise(moments)]
    assert len(moments) == pytest.approx(10_000, rel=0.05)
    assert statistics.pstdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.05)
    assert moments == list(poisson(50, 200, random.Random(3)))


def test_what_was_served_is_counted():
    shots = fired(at_once)
    assert all(shot.served and shot.tokens == 7 for shot in shots)
    assert all(shot.due <= shot.sent <= shot.first <= shot.end for shot in shots)


def test_what_was_refused_cut_or_never_answered_is_none_of_it():
    async def answer(number: int) -> bytes:
        if number % 4 == 3:
            await asyncio.sleep(3)
        return [OK, REFUSAL, b"", OK][number % 4]

    shots = fired(answer, apart=0.03)
    kinds = {(shot.status, shot.code) for shot in shots}
    assert kinds == {(200, ""), (503, "server_is_overloaded"), (0, "cut"), (0, "hung")}
    assert all(shot.retry_after == shot.refused for shot in shots)
    assert sum(shot.served for shot in shots) == sum(shot.refused for shot in shots) == 5


@pytest.mark.parametrize(
    ("instead", "code"), [(EVENTS[:-14], "cut"), (b'data: {"error":{"code":"queue_timeout"}}\n\n', "queue_timeout")]
)
def test_a_stream_that_ends_in_an_error_or_too_early_was_not_served(instead, code):
    async def answer(_: int) -> bytes:
        return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(instead) + instead

    shots = fired(answer, count=3)
    assert not any(shot.served for shot in shots)
    assert all(shot.code == code for shot in shots)


async def stalls(number: int) -> bytes:
    """As a server does that collects garbage or compiles: every fiftieth answer takes half a second."""
    await asyncio.sleep(0.5 if number % 50 == 0 else 0.0)
    return OK


def test_an_open_loop_sees_everybody_who_waits_for_a_stall():
    """A closed one asks nobody meanwhile, and so one answer in fifty seems to be late."""
    lock = asyncio.Lock()

    async def one_at_a_time(number: int) -> bytes:
        async with lock:
            return await stalls(number)

    shots = fired(one_at_a_time, count=100, apart=0.01)
    waits = [shot.end - shot.due for shot in shots]
    assert sum(wait > 0.1 for wait in waits) > 20

    async def closed() -> list[Shot]:
        async with Toy(stalls) as url:
            return await closed_loop(url, 1, 1.2, lambda: completion(random.Random(0), "x"))

    closed_waits = [shot.end - shot.due for shot in asyncio.run(closed())]
    assert quantile(closed_waits, 0.9) < 0.1 < max(closed_waits)


def test_connections_are_used_again():
    toy = Toy(at_once)
    shots = [Shot(number * 0.02, completion(random.Random(0), "x")) for number in range(15)]

    async def run() -> None:
        async with toy as url:
            await open_loop(url, shots)

    asyncio.run(run())
    assert toy.connections < 8


def test_quantiles():
    assert quantile([3, 1, 2], 0.5) == 2
    assert quantile(range(1, 101), 0.99) == 99
    assert quantile([5.0], 0.99) == 5.0
    assert math.isnan(quantile([], 0.5))


def test_the_summary_counts_who_was_due_and_what_was_done_between_two_moments():
    shots = [
        Shot(float(at), b"", sent=at + 0.01, status=200, first=at + 0.5, end=at + 2.0, tokens=10) for at in range(10)
    ]
    shots[4].status, shots[4].code = 503, "server_is_overloaded"
    shots[5].status, shots[5].code = 200, "cut"
    found = summary((shots, 2.0, 8.0))
    assert (found["sent"], found["served"], found["refused"], found["failed"], found["hasty"]) == (6, 4, 1, 1, 1)
    assert found["goodput"] == pytest.approx((6 - 2) * 10 / 6)
    assert found["ttft_p99"] == pytest.approx(0.5)
    assert found["lag_p99"] == pytest.approx(0.01)
    twice = summary((shots, 2.0, 8.0), (shots, 8.0, 10.0))
    assert (twice["sent"], twice["served"]) == (8, 6)
    assert twice["goodput"] == pytest.approx((8 - 2) * 10 / 8)


# --- the judges -------------------------------------------------------------------------------------------------------


def stretch(**more: float) -> dict[str, float]:
    usual = {"sent": 100, "served": 90, "refused": 10, "hasty": 0, "failed": 0, "goodput": 300.0, "ttft_p50": 0.1}
    return usual | {"ttft_p99": 0.5, "refusal_p50": 0.002, "refusal_p99": 0.01, "lag_p99": 0.001} | more


def overloaded(**changes: dict[str, float]) -> dict:
    at = {f"{factor:g}x": stretch(**changes.get(f"at{factor:g}", {})) for factor in overload.RATES}
    fair = {"ratio": 1.5, "quiet_failed": 0, "quiet_refused": 0} | changes.get("fair", {})
    more = {"recovery": 2.0, "recompiles": 0.0} | changes.get("more", {})
    return {"at": at, "peak": stretch(), "fairness": fair, **more}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"at4": {"ttft_p99": 1.1}}, "wait 2.20 times"),
        ({"at4": {"goodput": 280.0}}, "goodput"),
        ({"at10": {"refusal_p99": 0.06}}, "refusals took 60 ms"),
        ({"at10": {"failed": 1}}, "failed"),
        ({"at2": {"hasty": 1}}, "when to come back"),
        ({"at4": {"refused": 0}}, "nothing was refused"),
        ({"at1": {"lag_p99": 0.05}}, "client itself"),
        ({"fair": {"ratio": 2.1}}, "quiet one waits"),
        ({"fair": {"quiet_refused": 1}}, "lost some"),
        ({"more": {"recovery": math.inf}}, "recovery"),
        ({"more": {"recompiles": 1.0}}, "compiled"),
    ],
)
def test_the_judge_of_overload_sees_each_fault(changes, words):
    found = overloaded(**changes)
    wrong = overload.broken(found, timings=True)
    assert len(wrong) == bool(words)
    assert words in "".join(wrong)
    assert overload.figure(found)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ""),
        ({"served_share": 0.98}, "98.0%"),
        ({"still_there": 3}, "3 slow clients"),
        ({"latest": 2.5}, "2.5 s after"),
        ({"descriptors_back_after": 60.0}, "readers"),
        ({"rss_growth": 30 * 2**20}, "30 MiB"),
    ],
)
def test_the_judge_of_slow_clients_sees_each_fault(change, words):
    fine = {"served_share": 1.0, "still_there": 0, "latest": 0.4, "descriptors_back_after": 40.0, "rss_growth": 2**20}
    wrong = slow.broken(fine | change, slow.Limits())
    assert len(wrong) == bool(words)
    assert words in "".join(wrong)
