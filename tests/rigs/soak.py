"""Half an hour of everything: memory, descriptors and threads must stand still, and nothing may fail or compile.

``python -m tests.rigs.soak --minutes 30``. The slope of resident memory is Theil and Sen's (the median over all pairs),
against requests served and after a warm-up, so that a step at the start or a single peak does not count. A leak is
planted at the end, in a server of its own, and must be found; ``--planted`` does only that.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import statistics
import time
from collections import Counter
from typing import Any

from tests.rigs.clients import Answer, ask
from tests.rigs.served import Served, served
from tests.rigs.verdict import arguments, report

COMPANY = 12
WARM_UP_SHARE = 0.25
SLOPE_LIMIT = 1.0  # megabytes a thousand requests
QUICK_SLOPE_LIMIT = 40.0  # in ten seconds the allocator alone may give more than one
LEAK = 20_000  # bytes a request
KNOWN = {"prompt": [*range(40, 75)], "max_tokens": 20, "logprobs": 1, "temperature": 0.9, "seed": 7, "ignore_eos": True}


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One look at the process."""

    requests: int
    rss: int
    descriptors: int
    threads: int


def slope(samples: list[Sample]) -> float:
    """Megabytes of resident memory that a thousand requests add."""
    pairs = [
        (later.rss - earlier.rss) / (later.requests - earlier.requests)
        for index, earlier in enumerate(samples)
        for later in samples[index + 1 :]
        if later.requests > earlier.requests
    ]
    return statistics.median(pairs) * 1000 / 2**20 if pairs else 0.0


def short(dice: random.Random) -> dict[str, Any]:
    """A few tokens."""
    return {"prompt": [dice.randrange(20, 380) for _ in range(dice.randint(1, 20))], "max_tokens": dice.randint(0, 12)}


def long(dice: random.Random) -> dict[str, Any]:
    """A prompt of several chunks or a long answer."""
    count = dice.choice([40, 129, 170])
    return {"prompt": [dice.randrange(20, 380) for _ in range(count)], "max_tokens": dice.randint(20, 80)}


def dressed(dice: random.Random) -> dict[str, Any]:
    """One with settings of every kind."""
    return short(dice) | {
        "n": dice.randint(1, 3),
        "logprobs": dice.randint(0, 5),
        "stop": ["zz", "q"],
        "logit_bias": {"50": 2, "60": -5},
        "repetition_penalty": 1.1,
        "presence_penalty": 0.4,
        "seed": dice.randrange(1000),
    }


WRONG = (
    {"prompt": "a", "max_tokens": -1},
    {"prompt": [400]},
    {"prompt": "a", "temperature": "warm"},
    {"prompt": [5] * 300},
    {"prompt": "a", "model": "nobody"},
)
STATUSES = {400, 404}


class Crowd:
    """Clients of every kind, and what went wrong.

    Attributes:
        requests: so far.
        kinds: by scenario and how it ended.
        errors: what should not have been.
    """

    def __init__(self, server: Served, seed: int, known: Answer) -> None:
        self.requests = 0
        self.kinds: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self._server = server
        self._dice = random.Random(seed)
        self._known = known

    async def come_and_go(self, end: float) -> None:
        """One client after the other until the time is up."""
        while time.monotonic() < end:
            await self._one()
            self.requests += 1

    async def _one(self) -> None:
        dice, url = self._dice, self._server.url
        kind = dice.choices(
            ("short", "long", "dressed", "chat", "text", "wrong", "leaves", "known"), (20, 10, 10, 15, 10, 10, 20, 5)
        )[0]
        stream = {"stream": dice.random() < 0.5}
        match kind:
            case "wrong":
                answer = await ask(url, dice.choice(WRONG))
                ended = "refused" if answer.status in STATUSES and answer.error else f"{answer.status}"
            case "leaves":
                wanted = dice.choice((short, long))(dice) | stream
                limit = (
                    {"leave_in": dice.random() * 0.1} if dice.random() < 0.5 else {"leave_after": dice.randint(1, 5)}
                )
                answer = await ask(url, wanted, reset=dice.random() < 0.5, **limit)
                ended = "left" if answer.left else _ended(answer)
            case "known":
                answer = await ask(url, KNOWN | stream)
                ended = _ended(answer) if answer.said == self._known.said else "other tokens"
            case "chat":
                message = {"role": "user", "content": "some words " * dice.randint(1, 5)}
                wanted = {"messages": [message], "max_tokens": dice.randint(1, 20)} | stream
                answer = await ask(url, wanted, path="/v1/chat/completions")
                ended = _ended(answer)
            case "text":
                words = " ".join(dice.choice(("the", "capital", "of", "Zürich", "日本", "🙂")) for _ in range(8))
                answer = await ask(url, {"prompt": words, "max_tokens": 8} | stream)
                ended = _ended(answer)
            case _:
                answer = await ask(url, {"short": short, "long": long, "dressed": dressed}[kind](dice) | stream)
                ended = _ended(answer)
        self.kinds[f"{kind}: {ended}"] += 1
        if ended not in ("complete", "left", "refused"):
            self.errors[f"{kind}: {ended}"] += 1


