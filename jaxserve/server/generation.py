"""From the engine's deltas to pieces of text: one HTTP request's choices, run side by side.

Knows tokens, text, stop strings and usage. Knows no wire shape and no HTTP. What it yields is the same however the
engine cuts its deltas, so a stream and a whole answer hold the same text.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing

from jaxserve.engine.request import (
    NOTHING,
    Account,
    Delta,
    FinishReason,
    Pass,
    Request,
    SamplingParams,
    TokenLogprob,
)
from jaxserve.errors import EngineError, Overloaded, ShuttingDown
from jaxserve.server.candidates import Candidates, Round
from jaxserve.server.late import LateStream
from jaxserve.server.parallel import ASKED_NOTHING, Asked
from jaxserve.server.service import ServedModel, Stream
from jaxserve.text.detokenize import Detokenizer

MIN_LOGPROB = -9999.0  # what OpenAI writes for minus infinity, which JSON cannot
MOST_TRACED = 512  # passes of a choice that are told of


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """What one HTTP request asks of the engine.

    Attributes:
        id: prefix of the engine requests' ids.
        prompts: token ids of each prompt.
        sampling: the parameters of every prompt; with a seed, choice ``i`` of a prompt gets ``seed + i``.
        n: choices of each prompt.
        best_of: so many are generated of each prompt, of which the best are given; 0 is ``n``.
        stop: strings that end a choice.
        continues: the output goes on from the prompt's text, so a space at its start is a real one.
        tenant: on whose behalf.
        deadline: when the client gives up, on the monotonic clock.
        asked: of parallel generation.
    """

    id: str
    prompts: tuple[tuple[int, ...], ...]
    sampling: SamplingParams
    n: int
    stop: tuple[str, ...]
    continues: bool = True
    tenant: str = ""
    deadline: float | None = None
    asked: Asked = ASKED_NOTHING
    best_of: int = 0

    @property
    def tried(self) -> int:
        """Choices that are generated of each prompt."""
        return max(self.n, self.best_of)

    def requests(self) -> list[Request]:
        """One engine request a choice, the choices of a prompt side by side."""
        requests: list[Request] = []
        logprobs = self.sampling.logprobs
        if logprobs is None and self.tried > self.n:
            logprobs = 0  # they decide
        for index, prompt in enumerate(self.prompts):
            for i in range(self.tried):
                seed = None if self.sampling.seed is None else (self.sampling.seed + i) % 2**63
                sampling = dataclasses.replace(self.sampling, seed=seed, logprobs=logprobs)
                name = f"{self.id}-{len(requests)}"
                requests.append(
                    Request(
                        name,
                        prompt,
                        sampling,
                        self.deadline,
                        self.tenant,
                        draft=self.asked.draft,
                        settings=self.asked.settings,
                        provisional=self.asked.provisional,
                        traced=self.asked.trace != "none",
                        group=f"{self.id}-{index}" if self.tried > 1 else "",
                    )
                )
        return requests


@dataclasses.dataclass(frozen=True, slots=True)
class Token:
    """A generated token for those who asked for logprobs; ``offset`` is where it starts in the choice's text."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    offset: int


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """What was added to a choice. ``completion_tokens`` counts the choice's tokens so far.

    ``canvas`` is what its next tokens look like so far, in its ``block``-th block; for those who asked.
    """

    index: int
    text: str
    tokens: tuple[Token, ...]
    finish_reason: str | None
    completion_tokens: int
    canvas: tuple[int, ...] = ()
    block: int = 0

    @property
    def says(self) -> bool:
        """Whether anything of it is final."""
        return bool(self.text or self.tokens or self.finish_reason)


