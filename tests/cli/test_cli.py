"""How a command line ends: exit code, one sentence, no traceback; and without loading JAX where it isn't needed."""

from __future__ import annotations

import os
import subprocess
import sys

import click
import pytest

import jaxserve
from jaxserve import cli
from jaxserve.errors import CheckpointError


@pytest.fixture
def failing(monkeypatch):
    """A command ``fail`` that raises what it is given."""

    def register(error: BaseException) -> None:
        @click.command()
        def fail() -> None:
            raise error

        monkeypatch.setitem(cli.cli.commands, "fail", fail)

    return register


def test_help_and_version(capsys):
    assert cli.run(["--help"]) == 0
    assert "config" in capsys.readouterr().out
    assert cli.run(["--version"]) == 0
    assert jaxserve.__version__ in capsys.readouterr().out
    assert cli.run([]) == 2


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["config", "show", "--port", "x"], 78, "--server.port: `server.port` takes an integer from 0 to 65,535"),
        (["config", "show", "--config", "/no/such.yaml"], 78, "/no/such.yaml: cannot be read: No such file"),
        (["config", "show", "--prt", "1"], 2, "Did you mean '--port'?"),
        (["sevre"], 2, "No such command 'sevre'"),
    ],
)
def test_a_mistake_is_one_line(capsys, arguments, code, says):
    assert cli.run(arguments) == code
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("jaxserve: ")
    assert says in output.err
    assert output.err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (CheckpointError("a is damaged."), 78, "jaxserve: a is damaged.\n"),
        (ValueError("why"), 70, "jaxserve: unexpected ValueError: why (`jaxserve --debug` shows where it came from)\n"),
        (KeyboardInterrupt(), 130, ""),
        (click.Abort(), 130, ""),
    ],
)
def test_every_error_has_an_exit_code(capsys, failing, error, code, says):
    failing(error)
    assert cli.run(["fail"]) == code
    assert capsys.readouterr().err == says


def test_debug_shows_where_it_came_from(capsys, failing):
    failing(ValueError("why"))
    assert cli.run(["--debug", "fail"]) == 70
    assert "Traceback" in capsys.readouterr().err


def test_config_mistakes_do_not_wait_for_jax():
    script = (
        "import sys; from jaxserve.cli import run; code = run(['config', 'show', '--port', 'x']); "
        "print(code, 'jax' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.split() == ["78", "False"]


def test_a_reader_that_leaves_is_no_error():
    read, write = os.pipe()
    os.close(read)
    script = "import sys; from jaxserve.cli import main; sys.argv = ['jaxserve', 'config', 'table']; main()"
    try:
        result = subprocess.run(
            [sys.executable, "-c", script], stdout=write, stderr=subprocess.PIPE, timeout=60, check=False
        )
    finally:
        os.close(write)
    assert (result.returncode, result.stderr) == (1, b"")


def test_main_exits(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["jaxserve", "config", "show", "--port", "x"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 78
