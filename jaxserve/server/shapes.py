"""How generated text looks in each API: one class an endpoint, from pieces and outputs to wire types.

Knows ``wire`` and ``generation``. Knows no HTTP. Each shape gives the answer as a whole and as a stream's events.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias

from msgspec import UNSET, Struct, UnsetType

from jaxserve.server import wire
from jaxserve.server.generation import Output, Piece, Token
from jaxserve.text.tokenizer import Tokenizer

# ``None`` where it is asked for but not due, ``UNSET`` where it is not asked for.
MaybeUsage: TypeAlias = wire.Usage | UnsetType | None


class Shape(Protocol):
    """What an API makes of a generation."""

    def opening(self, choices: int, usage: MaybeUsage) -> Iterable[Struct]:
        """Events before the first piece."""

    def chunk(self, piece: Piece, usage: MaybeUsage) -> Struct:
        """One piece as an event."""

    def closing(self, usage: wire.Usage) -> Iterable[Struct]:
        """Events after the last piece for those who asked for the usage."""

    def whole(self, outputs: Sequence[Output], usage: wire.Usage) -> Struct:
        """The answer that is no stream."""


@dataclasses.dataclass(frozen=True, slots=True)
class Envelope:
    """What every OpenAI answer and chunk repeats."""

    id: str
    created: int
    model: str
    fingerprint: str | None

    def names(self) -> dict[str, Any]:
        """What an event that is no chunk repeats, too."""
        return {"id": self.id, "created": self.created, "model": self.model}

    def around(self, kind: Callable[..., Struct], choices: Sequence[Struct], usage: MaybeUsage) -> Struct:
        """An answer or chunk of a ``kind`` of ``wire`` with these choices."""
        return kind(
            id=self.id,
            created=self.created,
            model=self.model,
            system_fingerprint=self.fingerprint,
            choices=choices,
            usage=usage,
        )


def token_logprobs(tokenizer: Tokenizer, tokens: Sequence[Token]) -> list[wire.TokenLogprob]:
    """Tokens in the chat API's shape."""
    entries = []
    for token in tokens:
        top = [
            wire.TopLogprob(tokenizer.token_text(other), logprob, _bytes(tokenizer, other))
            for other, logprob in token.top
        ]
        text, raw = tokenizer.token_text(token.id), _bytes(tokenizer, token.id)
        entries.append(wire.TokenLogprob(text, token.logprob, raw, top))
    return entries


def _bytes(tokenizer: Tokenizer, token: int) -> list[int] | None:
    return list(tokenizer.token_bytes(token)) or None


