"""Damaged input for every parser: none may crash, take 256 MB or take two seconds.

Ten minutes for each that reads what comes from strangers (GGUF, safetensors, manifest, request), a quarter of it for
each of the others; as many at a time as there are cores.

A crash is any exception but the house's own. atheris (libFuzzer) looks for inputs that reach new lines; where it isn't
installed, or for a first look, damage from a seed has to do. What crashed once is kept below ``corpus/crashes/``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SECONDS, QUICK_INPUTS = 600, 150
MOST_SECONDS, MOST_BYTES = 2.0, 256 << 20
LONGEST_INPUT = 32_768
_NAME = "tests.rigs.fuzz_parsers"


class Crash(Exception):
    """An input did what none may do."""


def attempt(read: Callable[[bytes], object], refusal: type[Exception], data: bytes) -> bool:
    """Tries one input; true if it was taken, false if it was refused.

    Raises:
        Crash: anything else, or it took too much processor time or memory.
    """
    begin, before = time.process_time(), _peak()
    try:
        read(data)
    except refusal:
        taken = False
    except BaseException as error:  # a panic of Rust is no Exception
        raise Crash(f"{type(error).__name__}: {str(error)[:300]}") from error
    else:
        taken = True
    seconds, grown = time.process_time() - begin, _peak() - before
    if seconds > MOST_SECONDS:
        raise Crash(f"took {seconds:.1f} s of processor time")
    if grown > MOST_BYTES:
        raise Crash(f"took {grown >> 20} MB")
    return taken


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def damaged(seed: int, seeds: list[bytes], *, tree: bool) -> Iterator[bytes]:
    """The seeds themselves, then damaged ones without end."""
    from tests.rigs.mutate import mutate_bytes

    yield from seeds
    draw = random.Random(seed)
    while True:
        data = draw.choice(seeds)
        if tree and draw.random() < 0.7:
            yield tree_damage(draw, data)
        else:
            yield mutate_bytes(draw, data, seeds)


def tree_damage(draw: random.Random, data: bytes) -> bytes:
    """JSON with a node changed; anything else with a byte changed."""
    from tests.rigs.mutate import mutate_bytes, mutate_tree

    try:
        return mutate_tree(draw, json.loads(data))
    except (ValueError, RecursionError):
        return mutate_bytes(draw, data)


# --- one target, in a process of its own ------------------------------------------------------------------------------


def fuzz_one(name: str, seconds: int, seed: int, folder: Path) -> None:
    """Runs atheris on one target until the time is up or something crashes; never returns.

    What crashed lies in ``folder`` then.
    """
    import atheris

    with atheris.instrument_imports(include=["jaxserve"]):
        from tests.rigs import parsers
    parsers.live_in(folder / "files")
    target = parsers.TARGETS[name]
    corpus = folder / "corpus"
    corpus.mkdir()
    for number, data in enumerate(target.seeds()):
        (corpus / str(number)).write_bytes(data)
    _limit_memory()

    def one_input(data: bytes) -> None:
        attempt(target.read, target.refusal, data)

    def mutate(data: bytes, most: int, draw: int) -> bytes:
        chance = random.Random(draw)
        if chance.random() < 0.5:
            return bytes(atheris.Mutate(data, most))
        return tree_damage(chance, data)[:most]

    flags = [f"-max_total_time={seconds}", f"-seed={seed}", f"-max_len={LONGEST_INPUT}", "-timeout=30"]
    flags += ["-rss_limit_mb=4096", f"-artifact_prefix={folder}/", "-print_final_stats=1"]
    more: dict[str, Any] = {"custom_mutator": mutate} if target.tree else {}
    atheris.Setup([_NAME, str(corpus), *flags], one_input, **more)
    atheris.Fuzz()


def _limit_memory() -> None:
    """A bomb is to be a MemoryError here, not the machine's end."""
    status = Path("/proc/self/status").read_text()
    used = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData"))
    most = used + (2 << 30)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def replay(name: str, path: Path) -> None:
    """One input, plain and alone."""
    from tests.rigs import parsers

    target = parsers.TARGETS[name]
    for data in target.seeds()[:1]:  # what is loaded once is not the input's
        attempt(target.read, target.refusal, data)
    _limit_memory()
    try:
        attempt(target.read, target.refusal, path.read_bytes())
    finally:
        parsers.leave()


# --- all of them ------------------------------------------------------------------------------------------------------


