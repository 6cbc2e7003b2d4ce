"""Two hundred damaged checkpoints are refused before a weight is restored, by name; and so is every other bad start.

A bit flipped, an end cut off or a file removed, in each file of a version, drawn from a seed. A few of them are also
started as an operator starts a server. With the verification left out, a flipped bit has to get through. Then every
start of ``bad_starts.py``: exit code, one sentence, soon, and nothing left behind.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tests.rigs import bad_starts, verdict
from tests.rigs.served import started
from tests.rigs.tiny import NAME, ROOT, tiny_store

TRIALS, QUICK = 200, 60
STARTED = 6  # of the trials, also in a process


@dataclasses.dataclass(frozen=True, slots=True)
class Damage:
    """One file, and what happens to it."""

    path: str
    kind: str
    seed: int

    def apply(self, file: Path) -> None:
        """Does it; every kind changes the file."""
        data = bytearray(file.read_bytes())
        draw = random.Random(f"{self.seed} {self.path}")
        file.chmod(0o644)
        if self.kind == "delete":
            file.unlink()
        elif self.kind == "truncate":
            file.write_bytes(data[: draw.randrange(len(data))])
        elif self.kind == "grow":
            file.write_bytes(data + b"\0")
        else:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            file.write_bytes(data)


def damages(folder: Path, count: int, seed: int) -> Iterator[Damage]:
    """Every file in every way, as far as ``count`` goes, then any file in any way."""
    draw = random.Random(seed)
    files = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    sizes = {name: (folder / name).stat().st_size for name in files}
    all_of_them = [(name, kind) for kind in ("flip", "truncate", "delete") for name in files]
    draw.shuffle(all_of_them)
    for number in range(count):
        name, kind = all_of_them[number] if number < len(all_of_them) else draw.choice(all_of_them)
        if sizes[name] == 0 and kind != "delete":
            kind = "grow"  # there is no bit to flip
        yield Damage(name, kind, number)


class Copy:
    """A store of one's own, with one version of the tiny model in it."""

    def __init__(self, root: Path) -> None:
        shutil.copytree(tiny_store(), root / "store")
        self.root = root / "store"
        (self.version,) = [path.parent for path in self.root.glob("*/*/manifest.json")]

    def with_damage(self, damage: Damage, look: Callable[[], Any]) -> Any:
        """What ``look`` sees of the damaged store, which is whole again afterwards."""
        file = self.version / damage.path
        before, mode = file.read_bytes(), file.stat().st_mode
        damage.apply(file)
        try:
            return look()
        finally:
            if file.exists():
                file.chmod(0o644)
            file.write_bytes(before)
            file.chmod(mode)


def load(root: Path) -> tuple[str, set[str]]:
    """Loads the model as serving does: why it was refused (empty if it was not), and what phases were reached."""
    from jaxserve.config import CheckpointsConfig, Config, EngineConfig, ModelConfig, Pool
    from jaxserve.errors import CheckpointError
    from jaxserve.launch.loading import load_model

    reached: set[str] = set()
    config = Config(
        model=ModelConfig(id=NAME, dtype="float32"),
        checkpoints=CheckpointsConfig(root=root),
        engine=EngineConfig(pools=(Pool(2, 64),), compilation_cache=ROOT / ".cache" / "programs"),
    )
    try:
        load_model(config, lambda phase, done, total: reached.add(phase))
    except CheckpointError as error:
        return error.message, reached
    return "", reached


def fault(damage: Damage, refusal: str, reached: set[str]) -> str:
    """What is wrong with how a damaged checkpoint was met; empty if nothing is."""
    if not refusal:
        return "served"
    if not refusal.partition(damage.path)[1]:
        return f"the file is not named: {refusal}"
    if reached - {"verifying"}:
        return f"refused only after {sorted(reached)}"
    return "" if refusal.count("\n") == 0 and "Traceback" not in refusal else "more than a sentence"


def start(root: Path, damage: Damage) -> str:
    """The same with a real server: what is wrong, or nothing."""
    with started("--checkpoints.root", str(root)) as server:
        code = server.wait(120)
        wrong = fault(damage, server.lines[-1].rstrip("\n"), set())
        if code != 78:
            return f"exit code {code}"
        if server.records("ready") or any("Traceback" in line for line in server.lines):
            return "ready, or a traceback"
        return wrong


def unverified(copy: Copy, seed: int) -> int:
    """How many of a few flips in the weights are served when nobody verifies: the control."""
    from jaxserve.checkpoint import manifest

    chunks = [path for path in sorted(copy.version.rglob("c/0*")) if path.is_file()]
    chunks += [path for path in sorted(copy.version.rglob("c/*/*")) if path.is_file()]
    largest = max(chunks, key=lambda path: path.stat().st_size).relative_to(copy.version).as_posix()
    served = 0
    with mock.patch.object(manifest, "verify", lambda folder, progress: manifest.read(folder)):
        for number in range(4):
            refusal, _ = copy.with_damage(Damage(largest, "flip", seed + number), lambda: load(copy.root))
            served += not refusal
    return served


def run_starts(names: list[str]) -> tuple[list[dict[str, str]], float]:
    """What is wrong with how bad starts end, and how long the slowest took."""
    wrong: list[dict[str, str]] = []
    slowest = 0.0
    for name in names:
        start, said, seconds = bad_starts.STARTS[name], "", 0.0
        for _ in range(2):  # once more if it was slow: it may have been the machine
            with tempfile.TemporaryDirectory(prefix="rig-start-") as scratch:
                end = bad_starts.run(start, Path(scratch))
            said, seconds = end.fault(start), end.seconds
            if seconds <= bad_starts.SOON:
                break
        slowest = max(slowest, seconds)
        said = said or (f"took {seconds:.1f} s" if seconds > bad_starts.SOON else "")
        if said:
            wrong.append({"start": name, "fault": said})
            print(wrong[-1], flush=True)
    return wrong, slowest


def main() -> None:
    """Runs, and says what was seen."""
    args = verdict.arguments(__doc__, seed={"type": int, "default": 1}, trials={"type": int, "default": TRIALS})
    trials = QUICK if args.quick else args.trials
    wrong: list[dict[str, str]] = []
    kinds: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="rig-corrupt-") as scratch:
        copy = Copy(Path(scratch))
        for number, damage in enumerate(damages(copy.version, trials, args.seed)):
            kinds[damage.kind] = kinds.get(damage.kind, 0) + 1
            said = fault(damage, *copy.with_damage(damage, lambda: load(copy.root)))
            if not said and not args.quick and number < STARTED:
                said = copy.with_damage(damage, lambda damage=damage: start(copy.root, damage))
            if said:
                wrong.append({"file": damage.path, "kind": damage.kind, "seed": str(damage.seed), "fault": said})
                print(wrong[-1], flush=True)
        whole = load(copy.root)[0]
        served = unverified(copy, args.seed)
    names = list(bad_starts.STARTS)[:: 8 if args.quick else 1]
    bad, slowest = run_starts(names)
    verdict.report(
        "corrupt",
        figure=f"{trials - len(wrong)} of {trials} damaged checkpoints refused by the name of the file (unverified,"
        f" {served} of 4 flipped bits are served); {len(names) - len(bad)} of {len(names)} bad starts end in a sentence"
        f" within {slowest:.1f} s",
        held=not wrong and not whole and served > 0 and not bad,
        details={"seed": args.seed, "kinds": kinds, "wrong": wrong, "undamaged": whole or "served"}
        | {"starts": names, "wrong_starts": bad, "slowest_start": slowest},
        save=args.save,
    )


if __name__ == "__main__":
    main()
