"""A server in a process of its own, as an operator starts it; always stopped."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import jax

COMMAND = [sys.executable, "-c", "from jaxserve.cli import main; main()", "serve"]
PATIENCE = 240.0


class Served:
    """A started server: its address, its log lines, its process."""

    def __init__(self, flags: list[str]) -> None:
        self.process = subprocess.Popen([*COMMAND, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines: list[str] = []
        self._found: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def url(self) -> str:
        """Where it listens; known as soon as it does."""
        if not hasattr(self, "_url"):
            self._url = self._found.get(timeout=60)
        return self._url

    def wait_until_ready(self) -> list[dict[str, Any]]:
        """What ``/readyz`` said on the way, the last one with status 200."""
        said, end = [], time.monotonic() + PATIENCE
        while time.monotonic() < end:
            answer = httpx2.get(self.url + "/readyz")
            said.append(answer.json() | {"code": answer.status_code})
            if answer.status_code == 200:
                return said
            assert self.process.poll() is None, self.lines
            time.sleep(0.02)
        raise AssertionError(f"not ready in time: {said[-1]}")

    def stop(self) -> int:
        """Ends it as an operator does; returns the exit code."""
        self.process.terminate()
        return self.wait(30)

    def wait(self, seconds: float) -> int:
        """Waits for its end and its last line; returns the exit code."""
        code = self.process.wait(seconds)
        self._reader.join(10)
        return code

    def close(self) -> None:
        """Ends it at once, whatever it does."""
        self.process.kill()
        self.wait(30)
        assert self.process.stdout
        self.process.stdout.close()

    def metric(self, name: str) -> float:
        """The value of a metric without labels."""
        text = httpx2.get(self.url + "/metrics").text
        return float(next(line.split()[1] for line in text.splitlines() if line.startswith(name + " ")))

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append(line)
            with contextlib.suppress(ValueError, KeyError, TypeError):
                self._found.put(json.loads(line)["address"])


@contextlib.contextmanager
def served(root: Path, name: str, *flags: str) -> Iterator[Served]:
    """Serves a model of a store on a free port."""
    cache = Path(jax.config.jax_compilation_cache_dir).parent / "programs"
    common = ["--model.id", name, "--checkpoints.root", str(root), "--server.port", "0", "--log.format", "json"]
    quick = ["--server.lame-duck-s", "0.2", "--server.drain-s", "5", "--engine.compilation-cache", str(cache)]
    server = Served([*common, *quick, *flags])
    try:
        yield server
    finally:
        server.close()