def run_target(name: str, seconds: int, seed: int) -> dict[str, Any]:
    """How many inputs one target took in its time, and what crashed it."""
    from tests.rigs import parsers

    crashes: list[str] = []
    inputs = covered = 0
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) >= 1 and len(crashes) < 5:
        with tempfile.TemporaryDirectory(prefix="rig-fuzz-", dir=parsers.MEMORY) as scratch:
            command = [sys.executable, "-m", _NAME, "--target", name, "--seconds", str(int(left)), "--seed", str(seed)]
            done = subprocess.run(
                [*command, "--folder", scratch], capture_output=True, text=True, errors="replace", check=False
            )
            inputs += _statistic(r"stat::number_of_executed_units: (\d+)", done.stderr)
            covered = max(covered, _statistic(r"cov: (\d+)", done.stderr))
            found = [path for path in Path(scratch).iterdir() if path.is_file()]
            for path in found:
                if reason := confirmed(name, path):
                    crashes.append(f"{reason} (kept as {keep(name, path)})")
            if not found and done.returncode:
                crashes.append(f"the fuzzer ended with {done.returncode}: {done.stderr[-500:]}")
        seed += 1
    return {"inputs": inputs, "covered": covered, "crashes": crashes}


def _statistic(pattern: str, text: str) -> int:
    found = re.findall(pattern, text)
    return int(found[-1]) if found else 0


def confirmed(name: str, path: Path) -> str:
    """Why an input is a crash, tried plainly and alone; empty if it is none: an instrumented parser is a slow one."""
    command = [sys.executable, "-m", _NAME, "--target", name, "--replay", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return "hangs"
    return done.stderr.strip().rsplit("\n", 1)[-1][:300] if done.returncode else ""


def keep(name: str, path: Path) -> Path:
    """Copies an input to where it is tried again each time."""
    kept = Path(__file__).parent / "corpus" / "crashes" / name / path.name
    kept.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, kept)
    return kept.relative_to(Path(__file__).parent)


def quick(name: str, inputs: int, seed: int) -> dict[str, Any]:
    """Damage from a seed, in this process."""
    from tests.rigs import parsers

    target, crashes = parsers.TARGETS[name], []
    for _, data in zip(range(inputs), damaged(seed, target.seeds(), tree=target.tree), strict=False):
        try:
            attempt(target.read, target.refusal, data)
        except Crash as crash:
            crashes.append(str(crash))
    return {"inputs": inputs, "crashes": crashes}


def _saved() -> dict[str, dict[str, Any]]:
    path = Path(__file__).parent / "results" / "fuzz_parsers.json"
    targets: dict[str, dict[str, Any]] = json.loads(path.read_text())["details"]["targets"] if path.exists() else {}
    return targets


def main() -> None:
    """Runs every target, one after the other, and says what crashed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few inputs, without atheris")
    parser.add_argument("--save", action="store_true", help="keep the result in tests/rigs/results/")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="for each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", help="only this one; with --save it replaces its own part of the result")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--replay", type=Path, help="try one input, plain and alone")
    args = parser.parse_args()
    if args.replay:
        replay(args.target, args.replay)
    elif args.folder:
        os.environ["JAX_PLATFORMS"] = "cpu"
        fuzz_one(args.target, args.seconds, args.seed, args.folder)
    else:
        _run_all(args)


def _run_all(args: argparse.Namespace) -> None:
    from tests.rigs import parsers, verdict

    def one(name: str) -> tuple[str, dict[str, Any]]:
        if args.quick:
            return name, quick(name, QUICK_INPUTS, args.seed)
        seconds = int(args.seconds * parsers.TARGETS[name].share)
        return name, {"seconds": seconds} | run_target(name, seconds, args.seed)

    results: dict[str, dict[str, Any]] = {}
    if args.quick:
        _limit_memory()
    names = [args.target] if args.target else sorted(parsers.TARGETS, key=lambda name: -parsers.TARGETS[name].share)
    with ThreadPoolExecutor(1 if args.quick else os.cpu_count()) as jobs:
        for name, result in jobs.map(one, names):
            results[name] = result
            print(f"{name}: {result}", flush=True)
    parsers.leave()
    if args.target and args.save:  # the others' results stay as they were kept
        results = {name: saved for name, saved in _saved().items() if name in parsers.TARGETS} | results
    kept = {str(path): reason for name, path in parsers.found_before() if (reason := confirmed(name, path))}
    crashes = sum(len(result["crashes"]) for result in results.values()) + len(kept)
    inputs = sum(result["inputs"] for result in results.values())
    how = f"{QUICK_INPUTS} inputs each" if args.quick else f"up to {args.seconds} s each"
    verdict.report(
        "fuzz_parsers",
        figure=f"{len(results)} parsers, {how}: {inputs:,} inputs, {crashes} crashes",
        held=crashes == 0,
        details={"seed": args.seed, "targets": results, "crash_again": kept},
        save=args.save,
    )


if __name__ == "__main__":
    main()
