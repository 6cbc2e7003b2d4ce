"""The routed product on the CPU against ``jax.lax.ragged_dot``, and against reading the chosen experts once.

    python -m benchmarks.experts [--quick] [--dtype bfloat16] [--json benchmarks/results/experts.json]

A row is a token at one of its experts: a token that takes eight makes eight. For each number of experts and of rows
the three take turns, each turn with other choices, so that a drifting machine
moves all of them and no cache holds what is read. Prints a table of medians; its last line is the verdict and its
exit status says the same.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import operator
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.experts import ExpertWeights, routed
from jaxserve.models.layers import GLUS

WIDTH = 1024
# Experts to their inner width and to how many a token takes.
SIZES = {8: (2048, 2), 64: (512, 8), 128: (512, 8), 256: (512, 8)}
ROWS = (1, 8, 64, 512)
FASTER = 20.0  # than ragged_dot, at least
SLOWER = 1.5  # than reading, at most


@functools.partial(jax.jit, static_argnames="activation")
def ours(x: jax.Array, chosen: jax.Array, shares: jax.Array, experts: ExpertWeights, activation: str) -> jax.Array:
    return routed(x, chosen, shares, experts, GLUS[activation])


@functools.partial(jax.jit, static_argnames="activation")
def ragged(
    x: jax.Array, chosen: jax.Array, shares: jax.Array, kernels: tuple[jax.Array, jax.Array], activation: str
) -> jax.Array:
    """As one would write it: sort, two ragged products with kernels ``[e, in, out]``, sum."""
    gate_up, down = kernels
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    sizes = jnp.bincount(chosen.reshape(-1), length=len(down))
    token = order // chosen.shape[1]
    gate, up = jnp.split(jax.lax.ragged_dot(x[token], gate_up, sizes), 2, axis=-1)
    y = jax.lax.ragged_dot(GLUS[activation](gate, up), down, sizes)
    return jnp.zeros_like(x).at[token].add(y * shares.reshape(-1)[order, None].astype(x.dtype))


class Reader:
    """Reads the kernels of some experts once, with two threads: nothing on this machine is faster."""

    def __init__(self, *kernels: jax.Array) -> None:
        # The same memory, as whole words, of which any order gives the same.
        self._words = [np.asarray(kernel).reshape(len(kernel), -1).view(np.int64) for kernel in kernels]
        self.bytes_each = sum(words[0].nbytes for words in self._words)
        self._threads = os.cpu_count() or 1
        self._pool = ThreadPoolExecutor(self._threads)

    def read(self, experts: np.ndarray) -> int:
        """All words' exclusive or, so that none can be left out."""
        shares = self._pool.map(functools.partial(self._share, experts), range(self._threads))
        return functools.reduce(operator.xor, shares)

    def _share(self, experts: np.ndarray, part: int) -> int:
        found = 0
        for words in self._words:
            for expert in experts:
                found ^= int(np.bitwise_xor.reduce(np.array_split(words[expert], self._threads)[part]))
        return found


def weights(experts: int, dtype: np.dtype[Any], quick: bool) -> tuple[jax.Array, jax.Array]:
    inner = SIZES[experts][0] // (16 if quick else 1)
    width = WIDTH // (8 if quick else 1)
    draw = np.random.default_rng(0)

    def kernel(*shape: int) -> jax.Array:
        """Drawn once and repeated: a gigabyte of random numbers takes longer than everything else."""
        one = draw.standard_normal(shape, np.float32).astype(dtype) / 32
        return jnp.asarray(np.tile(one, (experts, *(1 for _ in shape))))

    return kernel(2, inner, width), kernel(width, inner)


def timed(call: Callable[..., Any], *given: Any, **settings: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call(*given, **settings))
    return 1000 * (time.perf_counter() - start)


