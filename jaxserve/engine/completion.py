"""Whole answers, put together from deltas. Knows no engine."""

from __future__ import annotations

import dataclasses

from jaxserve.engine.request import Delta, FinishReason, Request, TokenLogprob
from jaxserve.errors import JaxserveError


@dataclasses.dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer of the synchronous ``generate``."""

    request: Request
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    error: JaxserveError | None = None


@dataclasses.dataclass(slots=True)
class Answer:
    """A completion in the making."""

    request: Request
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: JaxserveError | None = None

    def add(self, delta: Delta) -> None:
        """Takes what became known."""
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.finish_reason, self.error = delta.finish_reason, delta.error

    def whole(self) -> Completion:
        """The answer as it stands; one that never finished counts as failed."""
        reason = self.finish_reason or FinishReason.ERROR
        return Completion(self.request, tuple(self.tokens), tuple(self.logprobs), reason, self.error)
