"""The files that the house's rules are about."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def modules() -> dict[str, str]:
    """Every module of the package: path below the package, source."""
    package = ROOT / "jaxserve"
    return {path.relative_to(package).as_posix(): path.read_text() for path in sorted(package.rglob("*.py"))}


@pytest.fixture(scope="session")
def texts() -> dict[str, str]:
    """Every text file that is or would be committed: path below the repository, content."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    found = {}
    for name in names:
        content = ROOT.joinpath(name).read_bytes() if ROOT.joinpath(name).is_file() else b"\0"
        if b"\0" not in content:
            found[name] = content.decode("utf-8", errors="replace")
    return found