class Choice:
    """One engine request and the text it has given."""

    def __init__(self, index: int, stream: Stream, detokenizer: Detokenizer, *, by_token: bool) -> None:
        self.index = index
        self.stream = stream
        self.completion_tokens = 0
        self.finish_reason: str | None = None
        self.logprob = 0.0
        self.account = NOTHING
        self.passes: list[Pass] = []
        self._detokenizer = detokenizer
        self._by_token = by_token

    @property
    def generated(self) -> int:
        """Tokens that the engine has made for it: those that nobody came to read, too, but none behind its end."""
        return self.stream.generated if self.finish_reason is None else self.completion_tokens

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yields until the choice is finished; raises what the engine says went wrong."""
        try:
            async for delta in self.stream:
                piece = self.take(delta)
                if piece.says or piece.canvas:
                    yield piece
                if self.finish_reason is not None:
                    return
        finally:
            self.stream.cancel(FinishReason.STOP if self._detokenizer.stopped else FinishReason.CANCELLED)
        raise EngineError("The engine ended this request without a reason.")

    def take(self, delta: Delta) -> Piece:
        """Adds a delta: counts its tokens up to the one that completes a stop string, and gives their text."""
        if delta.finish_reason is FinishReason.ERROR:
            raise delta.error or EngineError("The engine failed on this request.")
        if delta.finish_reason is FinishReason.CANCELLED:
            raise ShuttingDown("The server ended this request.")
        if delta.account is not NOTHING:
            self.account = delta.account
        self.passes += delta.passes[: MOST_TRACED - len(self.passes)]
        ended_by_token = delta.finish_reason is FinishReason.STOP
        shown = delta.tokens[:-1] if ended_by_token else delta.tokens
        text, offsets = self._push(shown)
        before = self.completion_tokens
        self.completion_tokens += len(offsets)
        if delta.finish_reason is not None and not self._detokenizer.stopped:
            text += self._detokenizer.finish()
            self.completion_tokens += len(delta.tokens) - len(shown)
            self.finish_reason = str(delta.finish_reason)
        if self._detokenizer.stopped:
            self.finish_reason = "stop"
        self.logprob += sum(entry.logprob for entry in delta.logprobs[: self.completion_tokens - before])
        tokens = tuple(map(_token, delta.logprobs, offsets))
        canvas = delta.canvas if self.finish_reason is None else ()
        return Piece(self.index, text, tokens, self.finish_reason, self.completion_tokens, canvas, self.account.blocks)

    def _push(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        """The text of ``ids``, and for each of them where its text begins; none after one that completes a stop string.

        Token by token only where somebody wants to know about single tokens.
        """
        if not self._by_token:
            return self._detokenizer.push(ids), [0] * len(ids)
        text = ""
        offsets: list[int] = []
        for token in ids:
            offsets.append(self._detokenizer.text_offset)
            text += self._detokenizer.push([token])
            if self._detokenizer.stopped:
                break
        return text, offsets


def _token(entry: TokenLogprob, offset: int) -> Token:
    top = tuple((token, max(logprob, MIN_LOGPROB)) for token, logprob in entry.top)
    return Token(entry.token, max(entry.logprob, MIN_LOGPROB), top, offset)


@dataclasses.dataclass(slots=True)
class Output:
    """A finished choice."""

    index: int
    text: str = ""
    tokens: list[Token] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None


class Generation:
    """All choices of one HTTP request. Whoever starts one must ``cancel`` it in the end, finished or not."""

    def __init__(self, job: Job, choices: list[Choice], candidates: Sequence[Candidates] = ()) -> None:
        self.prompt_tokens = sum(map(len, job.prompts))
        self._job = job
        self._choices = choices
        self._candidates = candidates

    @classmethod
    def start(cls, job: Job, model: ServedModel) -> Generation:
        """Submits every choice, or none: raises what ``Engine.submit`` raises.

        If there is room for some of them the others come later, as one ends after the other: a request may have more
        choices than there are places, and a short queue must not turn it away for ever.
        """
        engine, turn = model.engine, asyncio.Lock()
        first, *others = job.requests()
        if job.asked.candidates > 1:
            chosen = [Candidates(request, model, job.asked, turn) for request in (first, *others)]
            chosen[0].begin()
            return cls(job, _choices(job, model, chosen), chosen)
        streams: list[Stream] = [engine.submit(first)]
        try:
            for request in others:
                streams.append(LateStream(request, engine, turn, engine.submit(request, patient=True)))
        except Overloaded:
            streams += [LateStream(request, engine, turn) for request in others[len(streams) - 1 :]]
        except Exception:
            for stream in streams:
                stream.cancel()
            raise
        return cls(job, _choices(job, model, streams))

    def cancel(self) -> None:
        """Frees every slot that is still held."""
        for choice in self._choices:
            choice.stream.cancel()

    def __len__(self) -> int:
        return len(self._choices)

    @property
    def completion_tokens(self) -> int:
        """Tokens generated so far."""
        return sum(choice.completion_tokens for choice in self._choices)

    @property
    def generated(self) -> int:
        """Tokens that the engine has made so far, whether or not they were read."""
        return sum(choice.generated for choice in self._choices)

    @property
    def account(self) -> Account:
        """What it took so far."""
        return sum((choice.account for choice in self._choices), NOTHING)

    @property
    def passes(self) -> list[list[Pass]]:
        """What each pass did, choice by choice, as far as that is told."""
        return [choice.passes for choice in self._choices]

    @property
    def rounds(self) -> list[Round]:
        """What fragments were chosen from, choice by choice, where there were candidates."""
        return [one for stream in self._candidates for one in stream.rounds]

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """The pieces of all choices as they come; the first error ends them all."""
        if len(self._choices) == 1:
            pieces = self._choices[0].pieces()
        else:
            pieces = _merged(self._choices)
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece

    async def collect(self) -> list[Output]:
        """Runs to the end; of the choices of each prompt the best come first, and no more than were asked for."""
        outputs = [Output(choice.index) for choice in self._choices]
        async for piece in self.pieces():
            output = outputs[piece.index]
            output.text += piece.text
            output.tokens += piece.tokens
            output.finish_reason = piece.finish_reason
        n, tried = self._job.n, self._job.tried
        if tried == n:
            return outputs
        best = [
            index
            for first in range(0, len(outputs), tried)
            for index in sorted(range(first, first + tried), key=self._surprise)[:n]
        ]
        return [dataclasses.replace(outputs[index], index=place) for place, index in enumerate(best)]

    def _surprise(self, index: int) -> float:
        """How unlikely the model finds a choice: nats a token."""
        choice = self._choices[index]
        return -choice.logprob / max(choice.completion_tokens, 1)


def _choices(job: Job, model: ServedModel, streams: Iterable[Stream]) -> list[Choice]:
    """The streams' text."""
    by_token = bool(job.stop) or job.sampling.logprobs is not None
    choices = []
    for index, stream in enumerate(streams):
        detokenizer = Detokenizer(model.tokenizer, job.stop, continues=job.continues)
        choices.append(Choice(index, stream, detokenizer, by_token=by_token))
    return choices


async def _merged(choices: Sequence[Choice]) -> AsyncGenerator[Piece, None]:
    """Runs one task a choice into a queue of one place each: a slow reader holds them back."""
    queue: asyncio.Queue[Piece | Exception | None] = asyncio.Queue(len(choices))

    async def pump(choice: Choice) -> None:
        try:
            async with aclosing(choice.pieces()) as pieces:
                async for piece in pieces:
                    await queue.put(piece)
        except Exception as error:  # noqa: BLE001 - carried over to the reader, which raises it
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(pump(choice)) for choice in choices]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
