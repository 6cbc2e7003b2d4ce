"""The commands that run a model, on a toy."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve import cli, launch
from jaxserve.cli import running
from jaxserve.config import load, tuned_environment

FLAGSHIP = Path(__file__).parents[2] / "configs" / "qwen3.6-35b-a3b"


def run(capsys, *arguments: str, code: int = 0) -> str:
    assert cli.run(arguments) == code, capsys.readouterr().err
    return capsys.readouterr().out


def test_serve_hands_over_the_settings(capsys, toy, monkeypatch):
    served = []
    monkeypatch.setattr(launch, "serve", served.append)
    run(capsys, "serve", "--port", "7")
    assert served == [load(flags={"server.port": "7"}).config]


def test_plan(capsys, toy):
    output = run(capsys, "plan")
    assert "cache, pool 2x64" in output
    assert "programs: 5" in output


def test_plan_of_what_is_not_here(capsys, toy):
    flags = ["plan", "--config-json", f"{FLAGSHIP}.json", "--config", f"{FLAGSHIP}-8xh100.yaml"]
    output = run(capsys, *flags, "--device", "8xh100")
    assert "on each of 8 devices (expert x tensor 4x2)" in output
    assert "  experts " in output
    output = run(capsys, *flags, "--where")
    assert [line.split()[0] for line in output.splitlines()] == [
        "HARDWARE",
        "1xh200",
        "8xh100",
        "v5e-8",
        "v6e-8",
        "v5p-16",
    ]
    assert cli.run([*flags, "--device", "h100"]) == 78
    assert "there is 1" in capsys.readouterr().err


def test_plan_that_does_not_fit(capsys, toy):
    assert cli.run(["plan", "--engine.memory-limit-bytes", "4096"]) == 78
    output = capsys.readouterr()
    assert output.err.startswith("jaxserve: the plan needs")
    assert output.err.count("\n") == 1


def test_generate(capsys, toy, monkeypatch):
    greedy = ["generate", "Name three", "--max-tokens", "12", "--temperature", "0"]
    text = run(capsys, *greedy)
    assert text.endswith("\n")
    assert run(capsys, *greedy) == text
    assert run(capsys, "generate", "other words", *greedy[2:]) != text
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert cli.run(["generate", "-", *greedy[2:]]) == 1  # an empty prompt


def test_generate_draws_by_seed(capsys, toy):
    drawn = ["generate", "Name three", "--max-tokens", "12", "--temperature", "1.5"]
    first = run(capsys, *drawn, "--seed", "1")
    assert run(capsys, *drawn, "--seed", "1") == first
    assert run(capsys, *drawn, "--seed", "2") != first


def test_chat_needs_a_template(capsys, toy):
    assert cli.run(["generate", "--chat", "hello"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "jaxserve: toy has no chat template"


def test_score(capsys, toy):
    lines = run(capsys, "score", "abcd").splitlines()
    assert [line.split()[0] for line in lines] == ["TOKEN", "'b'", "'c'", "'d'", "total"]
    values = [float(line.split()[1]) for line in lines[1:]]
    assert values[-1] == pytest.approx(sum(values[:-1]), abs=1e-3)
    assert max(values) < 0


def test_check(capsys, toy, monkeypatch):
    lines = run(capsys, "check").splitlines()
    assert len(lines) >= 3
    assert all(line.startswith("held") for line in lines)
    monkeypatch.setattr(launch, "check", lambda model: iter([("a promise", False, "42")]))
    assert run(capsys, "check", code=1) == "BROKEN  a promise: 42\n"


def test_bench(capsys, toy):
    sizes = ["--streams", "1", "--streams", "2", "--prompt-tokens", "8", "--output-tokens", "4"]
    header, *rows = [line.split() for line in run(capsys, "bench", *sizes).splitlines()]
    assert header[:2] == ["streams", "tokens/s"]
    assert [row[0] for row in rows] == ["1", "2"]
    objects = [json.loads(line) for line in run(capsys, "bench", *sizes, "--json").splitlines()]
    assert [entry["streams"] for entry in objects] == [1, 2]
    assert all(entry["tokens/s"] > 0 for entry in objects)


def test_bench_sizes_the_pool_unless_it_is_set(capsys, toy, monkeypatch):
    pools = []
    monkeypatch.setattr(running, "_load", lambda config: pools.append(str(config.engine.pools[0])))
    monkeypatch.setattr(launch, "bench", lambda model, **sizes: {"tokens/s": 1.0})
    run(capsys, "bench", "--streams", "3", "--streams", "5")
    assert pools == ["2x64", "2x64"]  # from the environment; nothing is kept, since nothing was loaded
    monkeypatch.delenv("JAXSERVE_ENGINE__POOLS")
    run(capsys, "bench", "--streams", "3", "--streams", "5")
    assert pools[2:] == ["3x160", "5x160"]


@pytest.mark.skipif(sys.platform != "linux", reason="the C library's tunables are glibc's")
def test_the_process_starts_anew_with_huge_pages():
    script = (
        "import os, sys; from jaxserve.cli.running import _relaunch_tuned; from jaxserve.config import load; "
        "_relaunch_tuned(load().config); print(os.environ.get('GLIBC_TUNABLES'), sys.argv[1:])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    command = [sys.executable, "-c", script, "a b"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "glibc.malloc.hugetlb=1 ['a b']\n"
    environment |= {"JAXSERVE_ENGINE__HUGE_PAGES": "off"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "None ['a b']\n"


def test_a_tuned_process_goes_on(monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    assert tuned_environment(load().config) is None
