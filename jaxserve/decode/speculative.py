"""The speculative strategy: drafts of several tokens, verified in one pass, without a trace in the text.

Each position's token is chosen from the scores of this pass by the position's own key, exactly as it would be without
drafts; drafts that agree are kept, and the first token that does not replaces its draft (Leviathan et al. 2023, with a
drafter that is certain of its guess). Since a pass computes the same bits for a position however wide it is, the text
is the same with drafts and without, greedy or sampled. What drafts cost and gain is only time.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxserve.decode.lookup import agreeing, following, latest_match, tail_of
from jaxserve.decode.places import appended, moved
from jaxserve.decode.sampling import SamplingRows, TokenScores, choose, scores_each
from jaxserve.decode.step import DecodeState, Hint, Model, Proposal, Verdict, causal
from jaxserve.decode.tally import tally
from jaxserve.pytree import pytree

# What a row believes of a draft before it has tried any, and how many trials that belief weighs.
BELIEF, WEIGHT = 0.5, 2.0
# Of what was tried so much counts after another try, and after a pass without one: who gave up tries again in time.
TRIED, UNTRIED = 0.9, 0.98


def price_of(width: int) -> str:
    """The setting that says what a pass of a width costs."""
    return f"price_{width}"


@pytree
class DraftMemory:
    """What is known of each slot's drafts.

    Attributes:
        prediction: the caller's guess at the output; ``predicted`` is its length.
        cursor: where in it the text goes on, if it does; -1 where it has left it.
        most: drafts that the request allows.
        price: time of a pass of each width, in passes of one token.
        kept, tried: drafts of late that were kept, and that were tried; older ones count less.
    """

    prediction: Int[Array, "b s"]
    predicted: Int[Array, " b"]
    cursor: Int[Array, " b"]
    most: Int[Array, " b"]
    price: Float[Array, "b i"]
    kept: Float[Array, " b"]
    tried: Float[Array, " b"]


@pytree
class Drafts:
    """One pass's drafts: ``tokens``, how many of them, and where in the prediction they stand (-1: elsewhere)."""

    tokens: Int[Array, "b k"]
    count: Int[Array, " b"]
    cursor: Int[Array, " b"]


