"""Five hundred clients that take their time: who wants an answer must not notice, and the slow ones must go.

``python -m tests.rigs.slow``. A fourth of them sends a head byte by byte, a fourth a body, a fourth reads nothing of
its answer (some of which fill every buffer), a fourth says nothing at all, before its first request or after it.
Meanwhile others ask the same server by the clock: 99 of 100 are served. The slow ones are gone two seconds after their
limit at the latest, and memory is what it was. At the end a server whose limits are far away must be found out.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import random
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import uvloop

from tests.rigs.load import Shot, completion, open_loop, poisson, summary
from tests.rigs.served import Served, served
from tests.rigs.verdict import arguments, report

SERVED_SHARE = 0.99
GRACE_SECONDS = 2.0
ANSWER_SECONDS = 15.0  # for the answers that nobody reads to be written
RSS_BYTES = 20 * 2**20
OTHERS = 12  # connections of those in a hurry, at most
READERS = ("reader", "stuck")
RATE = 8.0  # requests a second of those who are in a hurry
_POST = "POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """The server's, in seconds, and how each is set."""

    header: float = 10.0
    body: float = 30.0
    idle: float = 30.0
    write: float = 30.0

    def flags(self) -> list[str]:
        """As on the command line."""
        names = {"header": self.header, "body": self.body, "keep-alive": self.idle, "write": self.write}
        return [word for name, seconds in names.items() for word in (f"--server.{name}-timeout-s", f"{seconds:g}")]

    def of(self, kind: str) -> float:
        """For a client that was ``kind``, from the moment that it became slow."""
        return {"silent": self.header, "head": self.header, "body": self.body, "after": self.idle}[kind]


@dataclasses.dataclass(slots=True)
class Slow:
    """One slow client: from when on it was slow, and when the server had enough of it."""

    kind: str
    since: float = math.nan
    gone: float = math.nan
    answer: bytes = b""

    @property
    def lasted(self) -> float:
        """Seconds; without end if it is still there."""
        return math.inf if math.isnan(self.gone) else self.gone - self.since


async def trickle(slow: Slow, address: tuple[str, int], first: bytes, end: float) -> None:
    """Sends ``first``, then a byte a second (unless it is silent), until the server closes."""
    loop = asyncio.get_running_loop()
    plug = socket.socket()
    plug.setblocking(False)
    try:
        await loop.sock_connect(plug, address)
        slow.since = loop.time()
        if first:
            await loop.sock_sendall(plug, first)
        while loop.time() < end:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    said = await loop.sock_recv(plug, 4096)
                if slow.kind == "after" and not slow.answer:
                    slow.since = loop.time()
                slow.answer += said
                if not said:
                    slow.gone = loop.time()
                    return
                continue
            if slow.kind in ("head", "body"):
                await loop.sock_sendall(plug, b"x")
    except OSError:
        slow.gone = loop.time()
    finally:
        plug.close()


async def read_nothing(slow: Slow, address: tuple[str, int], request: bytes, end: float) -> None:
    """Asks for a long answer and takes none of it, until the server gives up."""
    loop = asyncio.get_running_loop()
    plug = socket.socket()
    plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    plug.setblocking(False)
    try:
        await loop.sock_connect(plug, address)
        await loop.sock_sendall(plug, request)
        slow.since = loop.time()
        await asyncio.sleep(max(0.0, end - loop.time()))
    except OSError:
        slow.gone = loop.time()
    finally:
        plug.close()


