"""Does a server that is told to go leave in order? SIGTERM in the middle of 32 streams, again and again.

``python -m tests.rigs.drain``. Each stream must end in ``[DONE]`` or in an error event that says ``server_shutdown``;
what it has brought by then must be the beginning of the undisturbed answer, or all of it; a client that looks at
``/readyz`` before it asks must never find the door shut; the process must exit with 0 in its time. In turns the streams
are given the time that they need, are cut at the end of the drain, and are cut by a second signal. A server that is
killed instead is planted and must be found out.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import signal
import time
from collections.abc import Sequence
from typing import Any

from tests.rigs.clients import Answer, ask, ask_all
from tests.rigs.served import Served, served
from tests.rigs.verdict import arguments, report

STREAMS = 32
LAME_DUCK_SECONDS = 0.5
GRACE_SECONDS = 1.0
OBEDIENT_PACE = 0.03
# How it ends: name, seconds that the streams are given, seconds that a dispatch takes longer, whether a second signal
# comes.
Ending = tuple[str, float, float, bool]
ENDINGS: tuple[Ending, ...] = (
    ("in time", 30.0, 0.005, False),
    ("cut", 0.5, 0.2, False),
    ("hurried", 30.0, 0.2, True),
)


def bodies(seed: int) -> list[dict[str, Any]]:
    """Requests of every kind, two for each slot; their answers depend on nothing else."""
    dice = random.Random(seed)
    found = []
    for number in range(STREAMS):
        prompt = [dice.randrange(20, 380) for _ in range(dice.choice([1, 9, 33, 70]))]
        sampling = {"temperature": 0} if number % 2 else {"temperature": 0.9, "seed": number}
        body = {"prompt": prompt, "max_tokens": dice.randint(40, 120), "logprobs": 0, "ignore_eos": True}
        found.append(body | sampling | {"stream": True})
    return found


@dataclasses.dataclass
class Drained:
    """What was seen of one drain.

    Attributes:
        ending: how it was to end.
        done, ended: streams that came to their end, and that were told of the shutdown.
        asked, refused: the obedient client's requests, and those that found nobody.
        seconds: from the signal to the exit.
        wrong: what should not have been.
    """

    ending: str
    done: int = 0
    ended: int = 0
    asked: int = 0
    refused: int = 0
    seconds: float = 0.0
    wrong: list[str] = dataclasses.field(default_factory=list)

    def judge(self, answers: Sequence[Answer], whole: Sequence[Answer], code: int, most: float) -> None:
        """Compares what came with what comes undisturbed; ``most`` is how long the exit may take."""
        for number, (answer, reference) in enumerate(zip(answers, whole, strict=True)):
            said = [part for part in answer.said if part]
            self.done += answer.done
            self.ended += answer.error == "server_shutdown"
            if answer.done and answer.error is not None:
                self.wrong.append(f"stream {number} ended twice: [DONE] and {answer.error}")
            elif answer.done and said != reference.said:
                self.wrong.append(f"stream {number} is done and not what it is undisturbed")
            elif not answer.done and answer.error != "server_shutdown":
                self.wrong.append(f"stream {number} ended without a word: {answer.status}, {answer.error}")
            elif said != reference.said[: len(said)]:
                self.wrong.append(f"stream {number} is no beginning of what it is undisturbed")
        if self.refused:
            self.wrong.append(f"{self.refused} of {self.asked} requests of an obedient client found nobody")
        if code != 0:
            self.wrong.append(f"exit code {code}")
        if self.seconds > most:
            self.wrong.append(f"gone after {self.seconds:.1f} s, not {most:.1f}")


async def obey(server: Served, drained: Drained, over: asyncio.Event) -> None:
    """Asks as long as ``/readyz`` says so, each time on a connection of its own."""
    while not over.is_set():
        if (await ask(server.probe_url, None, path="/readyz")).status != 200:
            return
        drained.asked += 1
        try:
            answer = await ask(server.url, None, path="/v1/models")
            drained.refused += answer.status != 200
        except OSError:
            drained.refused += 1
        await asyncio.sleep(OBEDIENT_PACE)


async def streams_until(server: Served, drained: Drained, seed: int, second: bool, with_signal: int) -> list[Answer]:
    """Starts all streams, ends the server in the middle of them, and gathers what came of each."""
    over = asyncio.Event()
    obedient = asyncio.create_task(obey(server, drained, over))
    running = asyncio.create_task(ask_all(server.url, bodies(seed)))
    await asyncio.sleep(0.3 + random.Random(seed).random() * 0.4)
    os.kill(server.process.pid, with_signal)
    begin = time.monotonic()
    if second:
        await asyncio.sleep(LAME_DUCK_SECONDS + 0.3)
        os.kill(server.process.pid, with_signal)
    answers = await running
    over.set()
    await obedient
    await asyncio.to_thread(server.wait, 60)
    drained.seconds = round(time.monotonic() - begin, 2)
    return answers


def drain(number: int, ending: Ending, whole: Sequence[Answer] | None, with_signal: int = signal.SIGTERM) -> Drained:
    """One server, from ready to gone; it is asked for the ``whole`` answers before if nobody knows them."""
    name, seconds, pause, second = ending
    drained = Drained(name)
    flags = ("--server.lame-duck-s", str(LAME_DUCK_SECONDS), "--server.drain-s", str(seconds))
    with served(*flags, faulty=True) as server:
        whole = whole or undisturbed(server, number)
        server.control("slow", seconds=pause)
        answers = asyncio.run(streams_until(server, drained, number, second, with_signal))
        most = LAME_DUCK_SECONDS + (0.3 if second else seconds) + GRACE_SECONDS
        drained.judge(answers, whole, server.process.returncode, most)
        if any("Traceback" in line for line in server.lines):
            drained.wrong.append("a traceback in the log")
    if name != "in time" and drained.ended == 0 and with_signal == signal.SIGTERM:
        drained.wrong.append("nothing was left to cut: the rig is too slow or the server too fast")
    return drained


def undisturbed(server: Served, seed: int) -> list[Answer]:
    """What each stream brings when nobody is told to go."""
    answers = asyncio.run(ask_all(server.url, bodies(seed)))
    assert all(answer.complete for answer in answers), "not even undisturbed"
    return answers


def main() -> None:
    """Drains of each kind in turns, and the control."""
    given = arguments(__doc__)
    seeds, whole = range(20), dict[int, list[Answer]]()
    if given.quick:
        seeds = range(1, 2)
    else:
        with served() as server:
            whole = {seed: undisturbed(server, seed) for seed in seeds}
    found = {seed: drain(seed, ENDINGS[seed % len(ENDINGS)], whole.get(seed)) for seed in seeds}
    control = drain(1, ENDINGS[1], whole.get(1), signal.SIGKILL)
    wrong = [f"drain {seed}, {one.ending}: {what}" for seed, one in found.items() for what in one.wrong]
    wrong += [] if control.wrong else ["control: a server that was killed was not found out"]
    for line in wrong:
        print(line)
    done, ended, asked, refused = (
        sum(getattr(one, name) for one in found.values()) for name in ("done", "ended", "asked", "refused")
    )
    figure = (
        f"{len(found)} drains of {STREAMS} streams: {done} done, {ended} told of the shutdown, {len(wrong)} wrong; "
        f"{refused} of {asked} obedient requests refused"
    )
    drains = {seed: dataclasses.asdict(one) for seed, one in found.items()}
    report(
        "drain",
        figure=figure,
        held=not wrong,
        details={"drains": drains, "control": control.wrong[:3]},
        save=given.save,
    )


if __name__ == "__main__":
    main()
