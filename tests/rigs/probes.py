"""Do the probes tell the truth? The engine killed, stopped or hung, a blocked loop, a start that stands still, load.

``python -m tests.rigs.probes``. The real server on the tiny model has faults planted while streams run, and is asked
all the time, each probe on a connection of its own, as a kubelet does. ``/readyz`` must be 503 within a second of a
fault and 200 again after one that was only a pause; ``/livez`` must not ask for a restart before its limit, and must
after it; under four times the load that there is room for, no probe may raise a false alarm. A probe that lies is
planted and must be found out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from tests.rigs.busy import busy
from tests.rigs.served import Served, served, started
from tests.rigs.verdict import arguments, report

TELL_SECONDS = 1.0  # from a fault to /readyz, and from a limit to /livez
BACK_SECONDS = 3.0  # from the end of a pause to /readyz
EXIT_SECONDS = 5.0  # from an engine's death to the process's end
P99_SECONDS = 0.05
HEARTBEAT_LIMIT = 4.0
SLOTS = 16
EX_SOFTWARE = 70


# --- asking -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One question: when it was asked and answered, by the monotonic clock; status 0 if nobody was there."""

    path: str
    asked: float
    answered: float
    status: int


def probe(url: str, path: str, timeout: float = 2.0) -> Sample:
    """Asks once, on a connection of its own."""
    parts = urlsplit(url)
    begin, status = time.monotonic(), 0
    with contextlib.suppress(OSError), socket.create_connection((parts.hostname, parts.port), timeout) as line:
        line.settimeout(timeout)
        line.sendall(f"GET {path} HTTP/1.1\r\nhost: {parts.netloc}\r\nconnection: close\r\n\r\n".encode())
        head = line.recv(4096)
        status = int(head.split(b" ", 2)[1]) if head else 0
    return Sample(path, begin, time.monotonic(), status)


class Prober:
    """Asks ``/readyz`` and ``/livez`` in turns, every few milliseconds, in a thread."""

    def __init__(self, url: str, pace: float = 0.01) -> None:
        self.samples: list[Sample] = []
        self._url = url
        self._pace = pace
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        while not self._stop.wait(self._pace):
            for path in ("/readyz", "/livez"):
                self.samples.append(probe(self._url, path))

    def stop(self) -> None:
        """Asks no more."""
        self._stop.set()
        self._thread.join(10)

    def of(self, path: str, since: float = 0.0, until: float = float("inf")) -> list[Sample]:
        """What was asked of a path in a time."""
        return [one for one in tuple(self.samples) if one.path == path and since <= one.asked and one.answered <= until]

    def await_status(self, path: str, good: bool, since: float, seconds: float) -> float | None:
        """When a path first answered so, in seconds after ``since``; ``None`` if it did not in time."""
        while True:
            for one in self.of(path, since):
                if (one.status == 200) is good:
                    return one.answered - since
            if time.monotonic() > since + seconds:
                return None
            time.sleep(0.01)


@contextlib.contextmanager
def probing(url: str) -> Iterator[Prober]:
    """A prober, stopped in the end."""
    prober = Prober(url)
    try:
        yield prober
    finally:
        prober.stop()


# --- faults -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Seen:
    """What was seen of one kind of fault.

    Attributes:
        told: seconds from each fault to the 503 of ``/readyz``.
        wrong: what should not have been.
    """

    told: list[float] = dataclasses.field(default_factory=list)
    wrong: list[str] = dataclasses.field(default_factory=list)

    def expect(self, good: bool, what: str) -> None:
        """Notes what does not hold."""
        if not good:
            self.wrong.append(what)

    def tell(self, told: float | None) -> None:
        """Takes the time to the first 503."""
        self.expect(told is not None and told <= TELL_SECONDS, f"/readyz not 503 within {TELL_SECONDS} s: {told}")
        if told is not None:
            self.told.append(round(told, 3))


def pause(seen: Seen, prober: Prober, seconds: float, fault: Callable[[], None], end: Callable[[], None]) -> None:
    """A fault that passes: not ready, alive, ready again."""
    begin = time.monotonic()
    fault()
    seen.tell(prober.await_status("/readyz", False, begin, seconds))
    time.sleep(max(0.0, begin + seconds - time.monotonic()))
    ended = time.monotonic()
    end()
    back = prober.await_status("/readyz", True, ended, BACK_SECONDS)
    seen.expect(back is not None, f"/readyz not 200 within {BACK_SECONDS} s after a pause")
    alive = {one.status for one in prober.of("/livez", begin)}
    seen.expect(alive == {200}, f"/livez said {alive} in a pause of {seconds} s")


