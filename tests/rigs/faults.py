"""Every fault that a server should survive, staged on the real one: who asked must not notice, or is told.

``python -m tests.rigs.faults``. Each row of the table is a function (in ``rows_requests``, ``rows_engine`` and
``rows_process``) that brings the fault about and asserts what is expected of it: the tokens of everybody else with
their log-probabilities, slots, streams, tasks and descriptors as before within five seconds, a count and a line in the
log. A fault has survived when all its rows hold.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from tests.rigs import rows_engine as engine
from tests.rigs import rows_process as process
from tests.rigs import rows_requests as requests
from tests.rigs.rows_process import NotStaged
from tests.rigs.served import served
from tests.rigs.stage import Stage
from tests.rigs.verdict import arguments, report

FAULTS = 35
# Limits so short that a fault can be waited for.
FLAGS = (
    *("--engine.max-waiting", "8", "--engine.queue-timeout-s", "1.5", "--server.max-n", "16"),
    *("--server.header-timeout-s", "1.5", "--server.body-timeout-s", "1.5", "--server.keep-alive-timeout-s", "1.5"),
    *("--server.write-timeout-s", "2"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One way a fault comes about.

    Attributes:
        faults: its numbers in the table.
        shared: it takes place on the common stage; else on a server, or several, of its own.
        quick: also tried in the short run.
    """

    faults: tuple[int, ...]
    name: str
    play: Callable[..., Awaitable[str]]
    shared: bool = False
    quick: bool = False


def _on_stage(fault: int, play: Callable[[Stage], Awaitable[str]], *, quick: bool = False) -> Row:
    return Row((fault,), play.__name__.replace("_", " "), play, shared=True, quick=quick)


def _alone(faults: int | tuple[int, ...], play: Callable[..., Awaitable[str]], *given: str) -> Row:
    name = " ".join((play.__name__.replace("_", " "), *given))
    return Row((faults,) if isinstance(faults, int) else faults, name, partial(play, *given))


ROWS = (
    _on_stage(1, requests.disconnect_in_a_stream, quick=True),
    _on_stage(2, requests.disconnect_before_the_answer),
    _on_stage(3, requests.disconnect_in_the_queue, quick=True),
    _on_stage(4, requests.slow_reader),
    _on_stage(6, requests.slow_sender),
    _on_stage(7, requests.deadline_in_the_queue),
    _on_stage(8, requests.burst),
    _on_stage(9, engine.nan_in_a_row, quick=True),
    _on_stage(10, engine.nan_in_all_rows, quick=True),
    _on_stage(11, engine.out_of_memory),
    _on_stage(13, engine.failed_step),
    _on_stage(14, engine.pause),
    _on_stage(15, engine.blocked_loop),
    _on_stage(23, engine.clock_jump),
    _on_stage(25, engine.poisoned_request, quick=True),
    _on_stage(26, process.no_descriptors),
    _on_stage(27, process.blocked_log),
    _on_stage(32, requests.huge_prompt),
    _on_stage(34, requests.same_request_id, quick=True),
    _on_stage(12, engine.compile_later),
    _alone(5, process.vanished_peer),
    _alone(9, engine.nan_too_often),
    _alone(10, engine.broken_for_good, "weights"),
    _alone(11, engine.broken_for_good, "oom"),
    _alone(11, engine.plan_that_does_not_fit),
    _alone(12, engine.compile_failure),
    _alone(13, engine.dead_thread),
    _alone(14, engine.hang),
    _alone(16, process.damaged_checkpoint, "bit"),
    _alone(17, process.damaged_checkpoint, "truncated"),
    _alone(17, process.damaged_checkpoint, "missing"),
    _alone(17, process.damaged_checkpoint, "extra"),
    _alone(18, process.damaged_checkpoint, "list"),
    _alone(18, process.damaged_checkpoint, "config"),
    _alone(19, process.full_disk),
    _alone(21, process.terminated),
    _alone((24, 30), process.key_revoked),
    _alone(29, process.certificate_rotated),
    _alone(31, requests.greedy_tenant),
    _alone(33, process.no_memory),
    _alone(35, process.damaged_checkpoint, "goldens"),
)
NOT_STAGED = {
    20: "there are no batch jobs yet",
    22: "there are no batch jobs yet",
    28: "it runs on one host",
}


