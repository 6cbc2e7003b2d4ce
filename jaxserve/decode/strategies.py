"""Which strategy a family is decoded by, and what a plan has to know of it.

Knows every strategy, so that nobody else has to: whoever serves or plans a model asks here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import jax
from jax.typing import DTypeLike

from jaxserve.decode import block_diffusion, canvas
from jaxserve.decode.autoregressive import Autoregressive
from jaxserve.decode.speculative import Speculative
from jaxserve.decode.step import Strategy
from jaxserve.models.family import Family
from jaxserve.plan import Plan

# A pass over eight tokens of a row costs little more than one over two where weights are read from memory.
DRAFTS = (7,)


def strategy_of(
    family: Family,
    dtype: DTypeLike,
    alternatives: int,
    generation: Mapping[str, Any] | None = None,
    *,
    drafts: Literal["auto"] | tuple[int, ...] = "auto",
) -> Strategy:
    """The strategy of a family.

    Args:
        dtype: of the model's numbers.
        alternatives: most likely tokens reported beside each emitted one.
        drafts: the setting ``engine.draft_tokens``; models that fill in text make none.
        generation: the checkpoint's ``generation_config.json``, if it is at hand; changes numbers, never a shape.

    Raises:
        ConfigError: a setting there that cannot be.
    """
    if family.decoding is None:
        return _of_continued_text(family, alternatives, drafts)
    if family.decoding.kind == "canvas":
        return canvas.strategy_of(family, dtype, alternatives, generation)
    return block_diffusion.strategy_of(family.decoding, alternatives)


def planned_strategy(plan: Plan, family: Family, generation: Mapping[str, Any] | None = None) -> Strategy:
    """The strategy that a plan counts with: whatever it compiles or serves, its widths are the plan's."""
    drafts = tuple(width - 1 for width in plan.widths[1:])
    return strategy_of(family, plan.dtype, plan.max_logprobs, generation, drafts=drafts)


def facts(strategy: Strategy, family: Family) -> dict[str, Any]:
    """The fields of a ``plan.Plan`` that follow from the strategy: ``widths``, ``hands`` and ``decodes``."""
    if family.decoding is None:
        decodes = "speculative" if strategy.widths[-1] > 1 else "autoregressive"
    else:
        decodes = family.decoding.kind
    hands = bool(jax.tree.leaves(jax.eval_shape(lambda: strategy.memory(1, 1))))
    return {"widths": strategy.widths, "hands": hands, "decodes": decodes}


def _of_continued_text(family: Family, alternatives: int, drafts: Literal["auto"] | tuple[int, ...]) -> Strategy:
    """Of families that continue a text: with drafts by default where nothing but time can depend on them."""
    lengths = (DRAFTS if family.config.steady else ()) if drafts == "auto" else tuple(sorted(set(drafts)))
    return Speculative(lengths, alternatives) if lengths else Autoregressive(alternatives)
