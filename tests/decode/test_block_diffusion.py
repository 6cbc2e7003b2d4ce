"""Block diffusion against texts of another engine, against the pass over the whole text, and pass by pass."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.decode import jitted
from jaxserve.decode.block_diffusion import BlockDiffusion
from jaxserve.decode.step import causal, empty_state
from jaxserve.models.decoding import RULES
from jaxserve.models.family import family_of
from tests.decode.blocks import CHUNK, POSITIONS, Asked, fill, settings_of
from tests.models import tiny_checkpoints as tiny

GOLDEN = json.loads((Path(__file__).parents[1] / "reference" / "blocks.json").read_text())
MASK, SHARP = GOLDEN[0]["mask"], GOLDEN[0]["sharp"]
GROUPS = sorted({(case["checkpoint"], case["block"]) for case in GOLDEN})

pytestmark = pytest.mark.reference


@cache
def sharp(checkpoint):
    family, params = tiny.load(checkpoint)
    return family, params | {"head": params["head"] * SHARP}


def texts(checkpoint, block, *, rule=None):
    """The texts of the goldens of a checkpoint, each with its case."""
    cases = [case for case in GOLDEN if (case["checkpoint"], case["block"]) == (checkpoint, block)]
    return [(case, text) for case in cases for text in case["texts"] if rule is None or case["name"] == rule]


def asked(pairs, **settings):
    return [Asked(text["prompt"], len(text["text"]), settings_of(case) | settings, dispatch=0) for case, text in pairs]


def agrees(pairs, filled) -> list[bool]:
    both = zip(pairs, filled, strict=True)
    return [one.text == text["text"] and one.passes == text["passes"] for (_, text), one in both]


@cache
def decoded(checkpoint, block):
    family, params = sharp(checkpoint)
    pairs = texts(checkpoint, block)
    pairs = pairs * 3 if checkpoint == "sdar" else pairs  # as many rows as other tests have: the same program
    return pairs, *fill(family, params, BlockDiffusion(block, MASK, alternatives=2), asked(pairs))


@pytest.mark.parametrize(("checkpoint", "block"), GROUPS)
def test_every_pass_is_the_oracles(checkpoint, block, supports):
    pairs, filled, _ = decoded(checkpoint, block)
    assert all(agrees(pairs, filled)), [case["name"] for case, _ in pairs]
    supports(tiny.config(checkpoint)["model_type"], "blocks")


@pytest.mark.parametrize(("checkpoint", "block"), GROUPS)
def test_the_account_adds_up(checkpoint, block):
    pairs, filled, _ = decoded(checkpoint, block)
    for (case, text), one in zip(pairs, filled, strict=True):
        count = one.tally
        assert count["drafted"] == count["accepted"] + count["rejected"] == len(text["text"])
        assert count["blocks"] == 4
        assert count["inserted"] == count["deleted"] == count["wasted"] == 0
        committing = count["passes"] - len(text["passes"])
        assert 0 <= committing <= 3  # the last block is not committed
        if "edit_threshold" not in case["settings"]:
            assert (committing, count["edited"], count["post_steps"], count["rejected"]) == (3, 0, 0, 0)
    for name in {case["name"] for case, _ in pairs}:
        own = [one.tally for (case, _), one in zip(pairs, filled, strict=True) if case["name"] == name]
        happened = next(case["happened"] for case, _ in pairs if case["name"] == name)
        assert sum(count["edited"] for count in own) == happened["edits"]
        if happened["edits"]:
            assert sum(count["post_steps"] for count in own) == happened["post"]
            assert sum(count["rejected"] for count in own) > 0


@cache
def passed_over(checkpoint):
    """The pass over up to six texts of up to 64 tokens, without a cache."""
    family, params = sharp(checkpoint)

    @jax.jit
    def run(params, tokens, mask):
        model = nnx.merge(family.graphdef(jnp.float32), params)
        rows = jnp.broadcast_to(mask, (len(tokens), *mask.shape))
        return model.logits(model(tokens, jnp.zeros(len(tokens), jnp.int32), rows)[0])

    def logits(lines, block):
        padded = np.zeros((6, 64), np.int32)
        for row, line in enumerate(lines):
            padded[row, : len(line)] = line
        return np.asarray(run(params, jnp.asarray(padded), causal(64, block)))

    return logits


def test_committed_blocks_are_the_pass_over_the_whole_text():
    """Logits of a pass over the last block on top of what was committed."""
    pairs, filled, state = decoded("sdar", 4)
    family, params = sharp("sdar")

    @jax.jit
    def last(params, cache, tokens, start):
        model = nnx.merge(family.graphdef(jnp.float32), params)
        return model.logits(model(tokens, start, jnp.ones((*tokens.shape, 4), bool), cache)[0])

    lines = [text["prompt"] + one.text for (_, text), one in zip(pairs, filled, strict=True)]
    starts = [len(line) - 4 for line in lines]
    tokens = jnp.asarray([line[-4:] for line in lines], jnp.int32)
    found = np.asarray(last(params, state.cache, tokens, jnp.asarray(starts, jnp.int32)))
    for line, logits, start, one in zip(lines, passed_over("sdar")(lines, 4), starts, found, strict=True):
        np.testing.assert_allclose(one / SHARP, logits[start : len(line)] / SHARP, atol=1e-4)


def test_what_editing_committed_is_what_reading_the_text_keeps():
    pairs, filled, state = decoded("llada2_moe", 8)
    family, params = sharp("llada2_moe")
    ends = [len(text["prompt"]) + len(one.text) for (_, text), one in zip(pairs, filled, strict=True)]
    lengths = np.asarray(state.length)
    assert set((lengths - ends).tolist()) == {-8, 0}  # a last block that has settled is committed at once
    again = empty_state(family.empty_cache(len(pairs), POSITIONS, jnp.float32), BlockDiffusion(8, MASK, alternatives=2))
    for slot, ((_, text), one) in enumerate(zip(pairs, filled, strict=True)):
        chunk = np.asarray((text["prompt"] + one.text + [0] * CHUNK)[:CHUNK], np.int32)
        at = (jnp.int32(slot), jnp.asarray(chunk), jnp.int32(0), jnp.int32(CHUNK))
        again = jitted.prefill(family.graphdef(jnp.float32), params, again, *at, block=8)
    for ours, theirs in zip(jax.tree.leaves(state.cache), jax.tree.leaves(again.cache), strict=True):
        for slot, length in enumerate(np.minimum(lengths, CHUNK)):
            np.testing.assert_allclose(ours[slot, :, :length], theirs[slot, :, :length], atol=1e-4)


def test_pools_of_experts_are_those_of_whole_blocks():
    """Read in padded chunks and by a pass over the last block, as in the pass over the whole text."""
    config = tiny.config("llada2_moe") | {"expert_capacity": 5, "block_size": 8, "mask_token_id": MASK}
    family = family_of(config)
    params = tiny.params(family, tiny.tensors("llada2_moe"))
    text = texts("llada2_moe", 8)[0][1]
    line = np.asarray((text["prompt"] + text["text"] * 2)[:48], np.int32)
    state = empty_state(family.empty_cache(2, POSITIONS, jnp.float32), BlockDiffusion(8, MASK))
    for start, count in ((0, 24), (24, 16)):
        chunk = np.full(CHUNK, 3, np.int32)
        chunk[:count] = line[start : start + count]
        at = (jnp.int32(1), jnp.asarray(chunk), jnp.int32(start), jnp.int32(count))
        state = jitted.prefill(family.graphdef(jnp.float32), params, state, *at, block=8)

    free = family_of(config | {"expert_capacity": 16})

    @jax.jit
    def three(params, cache, line):
        model, other = (nnx.merge(one.graphdef(jnp.float32), params) for one in (family, free))
        whole, _ = model(line[None], jnp.zeros(1, jnp.int32), causal(48, 8)[None])
        unpooled, _ = other(line[None], jnp.zeros(1, jnp.int32), causal(48, 8)[None])
        last = jnp.stack([jnp.zeros(8, jnp.int32), line[40:]])
        real = jnp.asarray([[False] * 8, [True] * 8])
        block, _ = model(last, jnp.asarray([0, 40]), jnp.ones((2, 8, 8), bool), cache, real=real)
        return model.logits(whole)[0, 40:], model.logits(unpooled)[0, 40:], model.logits(block)[1]

    whole, unpooled, block = three(params, state.cache, jnp.asarray(line))
    np.testing.assert_allclose(block, whole, atol=1e-4)
    assert np.abs(np.asarray(unpooled - whole)).max() > 0.05


def test_log_probabilities_are_those_of_the_pass_that_made_the_block_final():
    pairs, filled, _ = decoded("sdar", 4)
    text, one = pairs[0][1], filled[0]
    given, before = len(text["prompt"]) % 4, text["prompt"] + [MASK] * 4
    for now in one.passes:  # of the first block
        if MASK not in now:
            break
        before = text["prompt"][: len(text["prompt"]) - given] + now
    line = before[: len(text["prompt"]) - given + 4]
    logits = passed_over("sdar")([line], 4)[0, len(line) - 4 + given : len(line)]
    logits = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = logits[np.arange(4 - given), one.text[: 4 - given]]
    np.testing.assert_allclose(one.logprobs[: 4 - given], expected, atol=1e-3)


def test_a_pass_that_commits_may_read_the_next_block():
    """The same text, pass by pass and bit by bit, and hardly a pass that only commits."""
    family, params = sharp("sdar")
    pairs, filled, _ = decoded("sdar", 4)
    ahead, _ = fill(family, params, BlockDiffusion(4, MASK, ahead=True, alternatives=2), asked(pairs))
    for (_, text), one, other in zip(pairs, filled, ahead, strict=True):
        assert (other.text, other.passes, other.logprobs) == (one.text, one.passes, one.logprobs)
        assert other.tally | {"passes": 0} == one.tally | {"passes": 0}
        assert one.tally["passes"] == len(text["passes"]) + 3
        assert other.tally["passes"] < one.tally["passes"]
    alone = [dataclasses.replace(one, dispatch=-1) for one in asked(pairs)]
    alone[1].dispatch = 0
    found = fill(family, params, BlockDiffusion(4, MASK, ahead=True, alternatives=2), alone)[0][1]
    assert found.passes == filled[1].passes
    assert found.tally["passes"] == len(found.passes)
    again, _ = fill(family, params, BlockDiffusion(4, MASK, ahead=True, alternatives=2), asked(pairs), again=True)
    assert [(one.text, one.passes) for one in again] == [(one.text, one.passes) for one in filled]


# --- what the comparison would show -----------------------------------------------------------------------------------


NOISY, REMASKED, CAUSAL = 1.0, 2.0, 3.0


@dataclasses.dataclass(frozen=True)
class Faulty(BlockDiffusion):
    """Rows are wrong in ways of their own; which, a setting says that their rule does not use."""

    def propose(self, model, state, rows):
        proposal, fault = super().propose(model, state, rows), state.memory.rows.entropy_bound[:, None]
        open_ = (fault == REMASKED) & (state.known - state.length < self.block)[:, None]
        mask = proposal.mask & ((fault != CAUSAL)[..., None] | causal(self.block))
        tokens = jnp.where(open_, state.memory.canvas, proposal.tokens)
        return dataclasses.replace(proposal, tokens=tokens, mask=mask)

    def accept(self, logits, proposal, state, rows):
        verdict = super().accept(logits, proposal, state, rows)
        early = (verdict.count > 0) & (state.memory.rows.entropy_bound == NOISY)
        fresh = self._anew(state.memory.rows, state.memory.draft)
        kept = jax.tree.map(
            lambda a, b: jnp.where(early.reshape(-1, *(1,) * (a.ndim - 1)), a, b), fresh, verdict.memory
        )
        return dataclasses.replace(verdict, advance=jnp.where(early, self.block, verdict.advance), memory=kept)


def test_a_wrong_pass_would_show():
    """Keys and values of a pass that read masks; given positions masked; positions that see those before them only."""
    family, params = sharp("sdar")
    pairs = texts("sdar", 4) * 4
    faults = np.repeat([0.0, NOISY, REMASKED, CAUSAL], len(pairs) // 4)
    requests = asked(pairs)
    for one, fault in zip(requests, faults.tolist(), strict=True):
        one.settings["entropy_bound"] = fault
    filled, _ = fill(family, params, Faulty(4, MASK, alternatives=2), requests)
    right = np.asarray(agrees(pairs, filled)).reshape(4, -1)
    assert right.all(1).tolist() == [True, False, False, False]


@pytest.mark.parametrize("shown", [1, 9])
def test_a_prompt_read_in_another_way_would_show(shown):
    """Each position after the other, or by blocks of another size."""
    family, params = sharp("llada2_moe")
    pairs = decoded("llada2_moe", 8)[0]
    filled, _ = fill(family, params, BlockDiffusion(8, MASK, alternatives=2), asked(pairs), shown=shown)
    assert not all(agrees(pairs, filled))


# --- company ----------------------------------------------------------------------------------------------------------


def crowd():
    """Six requests that differ in everything, and their sampling parameters."""
    draw = np.random.default_rng(5)
    rules = [("low_confidence_dynamic", 0.3), ("left_prefix", 1.0), ("low_confidence_static", 0.4)] * 2
    requests = [
        Asked(
            draw.integers(0, MASK, length).tolist(),
            tokens,
            {"rule": RULES.index(rule), "edit_threshold": edit, "max_post_steps": 3, "threshold": 0.4},
            draft=draw.integers(0, MASK, tokens).tolist() if length % 5 == 1 else [],
        )
        for length, tokens, (rule, edit) in zip((1, 4, 6, 11, 15, 18), (19, 13, 22, 9, 16, 11), rules, strict=True)
    ]
    return requests, {
        "temperature": np.asarray([0.0, 0.7, 1.0, 0.9, 0.0, 1.3]),
        "top_k": np.asarray([0, 9, 0, 3, 0, 0]),
        "frequency_penalty": np.asarray([0.0, 0.0, 0.5, 0.0, 1.0, 0.0]),
        "seed": draw.integers(0, 99, (6, 2)),
    }


def test_a_text_does_not_depend_on_its_company():
    """Alone, together, in other slots, joined in the middle of others' blocks, and read again after a fault."""
    family, params = sharp("sdar")
    strategy = BlockDiffusion(4, MASK, alternatives=2)
    requests, rows = crowd()
    together = fill(family, params, strategy, requests, **rows)[0]
    assert sum(one.tally["edited"] for one in together) > 5

    order = [3, 1, 5, 0, 4, 2]
    later = [dataclasses.replace(requests[at], dispatch=turn) for turn, at in enumerate(order)]
    moved = {name: value[order] for name, value in rows.items()}
    joined = fill(family, params, strategy, later, steps=1, **moved)[0]
    for at, one in zip(order, joined, strict=True):
        assert one == together[at]
    for chosen in (2, 5):
        alone = [dataclasses.replace(one, dispatch=0 if at == chosen else -1) for at, one in enumerate(requests)]
        assert fill(family, params, strategy, alone, steps=7, **rows)[0][chosen] == together[chosen]
    again = fill(family, params, strategy, requests, again=True, **rows)[0]
    assert [(one.text, one.passes) for one in again] == [(one.text, one.passes) for one in together]
    ahead = fill(family, params, dataclasses.replace(strategy, ahead=True), later, steps=2, **moved)[0]
    for at, one in zip(order, ahead, strict=True):
        assert (one.text, one.passes, one.logprobs) == (together[at].text, together[at].passes, together[at].logprobs)
        assert one.tally | {"passes": 0} == together[at].tally | {"passes": 0}
    assert sum(one.tally["passes"] for one in ahead) < sum(one.tally["passes"] for one in together) - 5
    assert sum(one.tally["predicted_rejected"] for one in together) > 5
    other = fill(family, params, strategy, requests, **(rows | {"seed": rows["seed"] + 1}))[0]
    assert [one.text == now.text for one, now in zip(other, together, strict=True)] == [True, *[False] * 3, True, False]


