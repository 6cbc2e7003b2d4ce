"""The real server in a process of its own, as an operator starts it; always stopped.

Knows the command line, the log lines and the probes. With ``faulty`` the same server runs with a fault injector inside,
see ``faulty.py``. Loads no JAX itself unless the tiny model must be made first.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from tests.rigs.tiny import NAME, ROOT, tiny_store

__all__ = ["NAME", "Served", "served", "started", "tiny_store"]

PLAIN = [sys.executable, "-c", "from jaxserve.cli import main; main()", "serve"]
FAULTY = [sys.executable, "-m", "tests.rigs.faulty"]
# Compiled programs are kept from run to run; the quick drain is for tests that end a server.
COMMON = [
    *("--server.port", "0", "--server.lame-duck-s", "0.2", "--server.drain-s", "5", "--log.format", "json"),
    *("--engine.max-waiting", "256"),  # what a rig sends at once shall not be refused
    *("--engine.compilation-cache", str(ROOT / ".cache" / "programs")),
]
TINY = ["--model.dtype", "float32", "--engine.pools", "16x256"]
PATIENCE = 240.0


class Served:
    """A started server: its addresses, its log lines, its process.

    Attributes:
        process: the server's own process.
        lines: every line that it has written, each a JSON object; a sentence if it could not start.
        reading: cleared, nobody reads what the server writes any more, and its pipe fills.
        headers: sent with this object's own requests, such as those for metrics.
    """

    def __init__(self, flags: list[str], *, faulty: bool = False, environment: dict[str, str] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rig-")
        self._control = Path(self._folder.name) / "control"
        self.process = subprocess.Popen(
            [*FAULTY, str(self._control), "serve", *flags] if faulty else [*PLAIN, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=os.environ | (environment or {}),
        )
        self.lines: list[str] = []
        self.headers: dict[str, str] = {}
        self.reading = threading.Event()
        self.reading.set()
        self._addresses: dict[str, queue.Queue[str]] = {"listening": queue.Queue(), "probes": queue.Queue()}
        self._known: dict[str, str] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def url(self) -> str:
        """Where it listens; known as soon as it does."""
        return self._address("listening")

    @property
    def probe_url(self) -> str:
        """Where its probes answer on a thread of their own."""
        return self._address("probes")

    @property
    def port(self) -> int:
        """The port of ``url``."""
        return int(self.url.rsplit(":", 1)[1])

    def wait_until_ready(self) -> list[dict[str, Any]]:
        """What ``/readyz`` said on the way, the last one with status 200."""
        said: list[dict[str, Any]] = []
        end = time.monotonic() + PATIENCE
        with httpx2.Client(timeout=30) as client:
            while time.monotonic() < end:
                answer = client.get(self.url + "/readyz")
                said.append(answer.json() | {"code": answer.status_code})
                if answer.status_code == 200:
                    return said
                assert self.process.poll() is None, self.lines
                time.sleep(0.02)
        raise AssertionError(f"not ready in time: {said[-1]}")

    def records(self, message: str = "") -> list[dict[str, Any]]:
        """The log lines so far as objects; only those that say ``message``, if given."""
        found = []
        for line in self.lines:
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict) and message in ("", record.get("message")):
                    found.append(record)
        return found

    def metric(self, name: str, **labels: str) -> float:
        """The value of a metric; the sum of those samples whose labels say what is asked for.

        Raises:
            KeyError: no sample has that name and those labels.
        """
        text = httpx2.get(self.url + "/metrics", headers=self.headers, timeout=30).text
        found = [
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        if not found:
            raise KeyError(name)
        return sum(found)

    def control(self, command: str, **arguments: Any) -> Any:
        """Tells the fault injector inside; see ``faulty.py`` for the commands.

        Raises:
            RuntimeError: the injector could not do it.
        """
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(30)
            line.connect(str(self._control))
            line.sendall(json.dumps({"command": command, **arguments}).encode() + b"\n")
            answer = json.loads(line.makefile().readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]

    # --- the process --------------------------------------------------------------------------------------------------

    def rss(self) -> int:
        """Resident memory in bytes."""
        status = self._proc("status").read_text()
        return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:")))

    def fds(self) -> int:
        """Open descriptors."""
        return sum(1 for _ in self._proc("fd").iterdir())

    def threads(self) -> int:
        """Threads."""
        return sum(1 for _ in self._proc("task").iterdir())

    def stop(self) -> int:
        """Ends it as an operator does; returns the exit code."""
        self.process.terminate()
        return self.wait(60)

    def kill(self) -> None:
        """Ends it at once, whatever it does."""
        self.process.kill()
        self.wait(30)

    def wait(self, seconds: float) -> int:
        """Waits for its end and its last line; returns the exit code."""
        self.reading.set()
        code = self.process.wait(seconds)
        self._reader.join(10)
        return code

    def close(self) -> None:
        """Kills it if it still runs, and leaves nothing behind."""
        self.kill()
        assert self.process.stdout
        self.process.stdout.close()
        self._folder.cleanup()

    def _proc(self, name: str) -> Path:
        return Path("/proc") / str(self.process.pid) / name

    def _address(self, message: str) -> str:
        end = time.monotonic() + PATIENCE
        while message not in self._known:
            try:
                self._known[message] = self._addresses[message].get(timeout=1)
            except queue.Empty:
                if self.process.poll() is not None or time.monotonic() > end:
                    raise AssertionError(f"no line says where it is {message}: {self.lines}") from None
        return self._known[message]

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append(line)
            with contextlib.suppress(ValueError, KeyError, TypeError):
                record = json.loads(line)
                self._addresses[record["message"]].put(record["address"])
            self.reading.wait()


@contextlib.contextmanager
def started(
    *flags: str, faulty: bool = False, model: Path | None = None, environment: dict[str, str] | None = None
) -> Iterator[Served]:
    """A server that has just been started; ``model`` is a version's folder in a store, the tiny model if not given.

    ``flags`` win over what is given here.
    """
    root, name, more = (tiny_store(), NAME, TINY) if model is None else (model.parents[1], model.parent.name, [])
    which = ["--model.id", name, "--checkpoints.root", str(root)]
    # A flag of a list given twice means both, so what is given here must go.
    ours = [*COMMON, *which, *more]
    kept = [word for pair in zip(ours[::2], ours[1::2], strict=True) if pair[0] not in flags for word in pair]
    server = Served([*kept, *flags], faulty=faulty, environment=environment)
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def served(
    *flags: str, faulty: bool = False, model: Path | None = None, environment: dict[str, str] | None = None
) -> Iterator[Served]:
    """A server that is ready; see ``started``."""
    with started(*flags, faulty=faulty, model=model, environment=environment) as server:
        server.wait_until_ready()
        yield server
