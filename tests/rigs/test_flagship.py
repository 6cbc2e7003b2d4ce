"""Two layers of the flagship at full width: compiled for eight devices, lowered for hardware that is not here."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.rigs.tiny import ROOT


@pytest.mark.slow
def test_its_bytes_are_planned_and_it_lowers_everywhere():
    command = [sys.executable, "-m", "tests.rigs.flagship", "--quick", "--meshes", "4x2"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.splitlines()[-1].startswith("held: flagship: ")