def pauses(server: Served, prober: Prober, seconds: float, times: int = 1, most: int = 3) -> dict[str, Seen]:
    """Faults that pass, in turns; ``most`` kinds of them."""
    kinds: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        "engine hung": (lambda: server.control("hang_engine"), lambda: server.control("release")),
        "loop blocked": (lambda: server.control("block_loop", seconds=seconds), lambda: None),
        "engine stopped": (lambda: server.control("stop_engine"), lambda: server.control("release")),
    }
    found = {kind: Seen() for kind in tuple(kinds)[:most]}
    for _ in range(times):
        for kind in found:
            fault, end = kinds[kind]
            pause(found[kind], prober, seconds, fault, end)
            time.sleep(0.3)
    return found


def killed(seen: Seen, *, deaf: bool = False) -> None:
    """The engine's thread dies: nobody is sent here any more, and the process ends so that it is started anew.

    It does so even if its event loop does not hear of it (``deaf``).
    """
    with served(faulty=True) as server, busy(server, 4), probing(server.probe_url) as prober:
        time.sleep(0.5)
        if deaf:
            server.control("block_loop", seconds=60)
        begin = time.monotonic()
        server.control("kill_engine")
        seen.tell(prober.await_status("/readyz", False, begin, EXIT_SECONDS))
        code = server.wait(60)
        took = time.monotonic() - begin
        seen.expect(code == EX_SOFTWARE, f"exit code {code}")
        seen.expect(took <= EXIT_SECONDS, f"ended after {took:.1f} s")
        late = [one.status for one in prober.of("/livez", begin + TELL_SECONDS)]
        seen.expect(200 not in late, "/livez said 200 of an engine that was gone")


def hung_for_good(seen: Seen) -> None:
    """The device does not come back: dead at the limit and not before, ended at twice the limit."""
    flags = ("--server.heartbeat-limit-s", str(HEARTBEAT_LIMIT))
    with served(*flags, faulty=True) as server, busy(server, 4), probing(server.probe_url) as prober:
        time.sleep(0.5)
        begin = time.monotonic()
        server.control("hang_engine")
        seen.tell(prober.await_status("/readyz", False, begin, HEARTBEAT_LIMIT))
        dead = prober.await_status("/livez", False, begin, HEARTBEAT_LIMIT + 10) or float("inf")
        early, late = HEARTBEAT_LIMIT - TELL_SECONDS, HEARTBEAT_LIMIT + TELL_SECONDS
        seen.expect(early <= dead <= late, f"/livez 503 after {dead:.1f} s at a limit of {HEARTBEAT_LIMIT} s")
        code = server.wait(60)
        took = time.monotonic() - begin
        seen.expect(code == EX_SOFTWARE, f"exit code {code}")
        seen.expect(took <= 2 * HEARTBEAT_LIMIT + EXIT_SECONDS, f"ended after {took:.1f} s")
        seen.expect(any("stacks" in line for line in server.records("stands still")), "no stacks in the log")


def stopped_as_a_whole(seen: Seen) -> None:
    """A process that was stopped for longer than all limits, and goes on, is nobody to restart."""
    limits = ("--server.heartbeat-limit-s", "1.5", "--server.loop-limit-s", "1.5")
    with served(*limits, faulty=True) as server, busy(server, 4), probing(server.probe_url) as prober:
        time.sleep(0.5)
        os.kill(server.process.pid, signal.SIGSTOP)
        time.sleep(6)
        begin = time.monotonic()
        os.kill(server.process.pid, signal.SIGCONT)
        back = prober.await_status("/readyz", True, begin, BACK_SECONDS)
        seen.expect(back is not None, f"/readyz not 200 within {BACK_SECONDS} s after a stop")
        time.sleep(2)
        seen.expect(server.process.poll() is None, "ended after a stop")
        said = {one.status for one in prober.of("/livez") if one.answered >= begin}
        seen.expect(503 not in said, "/livez 503 after a stop")
        seen.expect(not server.records("stands still"), "a stop was taken for a hang")