class GenerateShape:
    """``/generate``: text, finish reason, usage; logprobs as the chat API has them."""

    def __init__(self, tokenizer: Tokenizer, *, logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._logprobs = logprobs

    def opening(self, choices: int, usage: MaybeUsage) -> Iterable[Struct]:  # noqa: ARG002
        """Nothing: the first event carries text."""
        return ()

    def chunk(self, piece: Piece, usage: MaybeUsage) -> Struct:
        """One piece, with the usage so far."""
        logprobs = self._entries(piece.tokens)
        return wire.GenerateResponse(
            text=piece.text, finish_reason=piece.finish_reason, logprobs=logprobs, usage=usage or UNSET
        )

    def closing(self, usage: wire.Usage) -> Iterable[Struct]:  # noqa: ARG002
        """Nothing: the last piece had the usage."""
        return ()

    def whole(self, outputs: Sequence[Output], usage: wire.Usage) -> Struct:
        """The whole text."""
        (output,) = outputs
        logprobs = self._entries(output.tokens)
        return wire.GenerateResponse(
            text=output.text, finish_reason=output.finish_reason, logprobs=logprobs, usage=usage
        )

    def _entries(self, tokens: Sequence[Token]) -> list[wire.TokenLogprob] | UnsetType:
        return token_logprobs(self._tokenizer, tokens) if self._logprobs else UNSET


class CompletionShape:
    """``/v1/completions``; ``logprobs`` is the number of alternatives asked for."""

    def __init__(self, envelope: Envelope, tokenizer: Tokenizer, *, logprobs: int | None) -> None:
        self._envelope = envelope
        self._tokenizer = tokenizer
        self._top = logprobs

    def opening(self, choices: int, usage: MaybeUsage) -> Iterable[Struct]:  # noqa: ARG002
        """Nothing: the first chunk carries text."""
        return ()

    def chunk(self, piece: Piece, usage: MaybeUsage) -> Struct:
        """One piece."""
        return self._response([self._choice(piece)], usage)

    def closing(self, usage: wire.Usage) -> Iterable[Struct]:
        """A chunk with no choices."""
        return (self._response([], usage),)

    def whole(self, outputs: Sequence[Output], usage: wire.Usage) -> Struct:
        """All choices."""
        return self._response([self._choice(output) for output in outputs], usage)

    def _choice(self, part: Piece | Output) -> wire.CompletionChoice:
        return wire.CompletionChoice(part.index, part.text, self._logprobs(part.tokens), part.finish_reason)

    def _response(self, choices: list[wire.CompletionChoice], usage: MaybeUsage) -> Struct:
        return self._envelope.around(wire.CompletionResponse, choices, usage)

    def _logprobs(self, tokens: Sequence[Token]) -> wire.CompletionLogprobs | None:
        """Token strings are keys here, so of two tokens with the same text the likelier one stays."""
        if self._top is None:
            return None
        names = [self._tokenizer.token_text(token.id) for token in tokens]
        top: list[dict[str, float]] = []
        for token in tokens:
            likely: dict[str, float] = {}
            for other, logprob in (*token.top, (token.id, token.logprob)):
                likely.setdefault(self._tokenizer.token_text(other), logprob)
            top.append(likely)
        logprobs = [token.logprob for token in tokens]
        return wire.CompletionLogprobs(names, logprobs, top if self._top else None, [token.offset for token in tokens])


class ChatShape:
    """``/v1/chat/completions``."""

    def __init__(self, envelope: Envelope, tokenizer: Tokenizer, *, logprobs: bool) -> None:
        self._envelope = envelope
        self._tokenizer = tokenizer
        self._with_logprobs = logprobs

    def opening(self, choices: int, usage: MaybeUsage) -> Iterable[Struct]:
        """The role of each choice."""
        delta = wire.ChatDelta(role="assistant", content="")
        return [self._chunk([wire.ChatChunkChoice(index, delta, None, None)], usage) for index in range(choices)]

    def chunk(self, piece: Piece, usage: MaybeUsage) -> Struct:
        """One piece."""
        delta = wire.ChatDelta(content=piece.text or UNSET)
        choice = wire.ChatChunkChoice(piece.index, delta, self._logprobs(piece.tokens), piece.finish_reason)
        return self._chunk([choice], usage)

    def closing(self, usage: wire.Usage) -> Iterable[Struct]:
        """A chunk with no choices."""
        return (self._chunk([], usage),)

    def whole(self, outputs: Sequence[Output], usage: wire.Usage) -> Struct:
        """All choices."""
        choices = []
        for output in outputs:
            message = wire.AssistantMessage(content=output.text)
            choices.append(wire.ChatChoice(output.index, message, self._logprobs(output.tokens), output.finish_reason))
        return self._envelope.around(wire.ChatResponse, choices, usage)

    def _chunk(self, choices: list[wire.ChatChunkChoice], usage: MaybeUsage) -> Struct:
        return self._envelope.around(wire.ChatChunk, choices, usage)

    def _logprobs(self, tokens: Sequence[Token]) -> wire.ChatLogprobs | None:
        return wire.ChatLogprobs(token_logprobs(self._tokenizer, tokens)) if self._with_logprobs else None
