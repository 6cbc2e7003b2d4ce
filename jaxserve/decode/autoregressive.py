"""The autoregressive strategy: a pass reads the last token and keeps the one that it samples."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.decode.sampling import SamplingRows, choose, scores_each
from jaxserve.decode.step import DecodeState, Hint, Model, Proposal, Verdict
from jaxserve.decode.tally import tally


@dataclasses.dataclass(frozen=True)
class Autoregressive:
    """One token a step.

    Attributes:
        alternatives: most likely tokens reported beside each chosen one, where a row asks.
    """

    alternatives: int = 20

    @property
    def widths(self) -> tuple[int, ...]:
        """One token a pass."""
        return (1,)

    @property
    def block(self) -> None:
        """Each position sees those before it."""

    @property
    def settings(self) -> tuple[str, ...]:
        """None."""
        return ()

    def memory(self, slots: int, positions: int) -> None:
        """Nothing is remembered: the pending token stands in ``DecodeState.tokens``."""

    def hand(self, memory: None, slot: Int[Array, ""], hint: Hint) -> None:
        """There is nothing to remember."""

    def propose(self, model: Model, state: DecodeState, rows: SamplingRows) -> Proposal:  # noqa: ARG002
        """The last known token, which has no cache entry yet."""
        last = jnp.take_along_axis(state.tokens, state.length[:, None], axis=1)
        return Proposal(last, jnp.ones((last.shape[0], 1, 1), bool), jnp.ones_like(state.length), None)

    def accept(
        self,
        logits: Float[Array, "b 1 v"],
        proposal: Proposal,  # noqa: ARG002
        state: DecodeState,
        rows: SamplingRows,
    ) -> Verdict:
        """The sampled token; the position just read is final. Nothing is sampled while known tokens are read again."""
        token = choose(logits[:, 0], rows, state.tokens, state.known)[:, None]
        one = jnp.ones_like(state.length)
        count = jnp.where(state.known - state.length > 1, 0, one)
        scores = scores_each(logits, token, rows.alternatives, min(self.alternatives, logits.shape[-1]))
        return Verdict(token, count, one, scores, None, tally(len(count)))
