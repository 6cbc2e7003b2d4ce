"""Texts filled in block by block: prompts read and rows admitted as the engine does it, and what each pass showed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxserve.decode import jitted
from jaxserve.decode.block_diffusion import BlockDiffusion
from jaxserve.decode.step import Control, DecodeState, Hint, empty_state
from jaxserve.decode.tally import COLUMNS
from jaxserve.models.decoding import RULES
from jaxserve.models.family import Family
from tests.decode.rows import sampling_rows

POSITIONS, CHUNK, STEPS = 128, 64, 16


@dataclasses.dataclass
class Filled:
    """One row's text, pass by pass."""

    text: list[int] = dataclasses.field(default_factory=list)
    passes: list[list[int]] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    tally: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(COLUMNS, 0))


@dataclasses.dataclass
class Asked:
    """A request: a prompt, how many tokens behind it, and settings by name; it is admitted before a dispatch."""

    prompt: list[int]
    tokens: int
    settings: dict[str, float] = dataclasses.field(default_factory=dict)
    dispatch: int = 0
    draft: list[int] = dataclasses.field(default_factory=list)


def hint(strategy: BlockDiffusion, settings: dict[str, float], draft: Sequence[int] = ()) -> Hint:
    tokens = np.zeros(POSITIONS, np.int32)
    tokens[: len(draft)] = draft
    values = [settings.get(name, math.nan) for name in strategy.settings]
    return Hint(jnp.asarray(tokens), jnp.int32(len(draft)), jnp.asarray(values, jnp.float32))


def settings_of(case: dict[str, Any]) -> dict[str, float]:
    """A golden's settings by the strategy's names."""
    given, names = case["settings"], {"steps": "denoising_steps", "post_steps": "max_post_steps"}
    rules = {"sequential": "sequential", "prefix": "left_prefix", "entropy": "entropy_bounded"}
    rule = RULES.index(rules.get(case["rule"], "low_confidence_dynamic"))
    return {"rule": rule} | {names.get(name, name): value for name, value in given.items()}


def fill(
    family: Family,
    params: Any,
    strategy: BlockDiffusion,
    asked: list[Asked],
    *,
    steps: int = STEPS,
    shown: int | None = None,
    again: bool = False,
    **rows: Any,
) -> tuple[list[Filled], DecodeState]:
    """Decodes each request in a slot of its own until all are done.

    Args:
        asked: those whose dispatch is negative leave their slots empty.
        steps: passes a dispatch.
        shown: a fault: a block other than the strategy's, by which prompts are read.
        again: prompts are not read at once but by steps, as a text is after a fault.
        rows: sampling parameters.
    """
    graphdef, slots, w = family.graphdef(jnp.float32), len(asked), strategy.block
    state = empty_state(family.empty_cache(slots, POSITIONS, jnp.float32), strategy)
    lengths = [len(one.prompt) // w * w for one in asked]
    rows = {"prompt_length": [len(one.prompt) for one in asked], "alternatives": True} | rows
    rows = sampling_rows(slots, limit=[len(one.prompt) + one.tokens for one in asked], **rows)
    filled = [Filled() for _ in asked]
    for dispatch in range(400):
        pending, admit = np.zeros((slots, strategy.widths[-1]), np.int32), np.zeros(slots, bool)
        for slot, one in enumerate(asked):
            if one.dispatch != dispatch:
                continue
            chunk = np.zeros(CHUNK, np.int32)
            chunk[: len(one.prompt)] = one.prompt
            at = (jnp.int32(slot), jnp.asarray(chunk), jnp.int32(0), jnp.int32(lengths[slot]))
            state = jitted.prefill(graphdef, params, state, *at, block=w if shown is None else shown)
            state = jitted.hand(state, jnp.int32(slot), hint(strategy, one.settings, one.draft), strategy=strategy)
            rest = one.prompt[lengths[slot] :]
            pending[slot, : len(rest)], admit[slot] = rest, True
            if again:
                pending[slot] = (one.prompt + [0] * 2 * w)[: pending.shape[1]]
        read = [0] * slots if again else lengths
        control = Control(
            keep=jnp.asarray(~admit),
            admit=jnp.asarray(admit),
            length=jnp.asarray(read, jnp.int32),
            pending=jnp.asarray(pending),
            pending_count=jnp.asarray([len(one.prompt) - at for one, at in zip(asked, read, strict=True)], jnp.int32),
        )
        state, log = jitted.run(
            graphdef, params, state, control, rows, jnp.int32(steps), strategy=strategy, max_steps=STEPS
        )
        for slot, one in enumerate(asked):
            _read(filled[slot], one.prompt, one.tokens, strategy, log, slot)
        if not state.active.any() and dispatch >= max(one.dispatch for one in asked):
            return filled, state
    raise AssertionError("a text does not end")


def _read(filled: Filled, prompt: list[int], limit: int, strategy: BlockDiffusion, log: Any, slot: int) -> None:
    """Adds what a dispatch showed of a row; passes that only commit show masks alone."""
    tokens, counts, tally = (np.asarray(leaf) for leaf in (log.tokens, log.count, log.tally))
    for step in range(len(counts)):
        if not tally[step, slot].any():
            continue
        for name, value in zip(COLUMNS, tally[step, slot].tolist(), strict=True):
            filled.tally[name] += value
        rest, count = tokens[step, slot].tolist(), int(counts[step, slot])
        scores = np.asarray(log.scores.chosen)[step, slot].tolist()
        while rest and len(filled.text) < limit:  # a pass may show the end of a block and the beginning of the next
            given = (len(prompt) + len(filled.text)) % strategy.block
            shown, rest = rest[: strategy.block - given], rest[strategy.block - given :]
            if any(token != strategy.mask_id for token in shown):
                filled.passes.append((prompt + filled.text)[len(prompt) + len(filled.text) - given :] + shown)
            taken = min(count, len(shown))
            filled.text, count = filled.text + shown[:taken], count - taken
            filled.logprobs += scores[:taken]
            scores = scores[len(shown) :]
            if taken < len(shown):
                break
