"""Thousands of clients that hang up: nothing of theirs may stay behind.

``python -m tests.rigs.cancels``. They leave while they wait for a slot, while their prompt is read, between tokens,
before a whole answer, or without ever reading one; with a farewell or a reset. Afterwards slots, streams, descriptors,
tasks and threads are as before, every request is accounted for, and the slots of those who left were free within two
runs. Then leaks are planted, and each must be found. Before that come clients of a model that fills in blocks, some of
whom watch them before they are final.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from typing import Any

from tests.rigs.clients import Line, ask
from tests.rigs.served import Served, served
from tests.rigs.tiny import BLOCKS, tiny_store
from tests.rigs.verdict import arguments, report

COUNT, QUICK_COUNT = 10_000, 150
BLOCKS_SHARE = 4  # of the clients one of so many comes to the model that fills in blocks
WARM_UP = 100
COMPANY = 40  # clients at once: more than there are slots, so that some wait
PLANTED = ("slot", "descriptor", "task")
RUNS = 2
MEGABYTES = 10  # and no more than one for each thousand clients
SETTLE_SECONDS, PLANTED_SECONDS = 10.0, 2.0
COUNTED = ("taken", "streams", "here", "tasks", "descriptors")


def body(dice: random.Random, blocks: bool = False) -> tuple[str, dict[str, Any]]:
    """A request of any kind; of a model that fills in ``blocks`` with what only such ones are asked."""
    prompt = [dice.randrange(20, 380) for _ in range(dice.choice([1, 5, 33, 100, 180]))]
    sampling = {"max_tokens": dice.randint(1, 70), "ignore_eos": True, "temperature": dice.choice([0, 1])}
    sampling |= {"stream": dice.random() < 0.6, "n": dice.choice([1, 1, 1, 3])}
    if blocks:
        told = dice.random() < 0.5 and sampling["stream"]
        wanted = {"mode": dice.choice(["auto", "off"]), "stream": "provisional" if told else "committed"}
        sampling["parallel"] = wanted | {"trace": "none" if sampling["stream"] else dice.choice(["none", "steps"])}
        if dice.random() < 0.3:
            sampling["prediction"] = {"type": "content", "content": "word " * dice.randint(0, 20)}
    if dice.random() < 0.2:
        return "/v1/chat/completions", {
            "messages": [{"role": "user", "content": "word " * dice.randint(1, 8)}]
        } | sampling
    return "/v1/completions", {"prompt": prompt} | sampling


async def leave(server: Served, dice: random.Random, blocks: bool = False) -> str:
    """One client; how it left."""
    path, wanted = body(dice, blocks)
    reset, kind = dice.random() < 0.5, dice.choice(["soon", "later", "after events", "unread", "stays"])
    if kind == "unread":
        async with Line(server.url, buffer=4096) as line:
            await line.send("POST", path, wanted | {"stream": True})
            await asyncio.sleep(dice.random() * 0.2)
            line.hang_up(reset=reset)
        return kind
    limits: dict[str, Any] = {
        "soon": {"leave_in": dice.random() * 0.01},
        "later": {"leave_in": dice.random() * 0.2},
        "after events": {"leave_after": dice.randint(1, 12)},
        "stays": {},
    }[kind]
    answer = await ask(server.url, wanted, path=path, reset=reset, **limits)
    if answer.left:
        return kind
    return "complete" if answer.complete else f"error {answer.status} {answer.error}"


async def storm(server: Served, count: int, dice: random.Random, blocks: bool = False) -> Counter[str]:
    """``count`` clients, ``COMPANY`` at a time; how they left."""
    ended: Counter[str] = Counter()
    left = iter(range(count))

    async def one_after_the_other() -> None:
        for _ in left:
            ended[await leave(server, dice, blocks)] += 1

    await asyncio.gather(*(one_after_the_other() for _ in range(COMPANY)))
    return ended


def counts(server: Served) -> dict[str, int]:
    """What must come back to what it was."""
    facts = server.control("facts")
    return {name: server.fds() if name == "descriptors" else facts[name] for name in COUNTED}


async def settled(server: Served, before: dict[str, int], seconds: float = SETTLE_SECONDS) -> dict[str, int]:
    """What has not come back after a while, and by how much."""
    end = time.monotonic() + seconds
    while (now := counts(server)) != before and time.monotonic() < end:  # noqa: ASYNC110 - another process settles
        await asyncio.sleep(0.1)
    return {name: now[name] - before[name] for name in COUNTED if now[name] != before[name]}


async def run(server: Served, count: int, seed: int, blocks: bool = False) -> dict[str, Any]:
    """The storm, and what it has left behind."""
    dice = random.Random(seed)
    server.control("slow", seconds=0.002)
    await storm(server, WARM_UP, dice, blocks)
    await asyncio.sleep(1)
    before, threads, memory = counts(server), server.threads(), server.rss()
    began = time.monotonic()
    ended = await storm(server, count, dice, blocks)
    seconds = time.monotonic() - began
    leaked = await settled(server, before)
    facts = server.control("facts")
    freed = {int(runs): times for runs, times in facts["freed_after"].items()}
    errors = {how: times for how, times in ended.items() if how.startswith("error")}
    late = sum(times for runs, times in freed.items() if runs > RUNS)
    grown, more_threads = (server.rss() - memory) / 2**20, server.threads() - threads
    return {
        "seed": seed,
        "clients": count,
        "seconds": round(seconds, 1),
        "ended": dict(ended),
        "leaked": leaked,
        "more_threads": more_threads,
        "more_megabytes": round(grown, 1),
        "never_seated": facts["never_seated"],
        "freed_after_runs": freed,
        "held": not leaked
        and not errors
        and late <= sum(freed.values()) // 100
        and more_threads <= 0
        and grown <= max(MEGABYTES, count / 1000),
    }


async def find_planted(server: Served, seed: int) -> dict[str, bool]:
    """Whether each planted leak is found."""
    found = {}
    dice = random.Random(seed)
    for what in PLANTED:
        before = counts(server)
        server.control("leak", what=what)
        await storm(server, 60, dice)
        server.control("clear")
        found[what] = bool(await settled(server, before, PLANTED_SECONDS))
    return found


async def storm_and_controls(server: Served, count: int, seed: int) -> tuple[dict[str, Any], dict[str, bool]]:
    """Both, in one loop."""
    return await run(server, count, seed), await find_planted(server, seed)


def of_blocks(count: int, seed: int) -> dict[str, Any]:
    """The storm on a model that fills in blocks, and whether anything was compiled."""
    root = tiny_store(BLOCKS)
    flags = ("--model.id", BLOCKS, "--checkpoints.root", str(root))
    with served(*flags, faulty=True) as server:
        result = asyncio.run(run(server, count, seed, blocks=True))
        compiled = server.metric("jaxserve_recompiles_total")
    return result | {"compiled": compiled, "held": result["held"] and not compiled}


def main() -> None:
    """Runs the storms and the controls."""
    args = arguments(__doc__, seed={"type": int, "default": 0})
    count = QUICK_COUNT if args.quick else COUNT
    blocks = of_blocks(count // BLOCKS_SHARE, args.seed)
    with served(faulty=True) as server:
        result, found = asyncio.run(storm_and_controls(server, count, args.seed))
    print(blocks, result, found, sep="\n")
    held = blocks["held"] and result["held"] and all(found.values())
    most = max(result["freed_after_runs"], default=0)
    left, leaks = count + blocks["clients"], len(result["leaked"] | blocks["leaked"])
    figure = (
        f"{left:,} clients left, {leaks} kinds of leaks, slots free after {most} runs at most; "
        f"{sum(found.values())} of {len(PLANTED)} planted leaks found"
    )
    report("cancels", figure=figure, held=held, details=result | {"planted": found, "blocks": blocks}, save=args.save)


if __name__ == "__main__":
    main()