@dataclasses.dataclass(slots=True)
class Outcome:
    """How a row went: ``survived``, ``not survived`` or ``not staged``, and what was seen."""

    row: Row
    how: str
    seen: str
    seconds: float

    def __str__(self) -> str:
        numbers = " ".join(f"F{number}" for number in self.row.faults)
        return f"{numbers:8} {self.how:12} {self.row.name}: {self.seen} ({self.seconds:.1f} s)"


async def play(row: Row, *given: Any) -> Outcome:
    """One row, whatever comes of it."""
    began = time.monotonic()
    try:
        how, seen = "survived", await row.play(*given)
    except NotStaged as reason:
        how, seen = "not staged", str(reason)
    except Exception as error:  # noqa: BLE001 - the other rows are still to be played
        where = traceback.extract_tb(error.__traceback__)[-1]
        how, seen = "NOT SURVIVED", f"{type(error).__name__}: {error} ({where.name}:{where.lineno})"
    outcome = Outcome(row, how, seen, time.monotonic() - began)
    print(outcome, flush=True)
    return outcome


async def play_shared(rows: Sequence[Row], *, careless: bool = False) -> list[Outcome]:
    """Rows on one stage, and on a new one after each that did not hold."""
    outcomes: list[Outcome] = []
    left = list(rows)
    while left:
        with served(*FLAGS, faulty=True) as server:
            stage = Stage(server)
            await stage.prepare()
            if careless:
                server.control("blame_last")
            while left:
                outcomes.append(await play(left.pop(0), stage))
                if outcomes[-1].how == "NOT SURVIVED":
                    break
    return outcomes


async def play_all(rows: Sequence[Row], *, careless: bool = False) -> list[Outcome]:
    """The common stage first, then everybody alone."""
    outcomes = await play_shared([row for row in rows if row.shared], careless=careless)
    for row in rows:
        if not row.shared:
            outcomes.append(await play(row))
    return outcomes


def main() -> None:
    """Plays every row."""
    args = arguments(
        __doc__,
        only={"help": "numbers of faults, with commas"},
        careless={"action": "store_true", "help": "plant a recovery that blames the wrong request"},
    )
    wanted = set(map(int, args.only.split(","))) if args.only else set(range(1, FAULTS + 1))
    rows = [row for row in ROWS if wanted & set(row.faults) and (row.quick or not args.quick)]
    outcomes = asyncio.run(play_all(rows, careless=args.careless))
    failed = {number for one in outcomes if one.how == "NOT SURVIVED" for number in one.row.faults}
    unstaged = {number: one.seen for one in outcomes if one.how == "not staged" for number in one.row.faults}
    unstaged = {number: why for number, why in (NOT_STAGED | unstaged).items() if number in wanted and not args.quick}
    survived = {number for row in rows for number in row.faults} - failed - set(unstaged)
    reasons: dict[str, list[str]] = {}
    for number, why in sorted(unstaged.items()):
        reasons.setdefault(why, []).append(f"F{number}")
    listed = "; ".join(f"{', '.join(numbers)}: {why}" for why, numbers in reasons.items())
    figure = f"{len(survived | failed | set(unstaged))} faults: {len(survived)} survived, "
    figure += f"{len(failed)} not survived, " if failed else ""
    figure += f"{len(unstaged)} not staged here" + (f" ({listed})" if listed else "")
    details = {
        "rows": [
            {"faults": one.row.faults, "row": one.row.name, "how": one.how, "seen": one.seen, "seconds": one.seconds}
            for one in outcomes
        ],
    }
    report("faults", figure=figure, held=not failed, details=details, save=args.save)


if __name__ == "__main__":
    main()