class Contest:
    """One number of experts: their kernels, in both layouts, and who computes with them."""

    def __init__(self, experts: int, dtype: np.dtype[Any], quick: bool) -> None:
        gate_up, down = weights(experts, dtype, quick)
        self.experts, self.most, self.dtype = experts, SIZES[experts][1], dtype
        self.width = down.shape[1]
        self.held = ExpertWeights(gate_up, down)
        rows = gate_up.reshape(experts, -1, self.width)
        self.across = (rows.swapaxes(1, 2), down.swapaxes(1, 2))
        self.reader = Reader(gate_up, down)

    def given(self, rows: int, seed: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Tokens, the experts of each, and their shares."""
        draw, chosen = np.random.default_rng(seed), min(rows, self.most)
        tokens = rows // chosen
        picks = np.argsort(draw.random((tokens, self.experts)), axis=1)[:, :chosen].astype(np.int32)
        x = jnp.asarray(draw.standard_normal((tokens, self.width), np.float32).astype(self.dtype))
        return x, jnp.asarray(picks), jnp.asarray(draw.random(picks.shape, np.float32))

    def difference(self, rows: int) -> float:
        """Of the two products, over the largest number; it also compiles them."""
        given = self.given(rows, 0)
        one = np.asarray(ours(*given, self.held, activation="silu"), np.float32)
        other = np.asarray(ragged(*given, self.across, activation="silu"), np.float32)
        return float(np.abs(one - other).max() / np.abs(other).max())

    def line(self, rows: int, rounds: int, ragged_rounds: int) -> dict[str, Any]:
        """One line of the table."""
        difference, touched = self.difference(rows), []
        times: dict[str, list[float]] = {"read": [], "ours": [], "ragged": []}
        for turn in range(rounds):
            given = self.given(rows, 1 + turn)
            experts = np.unique(np.asarray(given[1]))
            touched.append(len(experts))
            times["read"].append(timed(self.reader.read, experts))
            times["ours"].append(timed(ours, *given, self.held, activation="silu"))
            if turn < ragged_rounds:
                times["ragged"].append(timed(ragged, *given, self.across, activation="silu"))
        reading = [own / read for own, read in zip(times["ours"], times["read"], strict=True)]
        medians = {name: statistics.median(values) for name, values in times.items()}
        return {
            "experts": self.experts,
            "rows": rows,
            "tokens": rows // min(rows, self.most),
            "touched": round(statistics.mean(touched), 1),
            "megabytes": round(statistics.mean(touched) * self.reader.bytes_each / 1e6, 1),
            **{f"{name}_ms": round(value, 3) for name, value in medians.items()},
            "faster": round(medians["ragged"] / medians["ours"], 1),
            "of_reading": round(statistics.median(reading), 2),
            "difference": difference,
        }


def row(line: dict[str, Any]) -> str:
    return (
        f"{line['experts']:>7} {line['rows']:>6} {line['touched']:>7} {line['megabytes']:>8} {line['read_ms']:>9}"
        f" {line['ours_ms']:>9} {line['ragged_ms']:>10} {line['faster']:>7}x {line['of_reading']:>6}x"
    )


def verdict(lines: list[dict[str, Any]], quick: bool) -> list[str]:
    """What is missed; nothing of it counts at the size of a toy."""
    missed = [f"{line['experts']} experts, {line['rows']} rows: other numbers" for line in lines if not same(line)]
    for line in lines if not quick else ():
        name = f"{line['experts']} experts, {line['rows']} rows"
        if line["faster"] < FASTER:
            missed.append(f"{name}: {line['faster']}x as fast as ragged_dot")
        if line["of_reading"] > SLOWER:
            missed.append(f"{name}: {line['of_reading']}x the time of reading")
    return missed


def same(line: dict[str, Any]) -> bool:
    return bool(line["difference"] < 0.05)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="toy sizes: does it run?")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ragged-rounds", type=int, default=3, help="it is slow")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    print(f"{'experts':>7} {'rows':>6} {'touched':>7} {'MB':>8} {'read ms':>9} {'ours ms':>9} {'ragged ms':>10}")
    lines = []
    for count in SIZES:
        contest = Contest(count, jnp.dtype(args.dtype), args.quick)
        for rows in ROWS[:2] if args.quick else ROWS:
            lines.append(contest.line(rows, args.rounds, args.ragged_rounds))
            print(row(lines[-1]), flush=True)
    missed = verdict(lines, args.quick)
    if args.json:
        about = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "jax": jax.__version__,
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "dtype": args.dtype,
            "width": WIDTH,
            "inner": {count: inner for count, (inner, _) in SIZES.items()},
            "rounds": args.rounds,
        }
        args.json.write_text(json.dumps({"about": about, "lines": lines, "missed": missed}, indent=1) + "\n")
    held = "it runs" if args.quick else f"at least {FASTER:.0f}x as fast as ragged_dot, within {SLOWER}x of reading"
    print("\n".join(missed) or held)
    return len(missed) > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
