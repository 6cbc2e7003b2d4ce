"""Insertion and deletion against a loop over rows and positions, written from the rule's description."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.decode import levenshtein
from jaxserve.decode.levenshtein import Instructions
from tests.decode.test_unmasking import block_rows

W, V = 6, 10
MASK, DELETE, INSERT = 7, 8, 9
IDS = Instructions(MASK, DELETE, INSERT)
ROWS, PASSES = 1500, levenshtein.most_passes(W) + 1


class Block:
    """One row, by plain lists."""

    def __init__(self, given: list[int], threshold: float, edit_threshold: float, budget: int) -> None:
        self.given, self.threshold, self.edit_threshold, self.budget = len(given), threshold, edit_threshold, budget
        self.canvas = given + [MASK] * (W - len(given))
        self.original = [at >= len(given) for at in range(W)]
        self.first = [-1] * W
        self.post_steps = self.passes = 0
        self.states: list[list[int]] = []
        self.tried: list[set[int]] = [set() for _ in range(W)]
        self.final = False
        self.events = [0, 0, 0]
        self.circles = self.clean = 0

    def read(self, logits: np.ndarray) -> None:
        """A pass over the block."""
        masks = [at for at in range(self.given, W) if self.canvas[at] == MASK]
        originals = [at for at in masks if self.original[at]]
        if not originals:
            self.post_steps += 1
        cleaning = self.post_steps > self.budget or self.passes == W + 16
        logits = logits.astype(np.float64).copy()
        for at in range(W):
            banned = [MASK, DELETE, INSERT] if cleaning else [MASK] if at in originals else []
            logits[at, banned] = -np.inf
        shares = np.exp(logits - logits.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        best, sure = shares.argmax(-1).tolist(), shares.max(-1)

        if originals and not cleaning:
            need = 1 + len(masks) - len(originals)
            writes = [at for at in masks if sure[at] > self.threshold]
            if len(writes) < need:
                writes = sorted(masks, key=lambda at: (-sure[at], at))[:need]
        else:
            writes = list(masks)
        if self.edit_threshold < 1 and self.budget > 0:
            for at in range(self.given, W):
                if at not in masks and sure[at] > self.edit_threshold and best[at] != self.canvas[at]:
                    writes.append(at)
        writes.sort()
        changing = [at for at in writes if best[at] != self.canvas[at]]
        if self.canvas in self.states and changing and not cleaning:
            self.circles += 1
            at = min(changing, key=lambda at: (sure[at], at))
            row = logits[at].copy()
            row[list(self.tried[at])] = -np.inf
            best[at] = int(row.argmax())
        self.states.append(list(self.canvas))
        for at in writes:
            self.tried[at].add(best[at])

        after: list[tuple[int, bool, int]] = []
        for at in range(W):
            old, original, first = self.canvas[at], self.original[at], self.first[at]
            if at not in writes:
                after.append((old, original, first))
            elif best[at] == DELETE:
                self.events[2] += at not in masks
            elif best[at] == INSERT:
                self.events[1] += 1
                after += [(MASK, False, -1), (old, original, first)]
            else:
                self.events[0] += at not in masks and best[at] != old
                after.append((best[at], original, best[at] if at in masks and best[at] != MASK else first))
        after = (after + [(MASK, False, -1)] * W)[:W]
        self.clean += cleaning
        self.final = cleaning or not writes
        self.canvas, self.original, self.first = (list(column) for column in zip(*after, strict=True))
        self.passes += 1


def cases():
    """Prompts, settings and logits ``[passes, rows, w, v]``: half of the rows always read the same ones."""
    draw = np.random.default_rng(3)
    logits = draw.normal(size=(PASSES, ROWS, W, V)).astype(np.float32) * 1.5
    logits[:, ::2] = logits[:1, ::2]
    logits[..., DELETE] += draw.choice([-1.0, 0.5, 1.5], (1, ROWS, 1))
    logits[..., INSERT] += draw.choice([-1.0, 0.5, 1.5], (1, ROWS, 1))
    logits[..., MASK] += draw.choice([-1.0, 0.5], (1, ROWS, 1))
    settings = {
        "threshold": draw.choice([0.2, 0.5, 0.9], ROWS),
        "edit_threshold": draw.choice([0.0, 0.4, 1.0], ROWS, p=[0.6, 0.3, 0.1]),
        "max_post_steps": draw.choice([0, 3, 16], ROWS, p=[0.1, 0.3, 0.6]),
    }
    given = [draw.integers(0, 6, draw.integers(0, 4)).tolist() for _ in range(ROWS)]
    return given, settings, logits


def decoded(given, settings, logits, edit=levenshtein.edit):
    """All rows at once by the rule under test; the state behind every pass."""
    rows = block_rows(ROWS, **settings)
    fixed = np.zeros((ROWS, W), bool)
    canvas = np.full((ROWS, W), MASK, np.int32)
    for row, tokens in enumerate(given):
        canvas[row, : len(tokens)], fixed[row, : len(tokens)] = tokens, True
    fixed = jnp.asarray(fixed)

    def one(carry, logits):
        canvas, first, history, step, post_steps, events = carry
        masks = levenshtein.left(history, canvas, fixed, MASK)
        cleaning = levenshtein.cleans_up(rows, masks, step, post_steps)
        ids = jnp.arange(V)
        logits = jnp.where((masks | cleaning[:, None])[..., None] & (ids == MASK), -1e30, logits)
        logits = jnp.where(cleaning[:, None, None] & ((ids == DELETE) | (ids == INSERT)), -1e30, logits)
        shares = jax.nn.softmax(logits, axis=-1)
        token, confidence = jnp.argmax(shares, -1).astype(jnp.int32), jnp.max(shares, -1)

        def resample(at, tried):
            mine = jnp.take_along_axis(logits, at[:, None, None], axis=1)[:, 0]
            tried = jnp.any(tried[..., None] == ids, axis=1)
            return jnp.argmax(jnp.where(tried, -2e30, mine), -1).astype(jnp.int32)

        out = edit(rows, IDS, history, canvas, first, fixed, token, confidence, step, post_steps, resample)
        events = events + jnp.stack([out.edited, out.inserted, out.deleted], -1)
        carry = out.canvas, out.first, out.history, step + 1, out.post_steps, events
        return carry, (out.canvas, out.first, out.final, events)

    zeros = jnp.zeros(ROWS, jnp.int32)
    start = (jnp.asarray(canvas), jnp.full((ROWS, W), -1, jnp.int32), levenshtein.blank(ROWS, W), zeros, zeros,
             jnp.zeros((ROWS, 3), jnp.int32))  # fmt: skip
    return jax.tree.map(np.asarray, jax.jit(lambda logits: jax.lax.scan(one, start, logits)[1])(jnp.asarray(logits)))


def by_hand(given, settings, logits):
    """Blocks until they are final, and what differed from the rule under test."""
    for row, tokens in enumerate(given):
        names = ("threshold", "edit_threshold", "max_post_steps")
        block = Block(tokens, *(settings[name][row] for name in names))
        states = []
        while not block.final:
            block.read(logits[block.passes, row])
            states.append((list(block.canvas), list(block.first), block.final, list(block.events)))
        yield block, states


@pytest.fixture(scope="module")
def everything():
    data = cases()
    return data, list(by_hand(*data))


def differing(everything, states) -> int:
    wrong = 0
    for row, (_, expected) in enumerate(everything[1]):
        found = [tuple(part[step, row].tolist() for part in states) for step in range(len(expected))]
        wrong += found != expected
    return wrong


def test_it_is_the_loop_by_hand(everything):
    blocks = [block for block, _ in everything[1]]
    assert sum(block.circles for block in blocks) > 500  # everything happens
    assert sum(block.clean for block in blocks) > 300
    assert sum(block.passes == W + 17 for block in blocks) > 5
    assert (np.sum([block.events for block in blocks], 0) > 2000).all()
    assert all(not {MASK, DELETE, INSERT} & set(block.canvas) for block in blocks)
    assert differing(everything, decoded(*everything[0])) == 0


def with_fault(name, change):
    """The rule with one of its functions replaced."""

    def edit(*arguments):
        kept = getattr(levenshtein, name)
        setattr(levenshtein, name, change(kept))
        try:
            return levenshtein.edit(*arguments)
        finally:
            setattr(levenshtein, name, kept)

    return edit


FAULTS = {
    "runs in circles": ("_without_circles", lambda _: lambda history, canvas, chosen, token, *rest: token),
    "marks stay where they are": (
        "_spliced",
        lambda kept: lambda *given: (*kept(*given)[:2], given[-1]),
    ),
    "drafts stay where they are": (
        "_spliced",
        lambda kept: lambda *given: (kept(*given)[0], given[3], kept(*given)[2]),
    ),
    "one mask at a time": (
        "filled",
        lambda kept: lambda rows, masked, sure, entropy, count: kept(rows, masked, sure, entropy, count * 0 + 1),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_would_show(everything, fault):
    assert differing(everything, decoded(*everything[0], with_fault(*FAULTS[fault]))) > 20


def test_a_splice():
    written = jnp.asarray([[1, INSERT, DELETE, 4, INSERT, 6], [DELETE, DELETE, 3, 4, 5, 6]])
    before = jnp.asarray([[1, 2, 3, 4, 5, 6]] * 2)
    first = jnp.asarray([[11, 12, 13, 14, 15, 16]] * 2)
    original = jnp.asarray([[False, True, True, True, False, True]] * 2)
    tokens, first, original = levenshtein._spliced(IDS, written, before, first, original)
    assert tokens.tolist() == [[1, MASK, 2, 4, MASK, 5], [3, 4, 5, 6, MASK, MASK]]
    assert first.tolist() == [[11, -1, 12, 14, -1, 15], [13, 14, 15, 16, -1, -1]]
    assert original.tolist() == [[False, False, True, True, False, False], [True, True, False, True, False, False]]
