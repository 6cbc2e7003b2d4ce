"""Who may import whom: the contracts in pyproject.toml cover every module, hold, and would notice if they did not."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest


def contracts(root: Path) -> dict[str, dict]:
    """The contracts by their id."""
    settings = tomllib.loads(root.joinpath("pyproject.toml").read_text())
    return {contract["id"]: contract for contract in settings["tool"]["importlinter"]["contracts"]}


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the contracts over the package in ``folder``."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def copy(root, tmp_path) -> Path:
    """A copy of the package to plant things in."""
    shutil.copytree(root / "jaxserve", tmp_path / "jaxserve", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "pyproject.toml", tmp_path)
    return tmp_path


def test_a_copy_keeps_the_contracts(copy):
    result = lint(copy)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("module", "planted"),
    [
        ("errors.py", "import jaxserve.config"),
        ("config/tree.py", "import jax.numpy"),
        ("config/tree.py", "import starlette"),
        ("attic.py", "x = 1"),
    ],
)
def test_a_planted_import_is_noticed(copy, module, planted):
    with copy.joinpath("jaxserve", module).open("a") as file:
        file.write(f"\n{planted}\n")
    result = lint(copy)
    assert result.returncode != 0, result.stdout


@pytest.mark.parametrize("room", ["config", "plan", "text", "server", "engine/scheduler"])
def test_what_runs_without_jax_is_told_to(root, room):
    path = root / "jaxserve" / room
    if path.is_dir() or path.with_suffix(".py").exists():
        sources = {module for contract in contracts(root).values() for module in _without_jax(contract)}
        assert "jaxserve." + room.replace("/", ".") in sources


def _without_jax(contract: dict) -> list[str]:
    return contract["source_modules"] if "jax" in contract.get("forbidden_modules", ()) else []
