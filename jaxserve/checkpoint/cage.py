"""A child process with limits, in which files from strangers are parsed.

It knows processes, resource limits and a protocol of JSON lines. It does not know what the child does.

A malformed file may at worst kill the child: by a signal, or by a limit on memory, processor time, file size or open
files. The parent then says so in one sentence. The child runs the parent's own jaxserve and nothing from the current
folder. It gets one JSON object on stdin and answers with one object a line: progress, then a result or an error.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Final

import jaxserve
from jaxserve.checkpoint import Progress, silent
from jaxserve.errors import CheckpointError, JaxserveError

_ROOT: Final = str(Path(jaxserve.__file__).resolve().parent.parent)
_START: Final = """
import importlib, sys
root, module = sys.argv[1:]
if root not in sys.path:
    sys.path.insert(0, root)
importlib.import_module(module).main()
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What the child may use.

    Attributes:
        memory_bytes: private memory (RLIMIT_DATA); mapped files do not count.
        cpu_seconds: processor time of all its threads.
        file_bytes: size of the largest file it writes.
        open_files: descriptors at a time.
    """

    memory_bytes: int
    cpu_seconds: int
    file_bytes: int
    open_files: int = 4096

    @classmethod
    def for_source(cls, size: int) -> Limits:
        """Ample for an honest source of ``size`` bytes, and still small for a small one.

        A tensor quantised to two bits grows sixteenfold as float32; every thread of a large machine takes a stack.
        """
        stacks = 64 * (os.cpu_count() or 1) << 20
        return cls(
            memory_bytes=(2 << 30) + stacks + 2 * size,
            cpu_seconds=120 + size // 1_000_000,
            file_bytes=(1 << 30) + 16 * size,
        )


def run(module: str, arguments: dict[str, Any], limits: Limits, progress: Progress = silent) -> dict[str, Any]:
    """Runs a module's ``main``, which calls :func:`serve`, in a child, and returns the child's result.

    Raises:
        CheckpointError: what the child raised, or how it died.
    """
    command = [sys.executable, "-P", "-c", _START, _ROOT, module]
    request = json.dumps({"limits": dataclasses.asdict(limits), "arguments": arguments})
    with tempfile.TemporaryFile() as stderr, _start(command, stderr) as child:
        try:
            result = _converse(child, request, progress)
            if result is None:
                child.wait()
                stderr.seek(0)
                raise CheckpointError(_epitaph(child.returncode, stderr.read()[-4000:].decode("utf-8", "replace")))
        finally:
            child.kill()
    if "error" in result:
        raise CheckpointError(result["error"])
    return result


def _start(command: list[str], stderr: IO[bytes]) -> subprocess.Popen[str]:
    return subprocess.Popen(  # noqa: S603 the command is this interpreter and this package
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, encoding="utf-8"
    )


def _converse(child: subprocess.Popen[str], request: str, progress: Progress) -> dict[str, Any] | None:
    """Sends the request and relays progress until the result; ``None`` if the child dies before."""
    assert child.stdin is not None and child.stdout is not None  # noqa: PT018 both are pipes, see above
    try:
        with child.stdin as stdin:
            stdin.write(request)
    except BrokenPipeError:
        return None
    for line in child.stdout:
        try:
            message: dict[str, Any] = json.loads(line)
        except ValueError:  # it dies in the middle of a line, or no longer runs our program
            child.kill()
            break
        if "phase" not in message:
            return message
        progress(message["phase"], message["done"], message["total"])
    return None


def _epitaph(code: int, stderr: str) -> str:
    if code == -signal.SIGXCPU:
        return "The converter used up its processor time limit and was stopped."
    last = stderr.strip().rsplit("\n", 1)[-1][-300:]
    what = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"The converter died of {what} before it was done" + (f": {last}" if last else ".")


def serve(work: Callable[[dict[str, Any], Progress], dict[str, Any]]) -> None:
    """The child's side: takes the request, puts the limits on itself, and reports what ``work`` does.

    ``work`` gets the arguments and a progress; its result must be JSON. Whatever it prints goes to stderr.
    """
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        request = json.load(sys.stdin)
        _apply(Limits(**request["limits"]))
        _answer(answers, _attempt(work, request["arguments"], answers))


def _attempt(
    work: Callable[[dict[str, Any], Progress], dict[str, Any]], arguments: dict[str, Any], answers: IO[str]
) -> dict[str, Any]:
    def report(phase: str, done: int, total: int) -> None:
        _answer(answers, {"phase": phase, "done": done, "total": total})

    try:
        return work(arguments, report)
    except JaxserveError as error:
        return {"error": error.message}
    except MemoryError:
        return {"error": "The converter reached its memory limit."}
    except OSError as error:
        return {"error": f"The converter failed: {error.strerror or error} ({error.filename or 'no file'})."}
    except Exception as error:  # noqa: BLE001 whatever a malformed file provokes must reach the parent as a sentence
        traceback.print_exc()
        return {"error": f"The converter failed: {type(error).__name__}: {str(error)[:300]}"}


def _answer(answers: IO[str], message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def _apply(limits: Limits) -> None:
    for kind, value, grace in (
        (resource.RLIMIT_DATA, limits.memory_bytes, 0),
        (resource.RLIMIT_CPU, limits.cpu_seconds, 5),  # the soft limit's signal says which limit it was
        (resource.RLIMIT_FSIZE, limits.file_bytes, 0),
        (resource.RLIMIT_NOFILE, limits.open_files, 0),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        _, hard = resource.getrlimit(kind)
        most = value + grace if hard == resource.RLIM_INFINITY else min(value + grace, hard)
        resource.setrlimit(kind, (min(value, most), most))
