"""More requests than there is room for: are the admitted served as if they were alone, and the others told at once?

``python -m tests.rigs.overload``. What the real server can do is measured by clients that always ask; then requests
come by the clock at 0.8, 1, 2, 4 and 10 times that rate, in rounds, so that a machine that drifts moves them all. The
server runs on one core and the crowd on another. At the end two tenants share the server, one of whom asks far too
much, and a server with a long queue has to fail: that is what short queues are for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop

from jaxserve.checkpoint.store import Store
from jaxserve.config import ModelConfig
from tests.rigs.keyring import keyed
from tests.rigs.load import Shot, Stretch, closed_loop, completion, open_loop, poisson, quantile, summary
from tests.rigs.served import ROOT, Served, served
from tests.rigs.verdict import arguments, report

NORMAL, OVER = 0.8, 4.0
CLOSED = 0.0  # no rate: clients that always ask
RATES = (NORMAL, 1.0, 2.0, OVER, 10.0)
LONG_QUEUE = 256
GOODPUT_SHARE = 0.95  # of the peak, at OVER
SLOWDOWN = 2.0  # time to first token of the admitted at OVER, beside NORMAL
REFUSAL_SECONDS = 0.05
RECOVERY_SECONDS = 5.0
QUIET_SHARE, QUIET_REQUESTS = 0.15, 50
# A fourth of the slots is kept from any one tenant, and a newcomer waits for one step, not for four.
FAIR = ("--engine.max-tenant-share", "0.75", "--engine.steps-per-dispatch", "1")
UNFAIRNESS = 2.0  # time to first token of a quiet tenant beside a greedy one
WARM_SHARE = 0.2  # of each stretch of load, not counted
LAG_SECONDS = 0.02  # a client that sends later than this measures itself


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """What is served and what is asked of it.

    Attributes:
        tiny: the tiny model, else the default one.
        slots: requests that run at once.
        outputs: tokens that a request may ask for.
    """

    tiny: bool
    slots: int
    length: int
    outputs: tuple[int, ...]


# The default model's steps take as long as steps do; of the tiny one's answers there are many.
SETTINGS = {
    "smollm2": Setting(tiny=False, slots=8, length=512, outputs=(16, 32, 48)),
    "tiny": Setting(tiny=True, slots=16, length=256, outputs=(50, 100, 150)),
}


def pulled() -> Path:
    """The version of the default model that is in use; fetched if there is none."""
    name, root = ModelConfig().id, ROOT / "checkpoints"
    command = [sys.executable, "-c", "from jaxserve.cli import main; main()", "pull", name]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return Store(root).path(name)


@contextlib.contextmanager
def start(setting: Setting, flags: Sequence[str]) -> Iterator[Served]:
    """The server on the first core; from when it is ready on, this process on the others."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1])  # the server inherits it
    try:
        pools = ("--engine.pools", f"{setting.slots}x{setting.length}")
        with served(*pools, *flags, model=None if setting.tiny else pulled()) as server:
            os.sched_setaffinity(0, cores[1:] or cores)
            yield server
    finally:
        os.sched_setaffinity(0, cores)


class Bench:
    """A server and those who ask it."""

    def __init__(self, server: Served, setting: Setting, seed: int) -> None:
        self.server = server
        self.dice = random.Random(seed)
        self._setting = setting
        self._host = urlsplit(server.url).netloc

    def request(self, key: str = "") -> bytes:
        """One request's bytes."""
        return completion(self.dice, self._host, key=key, words=(4, 16), outputs=self._setting.outputs)

    def closed(self, seconds: float) -> Stretch:
        """A stretch in which a few clients more than there are slots always ask."""
        shots = uvloop.run(closed_loop(self.server.url, self._setting.slots + 2, seconds, self.request))
        begin = min(shot.due for shot in shots)
        return shots, begin + WARM_SHARE * seconds, begin + seconds

    def capacity(self, seconds: float) -> float:
        """Requests a second that it can serve."""
        shots, begin, end = self.closed(seconds)
        done = sum(shot.served and begin <= shot.end < end for shot in shots)
        # In the short run nothing may have ended yet; what is then sent is still more than there is room for.
        return max(done / (end - begin), 1.5 * self._setting.slots / seconds)

    def shots(self, rate: float, begin: float, seconds: float, tenant: str = "", key: str = "") -> list[Shot]:
        """Requests of one stretch of load."""
        return [Shot(begin + at, self.request(key), tenant) for at in poisson(rate, seconds, self.dice)]

    def fire(self, shots: list[Shot]) -> float:
        """Sends them as planned; returns when that began."""
        if not shots:
            return math.nan
        first = min(shot.due for shot in shots)
        uvloop.run(open_loop(self.server.url, shots, patience=120))
        return min(shot.due for shot in shots) - first

    def rest(self) -> None:
        """Waits until nothing runs."""
        end = time.monotonic() + 120
        while self.server.metric("jaxserve_requests_running") + self.server.metric("jaxserve_requests_waiting"):
            assert time.monotonic() < end, "it does not come to rest"
            time.sleep(0.1)