@dataclasses.dataclass(frozen=True)
class Speculative:
    """Up to ``lengths[-1]`` drafts a pass, found in the text or in the caller's prediction.

    How many drafts a pass reads is decided anew for each, on the device: as many as make the most tokens for its time,
    by what the drafts of each row were worth of late and what a pass of each width costs.

    Attributes:
        lengths: numbers of drafts for which passes are compiled, ascending; a pass without drafts is, too.
        alternatives: most likely tokens reported beside each chosen one, where a row asks.
    """

    lengths: tuple[int, ...] = (3, 7)
    alternatives: int = 20

    @property
    def widths(self) -> tuple[int, ...]:
        """The last token and its drafts."""
        return (1, *(1 + length for length in self.lengths))

    @property
    def block(self) -> None:
        """Each position sees those before it."""

    @property
    def settings(self) -> tuple[str, ...]:
        """``drafts``: at most so many a pass; ``price_<width>``: time of such a pass in passes of one token."""
        return ("drafts", *map(price_of, self.widths[1:]))

    def memory(self, slots: int, positions: int) -> DraftMemory:
        """Nobody has drafts."""

        def zeros(*shape: int) -> Int[Array, "..."]:
            return jnp.zeros((slots, *shape), jnp.int32)

        return DraftMemory(
            prediction=zeros(positions),
            predicted=zeros(),
            cursor=zeros() - 1,
            most=zeros(),
            price=jnp.ones((slots, len(self.lengths)), jnp.float32),
            kept=jnp.zeros(slots, jnp.float32),
            tried=jnp.zeros(slots, jnp.float32),
        )

    def hand(self, memory: DraftMemory, slot: Int[Array, ""], hint: Hint) -> DraftMemory:
        """The caller's prediction, and how many drafts are wanted."""
        drafts, price = hint.settings[0], hint.settings[1:]
        most = jnp.where(jnp.isnan(drafts), self.lengths[-1], drafts).astype(jnp.int32)
        return DraftMemory(
            prediction=memory.prediction.at[slot].set(hint.draft),
            predicted=memory.predicted.at[slot].set(hint.drafted),
            cursor=memory.cursor.at[slot].set(jnp.where(hint.drafted > 0, 0, -1)),
            most=memory.most.at[slot].set(most),
            price=memory.price.at[slot].set(jnp.where(jnp.isnan(price), 1.0, price)),
            kept=memory.kept.at[slot].set(0.0),
            tried=memory.tried.at[slot].set(0.0),
        )

    def propose(self, model: Model, state: DecodeState, rows: SamplingRows) -> Proposal:  # noqa: ARG002
        """Known tokens that have no entry yet; behind the last of them drafts."""
        width = self.widths[-1]
        given = state.known - state.length
        drafts = self._drafts(state, rows, given)
        at = state.length[:, None] + jnp.arange(width)
        known = jnp.take_along_axis(state.tokens, jnp.minimum(at, state.tokens.shape[1] - 1), axis=1)
        # Only a row that has nothing else to read has drafts, from its second column on.
        shifted = jnp.pad(drafts.tokens, ((0, 0), (1, 0)))
        tokens = jnp.where(jnp.arange(width) < given[:, None], known, shifted)
        mask = jnp.broadcast_to(causal(width), (len(given), width, width))
        return Proposal(tokens, mask, jnp.minimum(given, width) + drafts.count, drafts)

    def accept(
        self, logits: Float[Array, "b w v"], proposal: Proposal, state: DecodeState, rows: SamplingRows
    ) -> Verdict:
        """The drafts that agree with what is chosen, and one token more."""
        w, drafts = logits.shape[1], proposal.memory
        given = state.known - state.length
        read = jnp.minimum(given, w)  # known tokens of this pass; the scores of the last one are for a new token
        chosen, scores = self._choose(logits, proposal, state, rows)
        following_ones = jnp.roll(proposal.tokens, -1, axis=1)
        kept = agreeing(chosen, following_ones, jnp.minimum(drafts.count, w - 1))
        new = jnp.where(given > w, 0, kept + 1)
        tokens = moved(chosen, read - 1, 0)
        scores = jax.tree.map(lambda leaf: moved(leaf, read - 1, 0), scores)
        memory = self._learned(state.memory, drafts, kept, tokens, new)
        from_caller = drafts.cursor >= 0
        return Verdict(
            tokens=tokens,
            count=new,
            advance=read + kept,
            scores=scores,
            memory=memory,
            tally=tally(
                len(new),
                drafted=drafts.count,
                accepted=kept,
                rejected=drafts.count - kept,
                predicted_accepted=jnp.where(from_caller, kept, 0),
                predicted_rejected=jnp.where(from_caller, drafts.count - kept, 0),
            ),
        )

    def _choose(
        self, logits: Float[Array, "b w v"], proposal: Proposal, state: DecodeState, rows: SamplingRows
    ) -> tuple[Int[Array, "b w"], TokenScores]:
        """The tokens behind each column, column by column as far as any row's drafts agree.

        So sampling costs what the tokens that come of it would cost without drafts, and it is the very same
        computation, bit for bit.
        """
        (b, w, _), drafts = logits.shape, proposal.memory
        text = appended(state.tokens, drafts.tokens, state.known, drafts.count)
        first = jnp.minimum(state.known - state.length, w) - 1  # the first column whose scores are for a new token
        most = min(self.alternatives, logits.shape[-1])

        def go_on(carry: tuple[Array, Bool[Array, " b"], Array, TokenScores]) -> Bool[Array, ""]:
            column, going, *_ = carry
            return (column < w) & jnp.any(going)

        def choose_next(
            carry: tuple[Array, Bool[Array, " b"], Array, TokenScores],
        ) -> tuple[Array, Bool[Array, " b"], Array, TokenScores]:
            column, going, chosen, scores = carry
            here = jax.lax.dynamic_index_in_dim(logits, column, axis=1, keepdims=False)
            token = choose(here, rows, text, state.length + 1 + column)
            one = scores_each(here[:, None], token[:, None], rows.alternatives, most)
            draft = jax.lax.dynamic_index_in_dim(proposal.tokens, (column + 1) % w, axis=1, keepdims=False)
            agreed = (token == draft) & (column - first < drafts.count)
            put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=column, axis=1)
            return (
                column + 1,
                going & (agreed | (column < first)),
                put(chosen, token),
                jax.tree.map(lambda all_of_them, new: put(all_of_them, new[:, 0]), scores, one),
            )

        none = TokenScores(
            jnp.zeros((b, w), logits.dtype), jnp.zeros((b, w, most), jnp.int32), jnp.zeros((b, w, most), logits.dtype)
        )
        start = jnp.min(jnp.where(state.active, first, w - 1))
        blank = (start, state.active, jnp.zeros((b, w), jnp.int32), none)
        _, _, chosen, scores = jax.lax.while_loop(go_on, choose_next, blank)
        return chosen, scores

    def _drafts(self, state: DecodeState, rows: SamplingRows, given: Int[Array, " b"]) -> Drafts:
        memory, most = state.memory, self.lengths[-1]
        tail = tail_of(state.tokens, state.known)
        place, length = latest_match(state.tokens, state.known - 1, tail)
        again, agreed = latest_match(memory.prediction, memory.predicted, tail)
        cursor = jnp.where((memory.cursor < 0) & (agreed > 0) & (agreed >= length), again, memory.cursor)
        left = memory.predicted - cursor
        from_caller = (cursor >= 0) & (left > 0)
        tokens = jnp.where(
            from_caller[:, None],
            following(memory.prediction, memory.predicted, cursor, most),
            following(state.tokens, state.known, place, most),
        )
        there = jnp.where(from_caller, left, jnp.where(length > 0, most, 0))
        room = jnp.minimum(jnp.minimum(memory.most, most), rows.limit - state.known - 1)
        count = jnp.clip(jnp.minimum(there, room), 0, most)
        count = jnp.where(state.active & (given == 1), count, 0)
        count = self._worthwhile(memory, state.active, count)
        return Drafts(tokens, count, jnp.where(from_caller, cursor, -1))

    def _worthwhile(self, memory: DraftMemory, active: Bool[Array, " b"], count: Int[Array, " b"]) -> Int[Array, " b"]:
        """As many drafts as make the most tokens for the time of the pass that they need."""
        belief = (memory.kept + BELIEF * WEIGHT) / (memory.tried + WEIGHT)

        def expected(length: int) -> Float[Array, ""]:
            each = jnp.minimum(count, length)
            gain = belief * (1 - belief**each) / (1 - belief)  # of drafts that stand or fall with those before them
            return jnp.sum(jnp.where(active, 1 + gain, 0.0))

        # A row's price is what the device measured, the same in all; an empty one has 1.
        price = jnp.max(jnp.where(active[:, None], memory.price, 1.0), axis=0)
        rates = [expected(0)] + [expected(length) / price[index] for index, length in enumerate(self.lengths)]
        best = jnp.argmax(jnp.stack(rates))
        return jnp.minimum(count, jnp.asarray((0, *self.lengths), jnp.int32)[best])

    def _learned(
        self,
        memory: DraftMemory,
        drafts: Drafts,
        kept: Int[Array, " b"],
        tokens: Int[Array, "b w"],
        count: Int[Array, " b"],
    ) -> DraftMemory:
        """What the pass has shown: how good drafts are, and whether the text still follows the prediction."""
        tries = kept + (kept < drafts.count)
        fade = jnp.where(drafts.count > 0, TRIED, UNTRIED)
        cursor = jnp.where(drafts.cursor >= 0, drafts.cursor, memory.cursor)
        ahead = jnp.clip(cursor[:, None] + jnp.arange(tokens.shape[1]), 0, memory.prediction.shape[1] - 1)
        followed = agreeing(tokens, jnp.take_along_axis(memory.prediction, ahead, axis=1), count) == count
        within = cursor + count <= memory.predicted
        return DraftMemory(
            prediction=memory.prediction,
            predicted=memory.predicted,
            cursor=jnp.where((cursor >= 0) & followed & within, cursor + count, -1),
            most=memory.most,
            price=memory.price,
            kept=memory.kept * fade + kept,
            tried=memory.tried * fade + tries,
        )
