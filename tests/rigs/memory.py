"""What converting and restoring a large checkpoint takes of memory: the largest tensor twice, beside what stays.

    python -m tests.rigs.memory

Makes a checkpoint of 2 GB in eight files, converts it, and restores it on one device and on eight, each in a process of
its own. Anonymous memory is watched from the moment before: files that are mapped, and what the kernel keeps of them,
can be taken back at any time and are not counted. On a CPU the arrays themselves are memory: they are what stays.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh

from jaxserve.checkpoint import manifest, silent
from jaxserve.checkpoint.convert import _convert_in_cage
from jaxserve.checkpoint.manifest import LeafEntry, Manifest, Source
from jaxserve.checkpoint.restore import restore
from jaxserve.models.family import family_of
from jaxserve.models.weights import abstract
from jaxserve.sharding import make_mesh
from tests.rigs import verdict
from tests.rigs.tiny import ROOT, TOKENIZER

FILES = 8
MIB = 1 << 20
SLACK = 32 * MIB  # stacks and arenas of threads, which do not grow with the checkpoint
PLACES = {"restore on 1": (1, 1), "restore on 8 (4x2)": (4, 2), "restore on 8 (1x8)": (1, 8)}
FULL = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 21, "vocab_size": 32_000}
QUICK = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6, "vocab_size": 16_000}

WARM = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "vocab_size": 400}


def config_of(size: dict[str, int]) -> dict[str, Any]:
    """A model of Llama's shape."""
    heads = {"num_attention_heads": size["hidden_size"] // 64, "num_key_value_heads": 2, "head_dim": 64}
    rest = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    return {"model_type": "llama", "rope_theta": 10_000.0, **size, **heads, **rest}


def write_source(folder: Path, config: dict[str, Any]) -> int:
    """A Hugging Face folder in bfloat16, in several files; returns its bytes."""
    folder.mkdir(parents=True)
    noise = np.random.default_rng(0).standard_normal(1 << 20, np.float32).astype(ml_dtypes.bfloat16).tobytes()
    pieces = [piece for rule in family_of(config).rules for piece in rule.ways[0]]
    index: dict[str, str] = {}
    total = 0
    for number in range(FILES):
        name = f"model-{number + 1:05d}-of-{FILES:05d}.safetensors"
        header, at = {}, 0
        for piece in pieces[number::FILES]:
            size = 2 * math.prod(piece.shape)
            header[piece.source] = {"dtype": "BF16", "shape": piece.shape, "data_offsets": [at, at + size]}
            index[piece.source] = name
            at += size
        text = json.dumps(header).encode()
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for piece in pieces[number::FILES]:
                left = 2 * math.prod(piece.shape)
                while left:
                    left -= file.write(noise[:left])
        total += at
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / name, folder / name)
    return total


def anonymous() -> int:
    """Bytes of this process that are in memory and in no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) << 10


def watched(work: Callable[[], Any]) -> tuple[Any, int]:
    """What ``work`` returns, and by how much its peak exceeds what was there before."""
    before = peak = anonymous()
    done = False

    def watch() -> None:
        nonlocal peak
        while not done:
            peak = max(peak, anonymous())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = work()
    finally:
        done = True
        watcher.join()
    return result, max(peak, anonymous()) - before


def convert_into(source: Path, target: Path) -> None:
    """The conversion itself, as the child does it, with a manifest that is enough to restore from."""
    for name in ("content", "scratch"):
        (target / name).mkdir(parents=True)
    content, scratch = (str(target / name) for name in ("content", "scratch"))
    request = {"path": str(source), "dtype": "auto", "content": content, "scratch": scratch}
    answer = _convert_in_cage(request, silent)
    shutil.rmtree(scratch)
    entry = Manifest(
        schema=manifest.SCHEMA,
        model="large",
        engine="0",
        config_sha256="",
        dtype="auto",
        licence=None,
        source=Source("folder", "source", None, ()),
        tokenizer=(),
        chat_template=None,
        generation_config=None,
        goldens=None,
        tree=tuple(LeafEntry(**leaf) for leaf in answer["tree"]),
        files=(),
    )
    manifest.write(target / "content", entry)


def restore_from(source: Path, version: Path, mesh: Mesh) -> Any:
    """The parameters of what was converted."""
    rules = family_of(json.loads((source / "config.json").read_text())).rules
    return restore(version / "content", abstract(rules, "bfloat16", mesh))


def run_convert(root: Path) -> dict[str, int]:
    """Converts; nothing stays. A small one first: imports and pools of threads are not what is measured."""
    write_source(root / "warm", config_of(WARM))
    convert_into(root / "warm", root / "warmed")
    _, peak = watched(lambda: convert_into(root / "source", root / "version"))
    return {"peak": peak, "stays": 0}


def run_restore(root: Path, expert: int, tensor: int) -> dict[str, int]:
    """Restores; the arrays stay."""
    mesh = make_mesh(expert, tensor)
    restore_from(root / "warm", root / "warmed", mesh)
    params, peak = watched(lambda: restore_from(root / "source", root / "version", mesh))
    shards = [shard for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards]
    return {"peak": peak, "stays": sum(shard.data.nbytes for shard in shards)}


def phase(root: Path, name: str) -> dict[str, int]:
    """Runs a phase in a process of its own."""
    command = [sys.executable, "-m", "tests.rigs.memory", "--root", str(root), "--phase", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(root: Path, size: dict[str, int]) -> dict[str, dict[str, int]]:
    """Every phase's peak, what stays of it, what is allowed beside that, and how much of that was taken."""
    config = config_of(size)
    total = write_source(root / "source", config)
    largest = 2 * max(math.prod(rule.shape) for rule in family_of(config).rules)
    found = {}
    for name in ("convert", *PLACES):
        began = time.monotonic()
        one = phase(root, name)
        beside = one["peak"] - one["stays"]
        found[name] = one | {
            "beside": beside,
            "allowed": 2 * largest + SLACK,
            "ms": int(1e3 * (time.monotonic() - began)),
        }
        print(
            f"{name}: {beside / MIB:.0f} MiB beside {one['stays'] / MIB:.0f} that stay, of {total / MIB:.0f}; "
            f"allowed are {(2 * largest + SLACK) / MIB:.0f}",
            flush=True,
        )
    return found


def main() -> None:
    """Runs the rig, or one of its phases."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--phase")
    inner, rest = parser.parse_known_args()
    if inner.phase is not None:
        jax.config.update("jax_platforms", "cpu")
        places = PLACES.get(inner.phase, (1, 1))
        jax.config.update("jax_num_cpu_devices", math.prod(places))
        print(json.dumps(run_convert(inner.root) if inner.phase == "convert" else run_restore(inner.root, *places)))
        return
    sys.argv[1:] = rest
    flags = verdict.arguments(__doc__)
    (ROOT / ".cache").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / ".cache") as folder:
        found = measure(Path(folder), QUICK if flags.quick else FULL)
    wrong = {name: one for name, one in found.items() if one["beside"] > one["allowed"]}
    worst = max(one["beside"] for one in found.values())
    allowed = next(iter(found.values()))["allowed"]
    stays = max(one["stays"] for one in found.values())
    figure = f"{stays / MIB:.0f} MiB: {worst / MIB:.0f} MiB beside what stays, {allowed / MIB:.0f} are allowed"
    verdict.report("memory", figure=figure, held=not wrong, details=found, save=flags.save)


if __name__ == "__main__":
    main()
