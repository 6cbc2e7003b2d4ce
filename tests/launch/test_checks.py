from __future__ import annotations

import dataclasses

from jaxserve.launch.checks import check
from jaxserve.launch.loading import LoadedModel


def test_the_promises_hold_and_the_checks_can_fail(loaded: LoadedModel):
    outcomes = {name: (held, figure) for name, held, figure in check(loaded)}
    held = {name: held for name, (held, _) in outcomes.items()}
    assert held.pop("no program was compiled after warm-up") in (True, False)  # others' tests compile in this process
    assert held == {"alone = in company, bit for bit": True, "cached decoding = whole-sequence pass": True}
    assert outcomes["alone = in company, bit for bit"][1] == "16 of 16 requests"
    other = dict(loaded.params) | {"embedding": loaded.params["embedding"] * 1.01}
    spoilt = {name: held for name, held, _ in check(dataclasses.replace(loaded, params=other))}
    assert not spoilt["cached decoding = whole-sequence pass"]


def test_what_holds_of_a_model_that_fills_in_blocks(blocks: LoadedModel):
    """Its log-probabilities are of passes that saw more than what stands before a token."""
    outcomes = {name: held for name, held, _ in check(blocks)}
    outcomes.pop("no program was compiled after warm-up")  # others' tests compile in this process
    assert outcomes == {"alone = in company, bit for bit": True}
