"""Block diffusion over a model that is two tables: insertion and deletion, where texts end, what a request may set."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.decode.block_diffusion import BlockDiffusion, strategy_of
from jaxserve.decode.step import Strategy
from jaxserve.models.cache import Cache
from jaxserve.models.decoding import LEVENSHTEIN, RULES, Decoding
from tests.decode.blocks import POSITIONS, Asked, fill, hint
from tests.decode.test_levenshtein import DELETE, INSERT, MASK, Block, V, W


class Tables(nnx.Module):
    """A model whose scores depend on the token at a place, and on the place."""

    def __init__(self) -> None:
        self.of_token = nnx.Param(jnp.zeros((V, V)))
        self.of_place = nnx.Param(jnp.zeros((POSITIONS, V)))

    def __call__(self, tokens, start, mask, cache=None, row=0, span=None, real=None):
        places = (start[:, None] + jnp.arange(tokens.shape[1])) % POSITIONS
        return self.of_token[...][tokens] + self.of_place[...][places], ()

    def logits(self, hidden):
        return hidden


class Toy:
    """As much of a family as decoding needs."""

    def graphdef(self, dtype):
        return nnx.split(Tables())[0]

    def empty_cache(self, slots, positions, dtype):
        return Cache((), positions, slots)


def tables(seed, **boosts):
    draw = np.random.default_rng(seed)
    of_token, of_place = (draw.normal(size=(rows, V)).astype(np.float32) * 1.2 for rows in (V, POSITIONS))
    for name, token in (("mask", MASK), ("delete", DELETE), ("insert", INSERT)):
        of_place[:, token] += boosts.get(name, 0.0)
    return of_token, of_place


def params(of_token, of_place):
    return {"of_token": jnp.asarray(of_token), "of_place": jnp.asarray(of_place)}


STRATEGY = BlockDiffusion(W, MASK, delete_id=DELETE, insert_id=INSERT, alternatives=2)
EDITS = {"rule": LEVENSHTEIN, "threshold": 0.4, "edit_threshold": 0.2, "max_post_steps": 5}


def test_it_is_a_strategy():
    assert isinstance(STRATEGY, Strategy)
    assert hash(STRATEGY) == hash(dataclasses.replace(STRATEGY))
    assert (STRATEGY.widths, STRATEGY.block) == ((W,), W)


def requests(count):
    draw = np.random.default_rng(1)
    prompts = [draw.integers(0, 6, length).tolist() for length in draw.integers(1, 14, count)]
    return [Asked(prompt, (len(prompt) // W + 3) * W - len(prompt), EDITS) for prompt in prompts]


@pytest.mark.parametrize("seed", [0, 1])
def test_insertion_and_deletion_through_every_pass(seed):
    """Three blocks of many texts, against the loop by hand."""
    of_token, of_place = tables(seed, delete=0.6, insert=0.6, mask=0.3)
    asked = requests(24)
    filled, _ = fill(Toy(), params(of_token, of_place), STRATEGY, asked)
    total = np.zeros(3, int)
    for one, found in zip(asked, filled, strict=True):
        text, passes, events, right, drafted = list(one.prompt), [], np.zeros(3, int), 0, 0
        while len(text) < len(one.prompt) + one.tokens:
            start = len(text) // W * W
            block = Block(text[start:], EDITS["threshold"], EDITS["edit_threshold"], EDITS["max_post_steps"])
            while not block.final:
                block.read(of_token[block.canvas] + of_place[start : start + W])
                if block.canvas[block.given :] != [MASK] * (W - block.given):  # such a pass looks like one that commits
                    passes.append(block.canvas)
            drafted += W - block.given
            right += sum(a == b for a, b in zip(block.first, block.canvas, strict=True))
            text, events = text[:start] + block.canvas, events + block.events
        assert (found.text, found.passes) == (text[len(one.prompt) :], passes)
        count = found.tally
        assert [count[name] for name in ("edited", "inserted", "deleted")] == events.tolist()
        assert (count["drafted"], count["accepted"]) == (drafted, right)
        total += events
    assert (total > 20).all()


def corrected(logits_of, block, draft, settings):
    """A block that begins with a draft, by the joint threshold, one position after the other."""
    given = len(block)
    canvas = (block + draft + [MASK] * W)[:W]
    post, passes = 0, []
    while True:
        logits = logits_of(canvas).astype(np.float64)
        logits[:, [MASK, DELETE, INSERT]] = -np.inf
        shares = np.exp(logits - logits.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        masks = [at for at in range(given, W) if canvas[at] == MASK]
        fill = [at for at in masks if shares[at].max() > settings["threshold"]]
        fill = fill or sorted(masks, key=lambda at: -shares[at].max())[:1]
        post += not masks
        now = list(canvas)
        for at in range(given, W):
            edits = at not in masks and shares[at].max() > settings["edit_threshold"]
            if at in fill or edits:
                now[at] = int(shares[at].argmax())
        passes.append(now)
        if not masks and (now == canvas or post == settings["max_post_steps"]):
            return now, passes
        canvas = now


def test_a_draft_is_corrected():
    """Of each text two thirds are drafted, some with tokens that are no text; who edits nothing does not look at it."""
    of_token, of_place = tables(6)
    of_token += 2.0 * np.eye(V, dtype=np.float32)  # most of what stands there is agreed with
    settings = {"threshold": 0.4, "edit_threshold": 0.35, "max_post_steps": 4}
    draw = np.random.default_rng(9)
    asked = [
        dataclasses.replace(one, settings=settings, draft=draw.integers(0, 6, one.tokens * 2 // 3).tolist())
        for one in requests(24)
    ]
    for one in asked[::3]:
        one.draft[0:2] = [MASK, INSERT]
    filled, _ = fill(Toy(), params(of_token, of_place), STRATEGY, asked)
    agreed = 0
    for one, found in zip(asked, filled, strict=True):
        text, passes, right, wrong = list(one.prompt), [], 0, 0
        while len(text) < len(one.prompt) + one.tokens:
            start = len(text) // W * W
            at = len(text) - len(one.prompt)
            draft = one.draft[at : at + start + W - len(text)]
            draft = [MASK if token in (MASK, DELETE, INSERT) else token for token in draft]

            def logits_of(canvas, start=start):
                return of_token[canvas] + of_place[start : start + W]

            block, seen = corrected(logits_of, text[start:], draft, settings)
            pairs = [(was, now) for was, now in zip(draft, block[len(text) - start :], strict=False) if was != MASK]
            right, wrong = right + sum(a == b for a, b in pairs), wrong + sum(a != b for a, b in pairs)
            text, passes = text[:start] + block, passes + seen
        assert (found.text, found.passes) == (text[len(one.prompt) :], passes)
        count = found.tally
        assert (count["predicted_accepted"], count["predicted_rejected"]) == (right, wrong)
        assert count["drafted"] == count["accepted"] + count["rejected"] == len(found.text)
        agreed += right
    assert agreed > 50
    assert sum(one.tally["predicted_rejected"] for one in filled) > 50
    plain = [dataclasses.replace(one, settings=settings | {"edit_threshold": 1.0}) for one in asked]
    bare = [dataclasses.replace(one, draft=[]) for one in plain]
    ignored, without = (fill(Toy(), params(of_token, of_place), STRATEGY, some)[0] for some in (plain, bare))
    assert ignored == without


def test_a_draft_may_be_cut_and_stretched():
    """Levenshtein's rule on drafts, against the loop by hand: what is drafted was never a mask."""
    of_token, of_place = tables(7, delete=0.8, insert=0.8)
    draw = np.random.default_rng(10)
    asked = [dataclasses.replace(one, tokens=W - len(one.prompt) % W) for one in requests(24)]
    asked = [dataclasses.replace(one, draft=draw.integers(0, 6, one.tokens).tolist()) for one in asked]
    filled, _ = fill(Toy(), params(of_token, of_place), STRATEGY, asked)
    events = np.zeros(3, int)
    for one, found in zip(asked, filled, strict=True):
        start = len(one.prompt) // W * W
        block = Block(one.prompt[start:], EDITS["threshold"], EDITS["edit_threshold"], EDITS["max_post_steps"])
        block.canvas, block.original = one.prompt[start:] + one.draft, [False] * W
        while not block.final:
            block.read(of_token[block.canvas] + of_place[start : start + W])
        assert found.text == block.canvas[block.given :]
        events += block.events
    assert (events > 10).all()