def requests_of(host: str, tokens: int) -> dict[str, bytes]:
    """What each kind of slow client sends first."""
    post = _POST.format(host=host)

    def asking(**more: Any) -> bytes:
        body = {"prompt": "the river", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        content = json.dumps(body | more).encode()
        return f"{post}content-length: {len(content)}\r\n\r\n".encode() + content

    return {
        "silent": b"",
        "head": f"GET /livez HTTP/1.1\r\nhost: {host}\r\nx: ".encode(),
        "body": f"{post}content-length: 1000\r\n\r\n{{".encode(),
        "reader": asking(),
        "stuck": asking(logprobs=20),
        "after": f"GET /livez HTTP/1.1\r\nhost: {host}\r\n\r\n".encode(),
    }


async def crowd(server: Served, limits: Limits, count: int, seconds: float) -> dict[str, Any]:
    """All at once: the slow ones, those in a hurry, and somebody who looks at the server's memory and descriptors."""
    loop = asyncio.get_running_loop()
    parts = urlsplit(server.url)
    address = (parts.hostname or "", parts.port or 0)
    first = requests_of(parts.netloc, tokens=200)
    kinds = ["head", "body", "reader", "silent", "head", "body", "reader", "after"] * 4
    kinds[2] = "stuck"
    slow = [Slow(kinds[number % len(kinds)]) for number in range(count)]
    dice = random.Random(0)
    shots = [
        Shot(at, completion(dice, parts.netloc, words=(2, 6), outputs=(8,))) for at in poisson(RATE, seconds, dice)
    ]
    before = server.rss(), server.fds()
    begin, peak = loop.time(), before[0]
    busy_until = begin

    def play(one: Slow) -> asyncio.Task[None]:
        work = read_nothing if one.kind in READERS else trickle
        return asyncio.create_task(work(one, address, first[one.kind], begin + seconds))

    tasks = [play(one) for one in slow]
    hurry = asyncio.create_task(open_loop(server.url, shots, patience=30))
    while not hurry.done():
        peak = max(peak, server.rss())
        if server.fds() > before[1] + OTHERS:
            busy_until = loop.time()
        await asyncio.sleep(0.1)
    await asyncio.gather(*tasks, hurry)
    found = summary((shots, begin, begin + seconds))
    trickling = [one for one in slow if one.kind not in READERS]
    return {
        "served_share": found["served"] / found["sent"],
        "sent": found["sent"],
        "ttft_p99": found["ttft_p99"],
        "latest": max(one.lasted - limits.of(one.kind) for one in trickling),
        "still_there": sum(math.isnan(one.gone) for one in trickling),
        "told": sum(b" 408 " in one.answer for one in trickling),
        "descriptors_back_after": busy_until - begin,
        "rss_growth": peak - before[0],
    }


def attempt(limits: Limits, judged: Limits, count: int, seconds: float) -> dict[str, Any]:
    """A server with some limits, judged by others."""
    with served(*limits.flags()) as server:
        warm_up(server)
        return uvloop.run(crowd(server, judged, count, seconds))


def warm_up(server: Served) -> None:
    """A moment of harmless load, so that memory and connections are what they are in use."""
    dice = random.Random(1)
    host = urlsplit(server.url).netloc
    shots = [Shot(number / 100, completion(dice, host, words=(2, 6), outputs=(8,))) for number in range(100)]
    uvloop.run(open_loop(server.url, shots))
    time.sleep(0.5)


def broken(found: dict[str, Any], limits: Limits) -> list[str]:
    """What did not hold."""
    slowest = max(limits.header, limits.body, limits.idle, limits.write) + GRACE_SECONDS + ANSWER_SECONDS
    checks = [
        (found["served_share"] >= SERVED_SHARE, f"{found['served_share']:.1%} of the others were served"),
        (not found["still_there"], f"{found['still_there']} slow clients are still there"),
        (found["latest"] <= GRACE_SECONDS, f"the last one went {found['latest']:.1f} s after its limit"),
        (found["descriptors_back_after"] <= slowest, "the readers' connections are still open"),
        (found["rss_growth"] <= RSS_BYTES, f"memory grew by {found['rss_growth'] / 2**20:.0f} MiB"),
    ]
    return [words for held, words in checks if not held]


def main() -> None:
    """The crowd, and a server that waits for ever."""
    options = arguments(__doc__, count={"type": int, "default": 500, "help": "slow clients"})
    limits = Limits()
    if options.quick:
        limits, options.count = Limits(1.0, 1.5, 1.5, 1.5), min(options.count, 60)
    seconds = 5.0 if options.quick else limits.write + ANSWER_SECONDS + 10.0
    found = attempt(limits, limits, options.count, seconds)
    wrong = broken(found, limits)
    patient = Limits(100.0, 100.0, 100.0, 100.0)
    short = Limits(1.0, 1.5, 1.5, 1.5)
    planted = {} if options.quick else attempt(patient, short, 60, 6.0)
    if planted and not broken(planted, short):
        wrong.append("a server that waits for ever went unnoticed")
    figure = (
        f"beside {options.count} slow clients {found['served_share']:.1%} of {found['sent']} others served, "
        f"the slow ones gone {max(0.0, found['latest']):.1f} s after their limit, "
        f"memory +{found['rss_growth'] / 2**20:.0f} MiB"
    )
    details = {"limits": dataclasses.asdict(limits), "found": found, "patient": planted}
    figure += "".join(f"; {words}" for words in wrong)
    report("slow", figure=figure, held=not wrong, details=details, save=options.save)


if __name__ == "__main__":
    main()
