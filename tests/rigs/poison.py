"""One poisoned request among sixteen, in each phase of its life: the others must not notice.

``python -m tests.rigs.poison``. The poisoned one is asked whole and as a stream. It gets ``engine_error`` and nothing
else; the fifteen others give the tokens and the log-probabilities that they give undisturbed; the process says all the
time that it lives; and what made a step fail is refused when it comes again.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

from tests.rigs.clients import Answer, ask, ask_all
from tests.rigs.faulty import DEVICE_PHASES, MARK, TEXT_PHASES, WORD
from tests.rigs.served import Served, served
from tests.rigs.verdict import arguments, report

# Phase, how it fails there, and how often it goes well before.
Case = tuple[str, str, int]
TEXT: tuple[Case, ...] = (("validate", "error", 0), ("tokenise", "error", 0))
HOST: tuple[Case, ...] = (
    ("schedule", "error", 0),
    ("admit", "error", 0),
    ("deliver", "error", 2),
    ("callback", "error", 2),
    ("detokenise", "error", 2),
)
STEP: tuple[Case, ...] = (
    ("prefill", "error", 0),
    ("prefill", "device", 0),
    ("decode", "error", 0),
    ("decode", "device", 0),
    ("decode", "device", 5),
    ("decode", "oom", 3),
    ("sample", "error", 0),
    ("sample", "error", 4),
)
# What goes wrong before the engine has the request is no engine's error; it is a 500 all the same.
FRONT = {"validate": "internal_error", "tokenise": "internal_error", "detokenise": "internal_error"}
QUICK = (TEXT[1], HOST[0], STEP[4])
OTHERS = 15
PAUSE = 0.005  # a run of the tiny model is over too soon for company


def others(seed: int, count: int = OTHERS) -> list[dict[str, Any]]:
    """Requests of every kind: greedy and drawn, short and long prompts, whole and streamed."""
    dice = random.Random(seed)
    bodies = []
    for number in range(count):
        prompt = [dice.randrange(20, 380) for _ in range(dice.choice([1, 2, 9, 31, 33, 70, 129]))]
        sampling = {"temperature": 0} if number % 2 else {"temperature": 0.9, "top_p": 0.9, "seed": number}
        body = {"prompt": prompt, "max_tokens": dice.randint(24, 60), "logprobs": 1, "ignore_eos": True}
        bodies.append(body | sampling | {"stream": number % 3 == 0})
    return bodies


def poisoned(phase: str, number: int, *, stream: bool) -> dict[str, Any]:
    """A request that is marked for its phase and like no other one: what is quarantined must not be asked twice."""
    text = f"{WORD} {number} in the middle of some words"
    prompt = text if phase in TEXT_PHASES else [*MARK, *(100 + int(digit) for digit in str(number)), *range(50, 70)]
    return {"prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": stream}


@contextlib.asynccontextmanager
async def alive_throughout(server: Served) -> AsyncIterator[list[int]]:
    """What ``/livez`` answers while the block runs."""
    statuses: list[int] = []

    async def probe() -> None:
        while True:
            statuses.append((await ask(server.probe_url, None, path="/livez")).status)
            await asyncio.sleep(0.02)

    prober = asyncio.create_task(probe())
    try:
        yield statuses
    finally:
        prober.cancel()
        await asyncio.gather(prober, return_exceptions=True)


async def case(server: Served, planted: Case, number: int, *, stream: bool, expected: list[Answer]) -> dict[str, Any]:
    """One phase; what went wrong is in ``wrong``."""
    phase, how, skip = planted
    body = poisoned(phase, number, stream=stream)
    server.control("fail", phase=phase, how=how, skip=skip)
    async with alive_throughout(server) as alive:
        offender, *seen = await ask_all(server.url, [body, *others(0)])
    fired = server.control("clear")
    wrong = [
        f"other {index}: {answer.status} {answer.error}"
        for index, (answer, undisturbed) in enumerate(zip(seen, expected, strict=True))
        if not answer.complete or answer.said != undisturbed.said
    ]
    if not fired[phase]:
        wrong.append("the fault was not met")
    if (
        offender.error != FRONT.get(phase, "engine_error")
        or offender.status != (200 if offender.events else 500)
        or offender.done
    ):
        wrong.append(f"offender: {offender.status} {offender.error}")
    if set(alive) != {200}:
        wrong.append(f"livez: {sorted(set(alive))}")
    if phase in DEVICE_PHASES:
        again = await ask(server.url, body)
        if (again.status, again.error) != (400, "quarantined"):
            wrong.append(f"asked again: {again.status} {again.error}")
    slowest = max(answer.seconds - undisturbed.seconds for answer, undisturbed in zip(seen, expected, strict=True))
    return {
        "phase": phase,
        "how": how,
        "after": skip,
        "stream": stream,
        "wrong": wrong,
        "failed": fired[phase],
        "slowest_more_s": round(slowest, 3),
    }


async def run(server: Served, cases: Sequence[Case], streams: Sequence[bool], first: int = 0) -> list[dict[str, Any]]:
    """Every case on one server, and at its end the server as it was; ``first`` makes the poisoned ones differ."""
    server.control("slow", seconds=PAUSE)
    expected = await ask_all(server.url, others(0))
    assert all(answer.complete and answer.said for answer in expected)
    results: list[dict[str, Any]] = []
    for planted in cases:
        for stream in streams:
            server.control("slow", seconds=PAUSE)
            results.append(await case(server, planted, first + len(results), stream=stream, expected=expected))
            print(results[-1], flush=True)
    facts = server.control("facts")
    if facts["taken"] or facts["here"] or facts["streams"]:
        results.append({"phase": "afterwards", "wrong": [str(facts)]})
    return results


def main() -> None:
    """Runs all phases."""
    args = arguments(__doc__, careless={"action": "store_true", "help": "plant a recovery that blames the wrong one"})
    with served(faulty=True) as server:
        if args.careless:
            server.control("blame_last")
        cases, streams = (QUICK, (True,)) if args.quick else (TEXT + HOST + STEP, (False, True))
        results = asyncio.run(run(server, cases, streams))
    broken = [result for result in results if result["wrong"]]
    figure = f"{OTHERS} of {OTHERS} others unharmed in {len(results) - len(broken)} of {len(results)} cases"
    report("poison", figure=figure, held=not broken, details={"cases": results}, save=args.save)


if __name__ == "__main__":
    main()