def rounds_of(bench: Bench, rate: float, seconds: float, rounds: int, rates: Sequence[float]) -> dict[float, Any]:
    """Each rate's figures over all rounds, and under ``CLOSED`` those of clients that always ask.

    All take turns in each round, since a shared machine is not as fast in one minute as in the next; the shots of each
    stretch are pooled.
    """
    pooled: dict[float, list[Stretch]] = {factor: [] for factor in (CLOSED, *rates)}
    length = seconds / rounds
    for _ in range(rounds):
        pooled[CLOSED].append(bench.closed(length))
        bench.rest()
        for factor in rates:
            shots = bench.shots(factor * rate, 0.0, length)
            begin = bench.fire(shots)
            pooled[factor].append((shots, begin + WARM_SHARE * length, begin + length))
            bench.rest()
    return {factor: summary(*stretches) for factor, stretches in pooled.items()}


def recovery(bench: Bench, rate: float, normal: dict[str, float], seconds: float) -> float:
    """Seconds from the end of the heaviest load until requests fare as they do in normal times."""
    heavy, light = seconds / 4, seconds / 2
    shots = bench.shots(RATES[-1] * rate, 0.0, heavy) + bench.shots(NORMAL * rate, heavy, light)
    begin = bench.fire(shots)
    usual = normal["refused"] / max(1.0, normal["sent"]) + 0.05
    after = [shot for shot in shots if shot.due >= begin + heavy]
    slow = SLOWDOWN * normal["ttft_p99"]
    for step in range(int(2 * light) - 2):
        late = [shot for shot in after if shot.due >= begin + heavy + step / 2]
        bad = [shot for shot in late if not shot.served or shot.first - shot.due > slow]
        if len(bad) <= usual * len(late):
            return step / 2
    return math.inf


def fairness(setting: Setting, rate: float, seconds: float, seed: int, flags: Sequence[str]) -> dict[str, Any]:
    """A quiet tenant alone, then beside one that asks ten times as much, which is more than there is.

    Both parts last until the quiet one has asked often enough for its slowest answers to be known.
    """
    with tempfile.TemporaryDirectory(prefix="rig-") as folder:
        ring = keyed(Path(folder), "quiet", "greedy")
        with start(setting, (*flags, *FAIR, "--auth.keys", str(ring.file))) as server:
            server.headers |= ring.headers("operator")
            bench = Bench(server, setting, seed)
            quiet_rate = QUIET_SHARE * rate
            seconds = max(seconds, QUIET_REQUESTS / quiet_rate)
            alone = bench.shots(quiet_rate, 0.0, seconds, "quiet", ring.keys["quiet"])
            bench.fire(alone)
            bench.rest()
            quiet = bench.shots(quiet_rate, 0.0, seconds, "quiet", ring.keys["quiet"])
            greedy = bench.shots(10 * quiet_rate, 0.0, seconds, "greedy", ring.keys["greedy"])
            bench.fire(quiet + greedy)
            bench.rest()
    waits = [[shot.first - shot.due for shot in shots if shot.served] for shots in (alone, quiet)]
    before, beside = (quantile(wait, 0.99) for wait in waits)
    return {
        "quiet_sent": len(quiet),
        "quiet_ttft_p50_alone": quantile(waits[0], 0.5),
        "quiet_ttft_p50_beside": quantile(waits[1], 0.5),
        "quiet_ttft_p99_alone": before,
        "quiet_ttft_p99_beside": beside,
        "ratio": beside / before,
        "quiet_refused": sum(shot.refused for shot in quiet),
        "quiet_failed": sum(not shot.served and not shot.refused for shot in quiet + alone),
        "greedy_served": sum(shot.served for shot in greedy),
        "greedy_refused": sum(shot.refused for shot in greedy),
    }


