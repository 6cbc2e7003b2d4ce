"""What each fault is staged on: a server with undisturbed streams on it, and witnesses for what must be noted.

Knows what everybody else may expect while something fails: the same tokens with the same log-probabilities, and a
server that is afterwards as it was before.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from tests.rigs.clients import Answer, ask, ask_all
from tests.rigs.served import Served

HELD = ("taken", "streams", "here", "tasks")  # and descriptors: no more than before
PATIENCE = 5.0  # everything is back to normal in so many seconds


def crowd(count: int = 6, seed: int = 0) -> list[dict[str, Any]]:
    """Streams whose tokens are known: greedy and drawn, of short and long prompts."""
    dice = random.Random(seed)
    bodies = []
    for number in range(count):
        prompt = [dice.randrange(20, 380) for _ in range((1, 20, 33, 80, 128, 129)[number % 6])]
        sampling = {"temperature": 0} if number % 2 else {"temperature": 0.9, "top_p": 0.95, "seed": number}
        bodies.append(
            {"prompt": prompt, "max_tokens": 110, "logprobs": 1, "ignore_eos": True, "stream": True} | sampling
        )
    return bodies


def long(number: int = 0, **more: Any) -> dict[str, Any]:
    """A request that holds a slot for a while."""
    return {"prompt": [30 + number % 300] * 9, "max_tokens": 200, "temperature": 0, "ignore_eos": True} | more


async def until(holds: Callable[[], bool], seconds: float = PATIENCE, what: str = "") -> float:
    """Waits until something holds; returns how long that took.

    Raises:
        AssertionError: it did not come to hold.
    """
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > seconds:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        await asyncio.sleep(0.02)
    return time.monotonic() - began


@contextlib.asynccontextmanager
async def speaking(server: Served, slow: float, *more: dict[str, Any]) -> AsyncIterator[list[asyncio.Task[Answer]]]:
    """The crowd, and whoever is named beside it, while the block runs; a run takes ``slow`` seconds longer."""
    server.control("slow", seconds=slow)
    speakers = [asyncio.create_task(ask(server.url, body)) for body in (*crowd(), *more)]
    try:
        await until(lambda: server.metric("jaxserve_requests_running") >= len(speakers), what="the crowd speaks")
        yield speakers
    finally:
        for speaker in speakers:
            speaker.cancel()
        await asyncio.gather(*speakers, return_exceptions=True)


class Stage:
    """A server, the streams on it, and how it was before.

    Attributes:
        server: one with a fault injector inside.
        expected: what the crowd says undisturbed.
    """

    def __init__(self, server: Served) -> None:
        self.server = server
        self.expected: list[Answer] = []
        self._before: dict[str, int] = {}

    async def prepare(self) -> None:
        """Lets the crowd speak undisturbed; how the server is now it must be again after each fault."""
        self.expected = await ask_all(self.server.url, crowd())
        for answer in self.expected:
            assert answer.complete, (answer.status, answer.error)
            assert answer.said
        await asyncio.sleep(0.5)
        self._before = self._counts()

    @contextlib.asynccontextmanager
    async def unharmed(self, slow: float = 0.02) -> AsyncIterator[None]:
        """The crowd speaks while the block runs, every run ``slow`` seconds longer, and must not notice it."""
        try:
            async with speaking(self.server, slow) as speakers:
                yield
                self.server.control("slow", seconds=0)
                self.compare(await asyncio.gather(*speakers))
        finally:
            self.server.control("clear")

    def compare(self, answers: list[Answer]) -> None:
        """Asserts that the crowd said what it says undisturbed."""
        for number, (answer, undisturbed) in enumerate(zip(answers, self.expected, strict=True)):
            assert answer.complete, f"stream {number} of the crowd: {answer.status} {answer.error}"
            assert answer.said == undisturbed.said, f"stream {number} of the crowd says something else"

    @contextlib.asynccontextmanager
    async def noted(
        self, metric: str | None, line: Callable[[dict[str, Any]], Any] | None, **labels: str
    ) -> AsyncIterator[None]:
        """What happens in the block is counted by ``metric`` and said in a line of the log."""
        server = self.server
        lines, before = len(server.lines), server.metric(metric, **labels) if metric else 0.0
        yield
        if metric is not None:
            await until(lambda: server.metric(metric, **labels) > before, what=f"{metric} {labels} counts it")
        if line is not None:
            await until(lambda: any(line(record) for record in server.records()[lines:]), what="a line says it")

    async def normal(self) -> None:
        """The server is as it was before."""
        end = time.monotonic() + PATIENCE
        while more := {
            name: (self._before[name], now) for name, now in self._counts().items() if now > self._before[name]
        }:
            assert time.monotonic() < end, f"more than before: {more}"
            await asyncio.sleep(0.05)

    def _counts(self) -> dict[str, int]:
        facts = self.server.control("facts")
        return {name: facts[name] for name in HELD} | {"descriptors": self.server.fds()}


def said(message: str) -> Callable[[dict[str, Any]], Any]:
    """A line that says ``message``."""
    return lambda record: record["message"] == message


def ended(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    """The line of a request that ended so."""
    return lambda record: record["message"] == "request" and fields.items() <= record.items()
