"""However the child ends, the parent gets a result or one sentence, and no process stays behind."""

from __future__ import annotations

import os
import time

import pytest

from jaxserve.checkpoint import cage, silent
from jaxserve.errors import CheckpointError

AMPLE = cage.Limits(memory_bytes=1 << 30, cpu_seconds=60, file_bytes=1 << 20)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs a body as the child's work: it sees ``arguments`` and ``report``."""

    def run(body: str, limits: cage.Limits = AMPLE, progress=silent):
        lines = "\n".join("    " + line for line in body.strip().splitlines())
        program = f"""
import os, signal, sys, time
sys.path.insert(0, sys.argv[1])
from jaxserve.checkpoint import cage
from jaxserve.errors import CheckpointError
def work(arguments, report):
{lines}
cage.serve(work)
"""
        monkeypatch.setattr(cage, "_START", program)
        return cage.run("unused", {"path": str(tmp_path / "file")}, limits, progress)

    return run


def test_a_result_and_progress_come_back(run, tmp_path):
    seen = []
    body = "report('read', 1, 2)\nreport('read', 2, 2)\nreturn {'path': arguments['path'], 'text': '½'}"
    assert run(body, progress=lambda *report: seen.append(report)) == {"path": str(tmp_path / "file"), "text": "½"}
    assert seen == [("read", 1, 2), ("read", 2, 2)]


def test_what_the_child_prints_is_not_its_answer(run):
    body = "print('{\"phase\": 1}', flush=True)\nos.write(1, b'garbage\\n')\nos.system('echo more')\nreturn {'a': 1}"
    assert run(body) == {"a": 1}


def test_its_own_errors_come_back_as_they_are(run):
    with pytest.raises(CheckpointError, match=r"^This file is bad\.$"):
        run("raise CheckpointError('This file is bad.')")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("{}['key']", "KeyError: 'key'"),
        ("open('/nowhere/at/all')", r"No such file or directory \(/nowhere/at/all\)"),
        ("raise RecursionError('deep')", "RecursionError: deep"),
        ("sys.exit(3)", "exit code 3"),
        ("os._exit(0)", "exit code 0 before it was done"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "signal SIGSEGV"),
        ("os.abort()", "signal SIGABRT"),
    ],
)
def test_every_other_end_is_one_sentence(run, body, reason):
    with pytest.raises(CheckpointError, match=reason) as caught:
        run(body)
    assert caught.value.message.startswith("The converter")
    assert "\n" not in caught.value.message


def test_a_child_that_breaks_the_protocol_is_ended(run):
    body = """
for descriptor in range(3, 20):
    try:
        os.write(descriptor, b"no JSON\\n")
    except OSError:
        pass
time.sleep(60)
"""
    started = time.perf_counter()
    with pytest.raises(CheckpointError, match="signal SIGKILL"):
        run(body)
    assert time.perf_counter() - started < 20


def test_memory_is_limited(run):
    with pytest.raises(CheckpointError, match="memory limit"):
        run("x = bytearray(2 << 30)\nreturn {}", cage.Limits(1 << 28, 60, 1 << 20))


def test_processor_time_is_limited(run):
    started = time.perf_counter()
    with pytest.raises(CheckpointError, match="processor time limit"):
        run("while True: pass", cage.Limits(1 << 30, 1, 1 << 20))
    assert time.perf_counter() - started < 20


def test_file_size_is_limited(run):
    with pytest.raises(CheckpointError, match="File too large"):
        run("open(arguments['path'], 'wb').write(bytes(1 << 21))\nreturn {}")


def test_open_files_are_limited(run):
    with pytest.raises(CheckpointError, match="Too many open files"):
        run("files = [open('/dev/null') for _ in range(100)]\nreturn {}", cage.Limits(1 << 30, 60, 1 << 20, 50))


def test_limits_grow_with_the_source():
    small, large = cage.Limits.for_source(10), cage.Limits.for_source(10**9)
    assert large.memory_bytes - small.memory_bytes == 2 * (10**9 - 10)
    assert large.file_bytes >= 16 * 10**9
    assert large.cpu_seconds > small.cpu_seconds


def test_an_interrupted_parent_leaves_no_child(run, tmp_path):
    def interrupt(*report: object) -> None:
        raise KeyboardInterrupt

    pid = tmp_path / "file"
    body = "open(arguments['path'], 'w').write(str(os.getpid()))\nreport('a', 0, 1)\ntime.sleep(60)\nreturn {}"
    started = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        run(body, progress=interrupt)
    assert time.perf_counter() - started < 20
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_the_child_takes_nothing_from_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit('taken from the current folder')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    arguments = {key: str(tmp_path / key) for key in ("path", "content", "scratch")} | {"dtype": "auto"}
    with pytest.raises(CheckpointError, match="path is not a folder"):
        cage.run("jaxserve.checkpoint.convert", arguments, cage.Limits.for_source(1))
