"""Block diffusion: a pass reads a block of masks and guesses, and keeps what it is sure of until the block is decided.

Knows blocks, their canvas and when one is final. Which masks are filled and which tokens edited is said by
``unmasking`` and ``levenshtein``. Every slot stands at a step of its own, so requests come and go in the middle of
others' blocks.

Positions of a block see each other and everything before it (SDAR, arXiv 2510.06303; LLaDA2, arXiv 2512.15745). While
any of them may change, its cache entries are scratch: a block is committed by a pass that has read its final tokens.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxserve.decode import levenshtein
from jaxserve.decode.block_memory import (
    BlockMemory,
    by_rows,
    default_rows,
    draft_at,
    ends,
    joined,
    with_block,
    with_settings,
)
from jaxserve.decode.levenshtein import Edited, Instructions
from jaxserve.decode.places import moved
from jaxserve.decode.sampling import SamplingRows, TokenScores, choose, choose_each, scores_if
from jaxserve.decode.step import DecodeState, Hint, Model, Proposal, Verdict, causal
from jaxserve.decode.tally import tally
from jaxserve.decode.unmasking import BlockRows, admissible, due, filled, overwritten
from jaxserve.models.decoding import LEVENSHTEIN, RULES, Decoding

Banned = tuple[tuple[int, Bool[Array, "b w"]], ...]


@dataclasses.dataclass(frozen=True)
class BlockDiffusion:
    """One block a slot, several tokens a pass, corrected until it is final.

    A block's given positions (the prompt's remainder, or what was emitted before a fault) stand at its head; they are
    never masked and never edited. A block is emitted in the pass that makes it final. If that pass changed nothing, it
    has read the final tokens and commits the block, too; else the next pass does, which finds all of it given. With
    ``ahead`` a pass that commits, or may find that nothing is left to edit, reads the next block as well: a pass less
    for each block. It is twice as wide for every row, so it is made only where at least half of the active rows do so.

    Where a row edits, its caller's draft stands in each block from the beginning, and is corrected like anything else.

    A text ends at its first stop token, or at its limit, once everything up to there is decided and, where tokens are
    edited, a pass has left all of it as it is; the rest of the block is not waited for.

    A token's log-probability is the model's own for its place in the pass that made the block final: given the prefix
    and the block as that pass read it. Where the token stood there already, the model has seen it: it says how much the
    model agrees with the token in its place, not how likely it was to be written, which no left-to-right product gives
    in a model that writes in any order.

    Attributes:
        mask_id: the token of what is not decided.
        rule: a name of ``decoding.RULES``.
        threshold, edit_threshold, max_post_steps, denoising_steps, penalty, entropy_bound: where a request does not
            say; see ``unmasking.BlockRows``.
        delete_id, insert_id: tokens that Levenshtein's rule carries out; other rules never choose them.
        ahead: a pass that commits a block may read the next one, too; ``Verdict.tokens`` are two blocks then.
        alternatives: most likely tokens reported beside each chosen one, where a row asks.
    """

    block: int
    mask_id: int
    rule: str = "low_confidence_dynamic"
    threshold: float = 0.9
    edit_threshold: float = 1.0
    max_post_steps: int = 0
    denoising_steps: int = 1024  # no more than one mask is due in each
    penalty: float = 0.0
    entropy_bound: float = 0.35
    delete_id: int | None = None
    insert_id: int | None = None
    ahead: bool = False
    alternatives: int = 20

    @property
    def widths(self) -> tuple[int, ...]:
        """A block, or one that is committed and the next."""
        return (self.block, 2 * self.block) if self.ahead else (self.block,)

    @property
    def settings(self) -> tuple[str, ...]:
        """The fields of ``BlockRows``; a rule is its number."""
        return tuple(field.name for field in dataclasses.fields(BlockRows))  # type: ignore[arg-type]

    @property
    def instructions(self) -> Instructions | None:
        """Tokens that edit, where the model has them."""
        if self.delete_id is None or self.insert_id is None:
            return None
        return Instructions(self.mask_id, self.delete_id, self.insert_id)

    def memory(self, slots: int, positions: int) -> BlockMemory:
        """Nothing decided, in no slot."""
        rows = default_rows(BlockRows, slots, self._defaults())
        return self._anew(rows, jnp.full((slots, positions), -1, jnp.int32))

    def hand(self, memory: BlockMemory, slot: Int[Array, ""], hint: Hint) -> BlockMemory:
        """A new request's draft and settings; what it does not set, or the model cannot do, is the strategy's."""
        told = dict(zip(self.settings, hint.settings, strict=True))
        if self.instructions is None:
            told["rule"] = jnp.where(told["rule"] == LEVENSHTEIN, jnp.nan, told["rule"])
        rows = with_settings(memory.rows, slot, told, self._defaults())
        given = (jnp.arange(len(hint.draft)) < hint.drafted) & (hint.draft != self.mask_id)
        if self.instructions is not None:
            given &= ~self.instructions.among(hint.draft)
        draft = memory.draft.at[slot].set(jnp.where(given, hint.draft, -1))
        fresh = self._anew(rows, draft)
        kept = dataclasses.replace(memory, rows=rows, draft=draft)
        return by_rows(jnp.arange(len(memory.step)) == slot, fresh, kept)

    def propose(self, model: Model, state: DecodeState, rows: SamplingRows) -> Proposal:  # noqa: ARG002
        """The canvas, with what is given in its place."""
        memory: BlockMemory = state.memory
        width, positions = self.widths[-1], state.tokens.shape[1]
        places = state.length[:, None] + jnp.arange(width)
        known = jnp.take_along_axis(state.tokens, jnp.minimum(places, positions - 1), axis=1)
        drafted = self._drafted(memory, rows, places)
        canvas = jnp.where(drafted >= 0, drafted, self.mask_id)
        begun = (memory.step > 0)[:, None]
        canvas = canvas.at[:, : self.block].set(jnp.where(begun, memory.canvas, canvas[:, : self.block]))
        canvas = jnp.where(places < state.known[:, None], known, canvas)
        mask = jnp.broadcast_to(causal(width, self.block), (*canvas.shape, width))
        asks = state.active & self._commits(memory, canvas[:, : self.block], places[:, : self.block], state.known)
        # The second half is written behind rows that do not commit, too, where nothing reads it: there must be room.
        room = jnp.max(jnp.where(state.active, state.length, 0)) + width <= positions
        wide = asks & room & (2 * jnp.sum(asks) >= jnp.sum(state.active))
        return Proposal(canvas, mask, jnp.where(wide, width, self.block), None)

    def accept(
        self, logits: Float[Array, "b w v"], proposal: Proposal, state: DecodeState, rows: SamplingRows
    ) -> Verdict:
        """What the pass decides, and whether that makes the block final."""
        w, canvas = self.block, proposal.tokens
        one = self._judged(logits[:, :w], canvas[:, :w], state, rows)
        if not self.ahead:
            return one
        shown = w - jnp.clip(state.known - state.length, 0, w)
        if logits.shape[1] == w:
            return joined(one, None, shown, self.mask_id)
        # What a row commits stands before its next block from now on, unless its text ends there.
        emitted = (jnp.arange(w) < one.count[:, None])[..., None]
        stopped = jnp.any(emitted & (one.tokens[..., None] == rows.stop_ids[:, None, :]), axis=(1, 2))
        over = stopped | (state.known + one.count >= rows.limit)
        going = (proposal.count > w) & (one.advance == w) & ~over
        text = with_block(state.tokens, canvas[:, :w], state.length)
        behind = dataclasses.replace(
            state, tokens=text, length=state.length + w, known=state.known + one.count, memory=one.memory
        )
        two = self._judged(logits[:, w:], canvas[:, w:], behind, rows)
        nothing = dataclasses.replace(
            two, tokens=jnp.full_like(two.tokens, self.mask_id), count=jnp.zeros_like(two.count),
            advance=jnp.zeros_like(two.advance), memory=one.memory, tally=jnp.zeros_like(two.tally),
        )  # fmt: skip
        return joined(one, by_rows(going, two, nothing), shown, self.mask_id)

    def _commits(
        self, memory: BlockMemory, canvas: Int[Array, "b w"], places: Int[Array, "b w"], known: Int[Array, " b"]
    ) -> Bool[Array, " b"]:
        """Rows whose block this pass may commit: all is given, or decided and looked at again for the first time."""
        given = places < known[:, None]
        decided = jnp.all(given | (canvas != self.mask_id), axis=1)
        return jnp.all(given, axis=1) | (decided & (memory.post_steps == 0))

    def _judged(
        self, logits: Float[Array, "b w v"], canvas: Int[Array, "b w"], state: DecodeState, rows: SamplingRows
    ) -> Verdict:
        """The verdict on one block."""
        w = self.block
        given = jnp.clip(state.known - state.length, 0, w)
        fixed = jnp.arange(w) < given[:, None]
        whole = given == w
        drafted = jnp.where(fixed, -1, self._drafted(state.memory, rows, state.length[:, None] + jnp.arange(w)))
        memory = self._begun(state.memory, canvas, drafted)
        after = self._updated(logits, canvas, fixed, dataclasses.replace(state, memory=memory), rows)
        ended = ends(after.canvas, self.mask_id, fixed, state.length, rows, self._settling(memory.rows, canvas))
        ready = (after.final | ended) & ~whole
        advance = jnp.where(whole | (ready & after.final & ~after.changed), w, 0)
        decided = ~fixed & (after.canvas != self.mask_id)
        drafts = (after.first >= 0) & ~fixed & ready[:, None]
        right = drafts & (after.first == after.canvas)
        predicted = (drafted >= 0) & ready[:, None]
        confirmed = predicted & (drafted == after.canvas)
        counted = tally(
            len(given),
            drafted=drafts.sum(1),
            accepted=right.sum(1),
            rejected=(drafts & ~right).sum(1),
            predicted_accepted=confirmed.sum(1),
            predicted_rejected=(predicted & ~confirmed).sum(1),
            edited=after.edited,
            inserted=after.inserted,
            deleted=after.deleted,
            blocks=ready.astype(jnp.int32),
            post_steps=jnp.where(whole | jnp.any((canvas == self.mask_id) & ~fixed, axis=1), 0, 1),
        )
        kept = dataclasses.replace(
            memory, canvas=after.canvas, first=after.first, step=memory.step + 1, post_steps=after.post_steps,
            history=after.history,
        )  # fmt: skip
        return Verdict(
            tokens=moved(after.canvas, given, self.mask_id),
            count=jnp.where(ready, decided.sum(1), 0),  # behind an end that was not waited for masks may be left
            advance=advance,
            scores=self._scores(logits, after.canvas, given, ready, rows),
            memory=by_rows((advance > 0) | ready, self._anew(memory.rows, memory.draft), kept),
            tally=counted,
        )

    def _defaults(self) -> dict[str, int | float]:
        """By the names of ``settings``."""
        return {
            "rule": RULES.index(self.rule),
            "threshold": self.threshold,
            "edit_threshold": self.edit_threshold,
            "max_post_steps": self.max_post_steps,
            "denoising_steps": self.denoising_steps,
            "penalty": self.penalty,
            "entropy_bound": self.entropy_bound,
        }

    def _anew(self, rows: BlockRows, draft: Int[Array, "b s"]) -> BlockMemory:
        """Blocks of which nothing is decided."""
        slots = len(draft)
        shape, zeros = (slots, self.block), jnp.zeros(slots, jnp.int32)
        history = None if self.instructions is None else levenshtein.blank(slots, self.block)
        masks, nothing = jnp.full(shape, self.mask_id, jnp.int32), jnp.full(shape, -1, jnp.int32)
        return BlockMemory(masks, nothing, zeros, jnp.zeros_like(zeros), rows, draft, history)

    def _drafted(self, memory: BlockMemory, rows: SamplingRows, places: Int[Array, "b w"]) -> Int[Array, "b w"]:
        """The caller's draft at some places of the text; -1 where there is none, or where the row would not edit it."""
        return jnp.where(memory.rows.edits[:, None], draft_at(memory.draft, places, rows), -1)

    def _begun(self, memory: BlockMemory, canvas: Int[Array, "b w"], drafted: Int[Array, "b w"]) -> BlockMemory:
        """The memory of blocks of which some are about to be read for the first time."""
        new = (memory.step == 0)[:, None]
        first, history = jnp.where(new, drafted, memory.first), memory.history
        if history is not None:
            original = jnp.where(new, canvas == self.mask_id, history.original)
            history = dataclasses.replace(history, original=original)
        return dataclasses.replace(memory, first=first, history=history)

    def _updated(
        self,
        logits: Float[Array, "b w v"],
        canvas: Int[Array, "b w"],
        fixed: Bool[Array, "b w"],
        state: DecodeState,
        rows: SamplingRows,
    ) -> Edited:
        """The block behind the pass."""
        memory: BlockMemory = state.memory
        places = state.length[:, None] + jnp.arange(self.block)
        text = with_block(state.tokens, canvas, state.length)
        left = jnp.take_along_axis(text, jnp.maximum(places[:, :1] - 1, 0), axis=1)[:, 0]
        before = jnp.where(state.length > 0, left, -1)
        choice = admissible(logits, memory.rows, canvas, before, self._banned(memory, canvas, fixed))
        token, confidence, entropy = choose_each(choice, rows, text, state.length, memory.step)
        masked = (canvas == self.mask_id) & ~fixed
        fill = filled(memory.rows, masked, confidence, entropy, due(memory.rows, memory.step, self.block))
        plain = _thresholded(memory, canvas, fixed, masked, fill, token, confidence)
        if self.instructions is None or memory.history is None:
            return plain

        def resample(at: Int[Array, " b"], tried: Int[Array, "b n"]) -> Int[Array, " b"]:
            here = jnp.take_along_axis(choice, at[:, None, None], axis=1)
            told = jnp.arange(here.shape[-1])
            again = jnp.any(tried[..., None] == told, axis=1)
            return choose(jnp.where(again, -jnp.inf, here[:, 0]), rows, text, state.length + at)

        edited = levenshtein.edit(
            memory.rows, self.instructions, memory.history, canvas, memory.first, fixed, token, confidence,
            memory.step, memory.post_steps, resample,
        )  # fmt: skip
        return by_rows(memory.rows.rule == LEVENSHTEIN, edited, plain)

    def _banned(self, memory: BlockMemory, canvas: Int[Array, "b w"], fixed: Bool[Array, "b w"]) -> Banned:
        """What may not be chosen where. A mask never may, but for edits by Levenshtein's rule."""
        everywhere = jnp.ones_like(fixed)
        if self.instructions is None or memory.history is None:
            return ((self.mask_id, everywhere),)
        ids = self.instructions
        first_masks = levenshtein.left(memory.history, canvas, fixed, self.mask_id)
        cleaning = levenshtein.cleans_up(memory.rows, first_masks, memory.step, memory.post_steps)
        text_only = ((memory.rows.rule != LEVENSHTEIN) | cleaning)[:, None] & everywhere
        return (ids.mask, text_only | first_masks), (ids.delete, text_only), (ids.insert, text_only)

    def _settling(self, rows: BlockRows, canvas: Int[Array, "b w"]) -> Int[Array, "b w"]:
        """The block that a text's end has to be found in again; -1 where whatever is decided will do."""
        return jnp.where((rows.edits | (rows.rule == LEVENSHTEIN))[:, None], canvas, -1)

    def _scores(
        self,
        logits: Float[Array, "b w v"],
        tokens: Int[Array, "b w"],
        given: Int[Array, " b"],
        ready: Bool[Array, " b"],
        rows: SamplingRows,
    ) -> TokenScores:
        """Of what is emitted; nothing is looked up in passes that emit nothing."""
        scores = scores_if(jnp.any(ready), logits, tokens, rows.alternatives, self.alternatives)
        aligned: TokenScores = jax.tree.map(lambda leaf: moved(leaf, given, 0), scores)
        return aligned