def test_a_text_goes_on_where_it_was_cut():
    """What was emitted before a fault is given afterwards: the same text comes out."""
    family, params = sharp("sdar")
    strategy = BlockDiffusion(4, MASK, alternatives=2)
    requests, rows = crowd()
    together = fill(family, params, strategy, requests, **rows)[0]
    emitted = [(len(one.prompt) + 8) // 4 * 4 - len(one.prompt) for one in requests]  # two blocks of each
    cut = [
        dataclasses.replace(one, prompt=one.prompt + now.text[:count], tokens=one.tokens - count)
        for one, now, count in zip(requests, together, emitted, strict=True)
    ]
    lengths = [len(one.prompt) for one in requests]
    rest = fill(family, params, strategy, cut, prompt_length=lengths, **rows)[0]
    assert [one.text for one in rest] == [now.text[count:] for now, count in zip(together, emitted, strict=True)]


SETTINGS = {
    "nothing is edited": {"edit_threshold": 1.0},
    "everything is edited": {"edit_threshold": 0.0},
    "no post steps": {"max_post_steps": 0},
    "one post step fewer": {"max_post_steps": 1},
    "another threshold": {"threshold": 0.6},
    "four masks are due": {"denoising_steps": 2},
    "a penalty": {"penalty": 6.0},
}


def test_a_setting_that_is_ignored_would_show():
    family, params = sharp("llada2_moe")
    pairs = texts("llada2_moe", 8, rule="joint, two post steps")[:1]
    whole = len(texts("llada2_moe", 8))
    requests = [one for change in SETTINGS.values() for one in asked(pairs, **change)]
    requests += asked(pairs * (whole - len(requests)))  # as many rows as above: the same program
    filled, _ = fill(family, params, BlockDiffusion(8, MASK, alternatives=2), requests)
    right = [agrees(pairs, [one])[0] for one in filled]
    assert right == [False] * len(SETTINGS) + [True] * (whole - len(SETTINGS))