def measure(setting: Setting, options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Everything about one server with a short queue, and the same two rates with a long one."""
    flags = ("--engine.max-waiting", options.waiting)
    rates = (NORMAL, OVER) if options.quick else RATES
    with start(setting, flags) as server:
        bench = Bench(server, setting, options.seed)
        rate = bench.capacity(options.seconds / 2)
        bench.rest()
        before = _cpu(server), time.process_time(), time.monotonic()
        at = rounds_of(bench, rate, options.seconds, options.rounds, rates)
        wall = time.monotonic() - before[2]
        found: dict[str, Any] = {
            "rate": rate,
            "peak": at.pop(CLOSED),
            "at": {f"{factor:g}x": figures for factor, figures in at.items()},
            "server_cpu": (_cpu(server) - before[0]) / wall,
            "client_cpu": (time.process_time() - before[1]) / wall,
        }
        if not options.quick:
            found["recovery"] = recovery(bench, rate, at[NORMAL], options.seconds / options.rounds * 2)
        found["recompiles"] = server.metric("jaxserve_recompiles_total")
    if options.quick:
        return found, {}
    found["fairness"] = fairness(setting, rate, options.seconds, options.seed, flags)
    with start(setting, ("--engine.max-waiting", str(LONG_QUEUE))) as server:
        bench = Bench(server, setting, options.seed)
        long_queue = rounds_of(bench, rate, options.seconds, 1, (NORMAL, OVER))
        del long_queue[CLOSED]
    return found, {f"{factor:g}x": figures for factor, figures in long_queue.items()}


def _cpu(server: Served) -> float:
    """Seconds of processor time that the server has used."""
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def broken(found: dict[str, Any], *, timings: bool) -> list[str]:
    """What did not hold, in words. Without ``timings`` only what no machine excuses."""
    at = found["at"]
    stretches = list(at.values())
    fair = found.get("fairness", {"quiet_failed": 0, "quiet_refused": 0})
    checks = [
        (not any(one["failed"] for one in stretches), "requests failed that were neither served nor refused"),
        (not any(one["hasty"] for one in stretches), "refusals did not say when to come back"),
        (at[f"{OVER:g}x"]["refused"] > 0, "nothing was refused"),
        (all(one["served"] for one in stretches), "nothing was served"),
        (not found["recompiles"], "something was compiled"),
        (not fair["quiet_failed"] and not fair["quiet_refused"], "the quiet one lost some"),
    ]
    if timings:
        most = max(one["goodput"] for one in (*stretches, found["peak"]))
        slowdown = at[f"{OVER:g}x"]["ttft_p99"] / at[f"{NORMAL:g}x"]["ttft_p99"]
        refusal = max(one["refusal_p99"] for one in stretches if one["refused"])
        checks += [
            (at[f"{OVER:g}x"]["goodput"] >= GOODPUT_SHARE * most, f"goodput at {OVER:g}x is below the peak"),
            (slowdown <= SLOWDOWN, f"the admitted wait {slowdown:.2f} times as long"),
            (refusal <= REFUSAL_SECONDS, f"refusals took {1000 * refusal:.0f} ms"),
            (found["recovery"] <= RECOVERY_SECONDS, f"recovery took {found['recovery']} s"),
            (fair["ratio"] <= UNFAIRNESS, f"the quiet one waits {fair['ratio']:.2f} times as long"),
            (max(one["lag_p99"] for one in stretches) <= LAG_SECONDS, "the client itself was too slow to judge"),
        ]
    return [words for held, words in checks if not held]


def figure(found: dict[str, Any]) -> str:
    """The figures in one line."""
    at = found["at"]
    normal, over = at[f"{NORMAL:g}x"], at[f"{OVER:g}x"]
    most = max(one["goodput"] for one in (*at.values(), found["peak"]))
    refusal = max([one["refusal_p99"] for one in at.values() if one["refused"]], default=math.nan)
    said = (
        f"at {OVER:g}x goodput {over['goodput'] / most:.0%} of the peak ({most:.0f} tokens/s), "
        f"p99 time to first token {1000 * over['ttft_p99']:.0f} ms ({over['ttft_p99'] / normal['ttft_p99']:.2f} times "
        f"that at {NORMAL:g}x), refusals p99 {1000 * refusal:.0f} ms"
    )
    if "fairness" not in found:
        return said
    return (
        f"{said} up to {RATES[-1]:g}x, normal again after {found['recovery']:g} s, "
        f"a quiet tenant waits {found['fairness']['ratio']:.2f} times as long beside a greedy one"
    )


def rounded(value: Any) -> Any:
    """What a file keeps of figures: six digits, and nothing where there is no number."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def main() -> None:
    """Measures, judges, and shows that the judgement can fail."""
    options = arguments(
        __doc__,
        model={"choices": sorted(SETTINGS), "default": "smollm2"},
        seconds={"type": float, "default": 60.0, "help": "of load at each rate"},
        rounds={"type": int, "default": 3, "help": "in which they are spent"},
        waiting={"default": "auto", "help": "engine.max_waiting"},
        seed={"type": int, "default": 0},
    )
    if options.quick:
        options.model, options.seconds, options.rounds = "tiny", 1.0, 1
    found, long_queue = measure(SETTINGS[options.model], options)
    wrong = broken(found, timings=not options.quick)
    if not options.quick:
        planted = broken(found | {"at": found["at"] | long_queue}, timings=True)
        if not any("wait" in words for words in planted):
            wrong.append(f"a queue of {LONG_QUEUE} went unnoticed")
    details = rounded({"options": vars(options), **found, f"queue_of_{LONG_QUEUE}": long_queue})
    words = figure(found) + "".join(f"; {reason}" for reason in wrong)
    report("overload", figure=words, held=not wrong, details=details, save=options.save)


if __name__ == "__main__":
    main()
