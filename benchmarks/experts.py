"""The routed product on the CPU against ``jax.lax.ragged_dot``, and against reading the chosen experts once.

    python -m benchmarks.experts [--quick] [--dtype bfloat16] [--json benchmarks/results/experts.json]

A row is a token at one of its experts: a token that takes eight makes eight. For each number of experts and of rows
the three take turns, each turn with other choices, so that a drifting machine moves all of them and no cache holds what
is read. It runs with the C library's huge pages, as `jaxserve serve` does. Prints a table of medians, what bounds a
case where it is not reading, and the verdict, which the exit status repeats.

Ours shall be 20 times as fast as `ragged_dot` and take 1.5 times as long as reading, at most. Two kinds of cases cannot
be held to both, and are named:

- Where reading alone, which gives no result, or the arithmetic alone, at the best rate of a dense product here, is less
  than 20 times as fast as `ragged_dot`, nobody can be: such a case is held to its 1.5 times of reading only.
- Where that arithmetic takes more than 1.5 times as long as reading, it is the bound: such a case is held to 1.5 times
  of it, and the share of the rate that it reaches is told.
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

from jaxserve.config import Config
from jaxserve.config.layers import tuned_environment
from jaxserve.models.experts import ExpertWeights, routed
from jaxserve.models.kernels import native
from jaxserve.models.layers import GLUS

WIDTH = 1024
# Experts to their inner width and to how many a token takes.
SIZES = {8: (2048, 2), 64: (512, 8), 128: (512, 8), 256: (512, 8)}
ROWS = (1, 8, 64, 512)
FASTER = 20.0  # than ragged_dot, at least
SLOWER = 1.5  # than reading, at most
DIFFERENCE = {"bfloat16": 0.05, "float32": 1e-4}  # over the largest number


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


def dense_rate(dtype: np.dtype[Any], quick: bool) -> float:
    """What a large dense product reaches here, by XLA or as a single expert, at its best of many, in GFLOP/s."""
    size = 128 if quick else 1024
    matrix = jnp.asarray(np.random.default_rng(0).standard_normal((size, size), np.float32), dtype)
    products = [jax.jit(lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32))]
    if native.usable(dtype):
        products.append(jax.jit(lambda a, b: native.grouped(a, b[None], jnp.asarray([size]))))
    for product in products:
        product(matrix, matrix).block_until_ready()
    return 2 * size**3 / min(timed(product, matrix, matrix) for _ in range(30) for product in products) / 1e6


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
        self.flops_each = 2 * (gate_up[0].size + down[0].size)  # of a row
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

    def line(self, rows: int, rounds: int, ragged_rounds: int, rate: float) -> dict[str, Any]:
        """One line of the table; ``rate`` is a dense product's."""
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
        arithmetic = rows * self.flops_each / rate / 1e6
        return {
            "dtype": str(self.dtype),
            "experts": self.experts,
            "rows": rows,
            "tokens": rows // min(rows, self.most),
            "touched": round(statistics.mean(touched), 1),
            "megabytes": round(statistics.mean(touched) * self.reader.bytes_each / 1e6, 1),
            **{f"{name}_ms": round(value, 3) for name, value in medians.items()},
            "faster": round(medians["ragged"] / medians["ours"], 1),
            "of_reading": round(statistics.median(reading), 2),
            "arithmetic_ms": round(arithmetic, 3),
            "of_dense_rate": round(arithmetic / medians["ours"], 2),
            "difference": difference,
        }


HEAD = (
    f"{'experts':>7} {'rows':>6} {'touched':>7} {'MB':>8} {'read ms':>9} {'ours ms':>9} {'ragged ms':>10}"
    f" {'faster':>8} {'of read':>8} {'of rate':>8}"
)


def row(line: dict[str, Any]) -> str:
    return (
        f"{line['experts']:>7} {line['rows']:>6} {line['touched']:>7} {line['megabytes']:>8} {line['read_ms']:>9}"
        f" {line['ours_ms']:>9} {line['ragged_ms']:>10} {line['faster']:>7}x {line['of_reading']:>7}x"
        f" {line['of_dense_rate']:>8.0%}"
    )


def same(line: dict[str, Any]) -> bool:
    return bool(line["difference"] < DIFFERENCE[line["dtype"]])


def verdict(lines: list[dict[str, Any]], quick: bool) -> tuple[list[str], list[str]]:
    """What is missed, and what other bounds there are; nothing of it counts at the size of a toy."""
    missed, bounds = [], []
    for line in lines:
        name = f"{line['dtype']}, {line['experts']} experts, {line['rows']} rows"
        if not same(line):
            missed.append(f"{name}: other numbers than ragged_dot's, by {line['difference']:.2g}")
        if quick:
            continue
        bound = max(line["read_ms"], line["arithmetic_ms"])
        reach = line["ragged_ms"] / bound
        if reach < FASTER:
            bounds.append(f"{name}: nobody is more than {reach:.1f}x as fast as ragged_dot, ours is {line['faster']}x")
        elif line["faster"] < FASTER:
            missed.append(f"{name}: {line['faster']}x as fast as ragged_dot")
        if line["arithmetic_ms"] > SLOWER * line["read_ms"]:
            share = f"{line['of_dense_rate']:.0%} of a dense product's rate"
            bounds.append(f"{name}: bound by arithmetic, {line['of_reading']}x the time of reading at {share}")
            if line["of_dense_rate"] < 1 / SLOWER:
                missed.append(f"{name}: {share}")
        elif line["of_reading"] > SLOWER:
            missed.append(f"{name}: {line['of_reading']}x the time of reading")
    return missed, bounds


def about(dtypes: tuple[str, ...], rates: dict[str, float], rounds: int) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "multiplied_by": {dtype: native.describe(dtype) for dtype in dtypes},
        "dense_gflops": {dtype: round(rate) for dtype, rate in rates.items()},
        "width": WIDTH,
        "inner": {count: inner for count, (inner, _) in SIZES.items()},
        "rounds": rounds,
        "load": round(os.getloadavg()[0], 1),
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="toy sizes: does it run?")
    parser.add_argument("--dtype", choices=tuple(DIFFERENCE), help="by default both, one after the other")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ragged-rounds", type=int, default=3, help="it is slow")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    tuned = tuned_environment(Config())
    if tuned is not None:
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.experts", *argv], tuned)
    dtypes = tuple(DIFFERENCE) if args.dtype is None else (args.dtype,)
    lines, rates = [], {}
    for dtype in dtypes:
        rate = rates[dtype] = dense_rate(jnp.dtype(dtype), args.quick)
        print(f"{dtype}: {native.describe(dtype)}; a dense product makes {rate:.0f} GFLOP/s\n{HEAD}", flush=True)
        for count in SIZES:
            contest = Contest(count, jnp.dtype(dtype), args.quick)
            for rows in ROWS[:2] if args.quick else ROWS:
                lines.append(contest.line(rows, args.rounds, args.ragged_rounds, rate))
                print(row(lines[-1]), flush=True)
    missed, bounds = verdict(lines, args.quick)
    if args.json:
        found = {"about": about(dtypes, rates, args.rounds), "lines": lines, "bounds": bounds, "missed": missed}
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    held = "it runs" if args.quick else f"at least {FASTER:.0f}x as fast as ragged_dot, within {SLOWER}x of reading"
    print("\n".join([*bounds, *missed] if missed else [*bounds, held]))
    return len(missed) > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