def test_other_rules_never_say_an_instruction():
    asked = [dataclasses.replace(one, settings=EDITS | {"rule": rule}) for rule, one in enumerate(requests(5))]
    asked += requests(24)[5:]
    filled, _ = fill(Toy(), params(*tables(0, delete=3.0, insert=3.0, mask=3.0)), STRATEGY, asked)
    assert not {MASK, DELETE, INSERT} & {token for one in filled for token in one.text}
    assert all(one.tally["inserted"] == one.tally["deleted"] == 0 for one in filled[:5])
    assert all(one.tally["inserted"] + one.tally["deleted"] > 0 for one in filled[5:])


def test_a_text_ends_at_its_first_stop_token():
    """All before it is decided; what is behind it is not waited for, and cut."""
    settings = [{"threshold": 1.0, "rule": rule} for rule in range(4)] * 6
    asked = [dataclasses.replace(one, settings=own) for one, own in zip(requests(24), settings, strict=True)]
    weights = params(*tables(3))
    whole = fill(Toy(), weights, STRATEGY, asked)[0]
    ended = fill(Toy(), weights, STRATEGY, asked, stop_ids=[2, 4, -1])[0]
    saved = 0
    for long, short in zip(whole, ended, strict=True):
        ends = [at for at, token in enumerate(long.text) if token in (2, 4)]
        assert short.text == long.text[: ends[0] + 1] if ends else short.text == long.text
        assert short.passes == long.passes[: len(short.passes)]
        assert short.tally["drafted"] == len(short.text) + short.tally["wasted"]
        saved += short.passes[-1].count(MASK) if ends else 0
    assert saved > 5