def _ended(answer: Answer) -> str:
    return "complete" if answer.complete else f"{answer.status} {answer.error}"


async def run(server: Served, *, seconds: float, seed: int, limit: float) -> dict[str, Any]:
    """The crowd for a while, looked at every few seconds."""
    known = await ask(server.url, KNOWN)
    assert known.complete
    assert known.said
    crowd, samples = Crowd(server, seed, known), []
    began = time.monotonic()
    end = began + seconds
    clients = [asyncio.create_task(crowd.come_and_go(end)) for _ in range(COMPANY)]
    while time.monotonic() < end:
        await asyncio.sleep(min(5.0, seconds / 40))
        if time.monotonic() - began >= WARM_UP_SHARE * seconds:
            samples.append(Sample(crowd.requests, server.rss(), server.fds(), server.threads()))
    await asyncio.gather(*clients)
    await asyncio.sleep(1)
    third = max(1, len(samples) // 3)
    descriptors = [statistics.median(one.descriptors for one in part) for part in (samples[:third], samples[-third:])]
    threads = [statistics.median(one.threads for one in part) for part in (samples[:third], samples[-third:])]
    result = {
        "seed": seed,
        "seconds": seconds,
        "requests": crowd.requests,
        "megabytes_per_thousand": round(slope(samples), 4),
        "megabytes": [round(samples[0].rss / 2**20), round(samples[-1].rss / 2**20)],
        "descriptors": descriptors,
        "threads": threads,
        "recompiles": server.metric("jaxserve_recompiles_total"),
        "held_slots": server.metric("jaxserve_requests_running"),
        "errors": dict(crowd.errors),
        "kinds": dict(sorted(crowd.kinds.items())),
    }
    result["grown"] = result["megabytes_per_thousand"] > limit
    # Connections come and go under the samples: a leak shows as many more, not as a few.
    result["held"] = (
        not result["grown"]
        and not crowd.errors
        and result["recompiles"] == 0
        and result["held_slots"] == 0
        and descriptors[1] - descriptors[0] <= COMPANY / 2
        and threads[1] <= threads[0]
    )
    return result


def main() -> None:
    """Runs the soak and its control."""
    args = arguments(
        __doc__,
        minutes={"type": float, "default": 30.0},
        planted={"action": "store_true", "help": "only the control"},
        seed={"type": int, "default": 0},
    )
    seconds = 4.0 if args.quick else 60 * args.minutes
    limit, leak = (QUICK_SLOPE_LIMIT, 10 * LEAK) if args.quick else (SLOPE_LIMIT, LEAK)
    details: dict[str, Any] = {}
    if not args.planted:
        with served() as server:
            details |= asyncio.run(run(server, seconds=seconds, seed=args.seed, limit=limit))
        print(details)
    with served(faulty=True) as server:
        server.control("leak", what="bytes", size=leak)
        planted = asyncio.run(run(server, seconds=max(4.0, seconds / 10), seed=args.seed, limit=limit))
    print(planted)
    details["planted"] = {name: planted[name] for name in ("requests", "megabytes_per_thousand", "grown")}
    figure = f"a planted leak of {leak / 1000:g} kB a request {'found' if planted['grown'] else 'MISSED'}"
    if not args.planted:
        figure = (
            f"{details['requests']:,} requests in {seconds / 60:g} minutes: {details['megabytes_per_thousand']:.3f} MB "
            f"a thousand, {sum(details['errors'].values())} errors, {details['recompiles']:g} recompilations; " + figure
        )
    report("soak", figure=figure, held=planted["grown"] and details.get("held", True), details=details, save=args.save)


if __name__ == "__main__":
    main()