def strategy_of(decoding: Decoding, alternatives: int) -> BlockDiffusion:
    """The strategy that a family's facts ask for."""
    return BlockDiffusion(
        block=decoding.block,
        mask_id=decoding.mask_id,
        rule=decoding.rule,
        threshold=decoding.threshold,
        edit_threshold=decoding.edit_threshold,
        max_post_steps=decoding.post_steps,
        denoising_steps=decoding.denoising_steps,
        delete_id=decoding.delete_id,
        insert_id=decoding.insert_id,
        alternatives=alternatives,
    )


def _thresholded(
    memory: BlockMemory,
    canvas: Int[Array, "b w"],
    fixed: Bool[Array, "b w"],
    masked: Bool[Array, "b w"],
    fill: Bool[Array, "b w"],
    token: Int[Array, "b w"],
    confidence: Float[Array, "b w"],
) -> Edited:
    """The rules that keep every token in its place.

    A block is final when its last mask is filled. Where tokens are edited it is not before a pass finds no mask and
    changes nothing, or no such pass is left to the row.
    """
    rows = memory.rows
    over = overwritten(rows, canvas, ~masked & ~fixed, token, confidence)
    after = jnp.where(fill | over, token, canvas)
    settled = ~jnp.any(masked, axis=1)
    post_steps = (memory.post_steps + settled).astype(jnp.int32)
    changed = jnp.any(fill | over, axis=1)
    corrected = settled & (~changed | (post_steps >= rows.max_post_steps))
    zeros = jnp.zeros_like(post_steps)
    return Edited(
        canvas=after,
        first=jnp.where(fill, token, memory.first),
        history=memory.history,
        final=jnp.where(rows.edits, corrected, ~jnp.any(masked & ~fill, axis=1)),
        changed=changed,
        post_steps=post_steps,
        edited=jnp.sum(over, axis=1).astype(jnp.int32),
        inserted=zeros,
        deleted=zeros,
    )
