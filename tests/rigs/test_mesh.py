"""One model with experts on one mesh; the rig does the same for every family on four, with engines and controls."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jaxserve.axes import MeshShape
from jaxserve.models.family import family_of
from tests.rigs.mesh import gathered_weights
from tests.rigs.mesh_models import MODELS
from tests.rigs.tiny import ROOT


@pytest.mark.slow
def test_sharded_is_unsharded_with_an_eighth_of_the_bytes():
    command = [sys.executable, "-m", "tests.rigs.mesh", "--quick"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.splitlines()[-1].startswith("held: test_mesh: ")


class Text:
    """An executable that is nothing but its text."""

    def __init__(self, *lines: str) -> None:
        self.lines = lines

    def as_text(self) -> str:
        return "\n".join(self.lines)


def test_gathered_weights_are_seen():
    family, mesh = family_of(MODELS["qwen3_moe"]), MeshShape(4, 2)
    gathered = "%all-gather.3 = f32[16,2,40,64]{3,2,1,0} all-gather(%param.1), channel_id=1"
    halved = "%ag = (f32[4,2,20,64]{3,2,1,0}, f32[8,2,20,64]{3,2,1,0}) all-to-all(%a, %b)"
    small = "%all-gather.4 = f32[4,264]{1,0} all-gather(%dot), channel_id=2"
    assert gathered_weights(Text(gathered, small), family, mesh) == [gathered]
    assert gathered_weights(Text(small), family, mesh) == []
    assert gathered_weights(Text(halved), family, mesh) == [halved]
