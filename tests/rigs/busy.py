"""Streams in a process of their own, so that who measures beside them is not held up: ``python -m tests.rigs.busy``."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Iterator

from tests.rigs.clients import ask
from tests.rigs.served import ROOT, Served


async def _keep_busy(url: str, streams: int) -> None:
    """So many streams at once, a new one when one ends, for ever."""
    dice = random.Random(streams)

    async def one() -> None:
        while True:
            prompt = [dice.randrange(20, 380) for _ in range(dice.choice([1, 9, 33, 70]))]
            body = {"prompt": prompt, "max_tokens": 100, "ignore_eos": True, "stream": True, "seed": 1}
            status = 0
            with contextlib.suppress(OSError):
                status = (await ask(url, body)).status
            if status != 200:
                await asyncio.sleep(0.1)

    await asyncio.gather(*(one() for _ in range(streams)))


@contextlib.contextmanager
def busy(server: Served, streams: int) -> Iterator[None]:
    """Keeps so many streams at once running; entered when the first of them runs."""
    process = subprocess.Popen([sys.executable, "-m", "tests.rigs.busy", server.url, str(streams)], cwd=ROOT)
    try:
        end = time.monotonic() + 60
        while server.metric("jaxserve_requests_running") == 0:
            assert time.monotonic() < end, "nothing runs"
            time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    asyncio.run(_keep_busy(sys.argv[1], int(sys.argv[2])))
