"""Each family has its strategy, and the plan knows what follows from it."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from jaxserve.decode.block_diffusion import BlockDiffusion
from jaxserve.decode.canvas import CanvasDiffusion
from jaxserve.decode.strategies import facts, strategy_of
from jaxserve.models.family import family_of
from jaxserve.testing import TINY, tiny_plan
from tests.models import tiny_checkpoints as tiny


def test_a_family_that_continues_text():
    family = family_of(TINY)
    strategy = strategy_of(family, jnp.float32, 3)
    assert strategy.block is None
    assert strategy.alternatives == 3
    known = facts(strategy, family)
    assert known["widths"] == strategy.widths
    assert known["hands"] == (strategy.memory(1, 1) is not None)
    assert known["decodes"] == ("speculative" if strategy.widths[-1] > 1 else "autoregressive")


@pytest.mark.parametrize(
    ("case", "kind", "decodes"), [("sdar", BlockDiffusion, "block"), ("diffusion_gemma", CanvasDiffusion, "canvas")]
)
def test_families_that_fill_in_text(case, kind, decodes):
    family = family_of(tiny.config(case))
    strategy = strategy_of(family, jnp.float32, 3)
    assert isinstance(strategy, kind)
    assert facts(strategy, family) == {"widths": strategy.widths, "hands": True, "decodes": decodes}
    plan = tiny_plan(family)
    assert (plan.widths, plan.hands, plan.decodes) == (strategy.widths, True, decodes)
    assert "hand" in {program.kind for program in plan.programs()}


def test_a_file_may_say_how_a_canvas_is_best_refined():
    family = family_of(tiny.config("diffusion_gemma"))
    assert strategy_of(family, jnp.float32, 3, {"max_denoising_steps": 7}).denoising_steps == 7
