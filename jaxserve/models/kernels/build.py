"""Builds the products of ``cpu.cc`` into a library beside it: ``python -m jaxserve.models.kernels.build``.

Knows the compiler and where the library lies. It is never run while serving: ``make setup`` runs it, and whoever
installed the package otherwise and wants those products. Without them everything works, by XLA's own.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import jax

SOURCE = Path(__file__).with_name("cpu.cc")
COMMAND = "python -m jaxserve.models.kernels.build"
COMPILERS = ("c++", "g++", "clang++")
# What is behind them runs only where the processor has it: see `native`.
INSTRUCTIONS = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512bf16", "amx-tile", "amx-bf16", "fma")
FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC", "-march=x86-64", *(f"-m{name}" for name in INSTRUCTIONS))
SECONDS = 300


class BuildError(Exception):
    """Why there is no library, in a sentence."""


@functools.cache
def library() -> Path:
    """Where the library lies, built or not.

    Its name holds what it depends on: source, flags, and the jaxlib whose headers it is compiled with.
    """
    parts = (SOURCE.read_bytes(), " ".join(FLAGS).encode(), version("jaxlib").encode())
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()
    return SOURCE.with_name(f"cpu-{digest[:16]}.so")


def build(compiler: str | None = None) -> Path:
    """Compiles the library, if it is not there yet, and puts it into its place at once.

    Args:
        compiler: a command; by default the first of the usual ones that is there.

    Raises:
        BuildError: it cannot be built here.
    """
    target = library()
    if target.exists():
        return target
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise BuildError(f"they are for Linux on x86-64, and this is {sys.platform} on {platform.machine()}")
    names = COMPILERS if compiler is None else (compiler,)
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise BuildError(f"there is no C++ compiler ({', '.join(names)})")
    try:
        with tempfile.TemporaryDirectory(dir=SOURCE.parent) as folder:
            made = Path(folder) / target.name
            _compile([found, *FLAGS, "-isystem", jax.ffi.include_dir(), str(SOURCE), "-o", str(made)])
            made.replace(target)
    except OSError as error:
        raise BuildError(f"{SOURCE.parent} cannot be written to: {error.strerror}") from error
    return target


def _compile(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)  # noqa: S603 - ours
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} takes longer than {SECONDS} seconds") from error
    if done.returncode != 0:
        told = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["-"]
        raise BuildError(f"{command[0]} fails: {told[0].strip()}")


def main(argv: list[str]) -> int:
    """Says in a line what there is, or why there is nothing."""
    parser = argparse.ArgumentParser(prog=COMMAND, description="Builds the CPU's own products.")
    parser.add_argument("--compiler", help=f"by default the first there is of {', '.join(COMPILERS)}")
    parser.add_argument("--optional", action="store_true", help="succeed without them")
    args = parser.parse_args(argv)
    try:
        said, failed = f"native kernels: {build(args.compiler)}", False
    except BuildError as error:
        said, failed = f"native kernels are not built: {error}; XLA's own products are used", not args.optional
    sys.stdout.write(said + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
