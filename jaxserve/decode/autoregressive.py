"""The autoregressive strategy: a pass reads the last token and keeps the one that it samples."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.decode.sampling import SamplingRows, choose, token_scores
from jaxserve.decode.step import DecodeState, Proposal, Verdict


@dataclasses.dataclass(frozen=True)
class Autoregressive:
    """One token a step.

    Attributes:
        alternatives: most likely tokens reported beside each chosen one, where a row asks.
    """

    alternatives: int = 20

    @property
    def width(self) -> int:
        """One token a pass."""
        return 1

    def memory(self, slots: int) -> None:
        """Nothing is remembered: the pending token stands in ``DecodeState.tokens``."""

    def propose(self, state: DecodeState, rows: SamplingRows) -> Proposal:  # noqa: ARG002
        """The last known token, which has no cache entry yet."""
        last = jnp.take_along_axis(state.tokens, state.length[:, None], axis=1)
        return Proposal(tokens=last, mask=jnp.ones((last.shape[0], 1, 1), bool), memory=None)

    def accept(
        self,
        logits: Float[Array, "b 1 v"],
        proposal: Proposal,  # noqa: ARG002
        state: DecodeState,
        rows: SamplingRows,
    ) -> Verdict:
        """The sampled token; the position just read is final. Nothing is sampled while known tokens are read again."""
        scores = logits[:, 0]
        token = choose(scores, rows, state.tokens, state.known)
        one = jnp.ones_like(state.length)
        count = jnp.where(state.known - state.length > 1, 0, one)
        most = min(self.alternatives, scores.shape[1])
        return Verdict(token[:, None], count, one, token_scores(scores, token, rows.alternatives, most), None)