def test_a_text_ends_at_its_limit():
    short = [dataclasses.replace(one, tokens=5) for one in requests(24)]
    short = [dataclasses.replace(one, settings={"threshold": 1.0, "rule": 2}) for one in short]  # from left to right
    long = [dataclasses.replace(one, tokens=25) for one in short]
    weights = params(*tables(4))
    both = (fill(Toy(), weights, STRATEGY, asked)[0] for asked in (short, long))
    for one, other in zip(*both, strict=True):
        assert one.text == other.text[:5]
        assert len(one.passes) == 5  # the rest of the block is not waited for
        assert one.tally["wasted"] == 0


def test_what_a_request_may_set():
    memory = STRATEGY.memory(3, POSITIONS)
    memory = dataclasses.replace(memory, step=memory.step + 7, canvas=memory.canvas * 0)
    told = hint(STRATEGY, {"threshold": 0.25, "rule": LEVENSHTEIN, "penalty": 2.0})
    after = STRATEGY.hand(memory, jnp.int32(1), told)
    assert after.rows.threshold.tolist() == [np.float32(0.9), 0.25, np.float32(0.9)]
    assert after.rows.rule.tolist() == [1, LEVENSHTEIN, 1]
    assert after.rows.penalty.tolist() == [0.0, 2.0, 0.0]
    assert (after.step.tolist(), after.canvas[:, 0].tolist()) == ([7, 0, 7], [0, MASK, 0])
    assert jax.tree.map(lambda leaf: leaf.dtype, after) == jax.tree.map(lambda leaf: leaf.dtype, memory)
    plain = BlockDiffusion(W, MASK, rule="sequential")
    after = plain.hand(plain.memory(2, POSITIONS), jnp.int32(0), hint(plain, {"rule": LEVENSHTEIN}))
    assert after.rows.rule.tolist() == [RULES.index("sequential")] * 2  # it has no tokens for it
    assert not math.isnan(float(after.rows.entropy_bound[0]))


def test_a_familys_facts_make_its_strategy():
    facts = Decoding("block", 8, 5, "levenshtein", 0.5, 0.25, 16, 4, 6, 7)
    strategy = strategy_of(facts, alternatives=3)
    assert strategy == BlockDiffusion(8, 5, "levenshtein", 0.5, 0.25, 16, 4, delete_id=6, insert_id=7, alternatives=3)
    rows = strategy.memory(2, POSITIONS).rows
    found = [row.tolist() for row in (rows.rule, rows.max_post_steps, rows.denoising_steps)]
    assert found == [[5, 5], [16, 16], [4, 4]]