def stuck_at_start(seen: Seen) -> None:
    """The first program never comes back: not started, not ready, and dead at the limit; well again if it does."""
    with started("--server.stall-limit-s", "2", faulty=True) as server, probing(server.probe_url) as prober:
        begin = time.monotonic()
        server.control("hang_engine")
        dead = prober.await_status("/livez", False, begin, 120)
        seen.expect(dead is not None, "/livez never 503 of a start that stands still")
        seen.expect({one.status for one in prober.of("/readyz", begin)} == {503}, "/readyz 200 before a first step")
        seen.expect(probe(server.probe_url, "/startupz").status == 503, "/startupz 200 before a first step")
        server.control("release")
        server.wait_until_ready()
        alive = prober.await_status("/livez", True, time.monotonic(), BACK_SECONDS)
        seen.expect(alive is not None, "/livez not 200 of a start that came through")


# --- load -------------------------------------------------------------------------------------------------------------


def load(server: Served, prober: Prober, seconds: float) -> tuple[Seen, dict[str, Any]]:
    """Four times as many streams as there are slots: busy is neither dead nor unready."""
    seen, since = Seen(), datetime.datetime.now(tz=datetime.UTC).isoformat()
    with busy(server, 4 * SLOTS):
        begin = time.monotonic()
        time.sleep(seconds)
        end = time.monotonic()
        waits = server.metric("jaxserve_requests_waiting")
    samples = [one for one in prober.samples if begin <= one.asked and one.answered <= end]
    alarms = [one for one in samples if one.status != 200]
    for one in alarms[:5]:
        seen.wrong.append(f"{one.path} said {one.status} under load after {one.asked - begin:.1f} s")
    times = sorted(one.answered - one.asked for one in samples)
    p99 = times[int(len(times) * 0.99)]
    seen.expect(p99 <= P99_SECONDS, f"99 of 100 probes in {p99 * 1000:.0f} ms")
    figures = {
        "seconds": seconds,
        "probes": len(samples),
        "false_alarms": len(alarms),
        "waiting": waits,
        "stalled": [line["part"] for line in server.records("stalled") if line["time"] >= since],
        "p50_ms": round(times[len(times) // 2] * 1000, 2),
        "p99_ms": round(p99 * 1000, 2),
        "slowest_ms": round(times[-1] * 1000, 2),
    }
    return seen, figures


def lies_are_found(server: Served, prober: Prober, seconds: float) -> bool:
    """The control: a probe that says 200 whatever is true."""
    server.control("lie")
    with busy(server, 4):
        found = pauses(server, prober, seconds, most=1)
    return all(seen.wrong for seen in found.values())


def main() -> None:
    """Every fault in turns, load, and the control."""
    given = arguments(__doc__, load_seconds={"type": float, "help": "how long the load lasts [60; quick: 2]"})
    times, seconds = (1, 1.1) if given.quick else (10, 2.5)
    with served(faulty=True) as server, probing(server.probe_url) as prober:
        with busy(server, 4):
            time.sleep(0.5)
            found = pauses(server, prober, seconds, times, most=2 if given.quick else 3)
        found["load"], figures = load(server, prober, given.load_seconds or (2.0 if given.quick else 60.0))
        control = lies_are_found(server, prober, seconds)
    found |= {kind: Seen() for kind in ("engine killed", "hung for good", "process stopped", "start stuck")}
    for number in range(0 if given.quick else times):
        killed(found["engine killed"], deaf=number % 3 == 2)
    for _ in range(0 if given.quick else 3):
        hung_for_good(found["hung for good"])
        stopped_as_a_whole(found["process stopped"])
        stuck_at_start(found["start stuck"])
    wrong = [f"{kind}: {what}" for kind, seen in found.items() for what in seen.wrong]
    wrong += [] if control else ["control: a probe that lies was not found out"]
    for line in wrong:
        print(line)
    told = [one for seen in found.values() for one in seen.told]
    figure = (
        f"{len(told)} faults told in at most {max(told, default=0):.2f} s, {len(wrong)} wrong answers; at four times "
        f"the load {figures['false_alarms']:.0f} false alarms, p99 {figures['p99_ms']:.0f} ms"
    )
    details = {"told_seconds": {kind: seen.told for kind, seen in found.items()}, "wrong": wrong, "load": figures}
    report("probes", figure=figure, held=not wrong, details=details, save=given.save)


if __name__ == "__main__":
    main()
