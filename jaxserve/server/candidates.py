"""Text of which each fragment is the best of several: sampled side by side, scored, chosen, and gone on with.

A stream like any other to whoever reads it. Behind it each round is a group of ordinary engine requests, so that the
text so far is read once for all fragments of a round. It is read as a prompt, each time: what stands in the slot of the
fragment that was chosen differs from it in the last bits, and a text would depend on whether the slot is still there.

Knows rounds, seeds and scores. Knows no text.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import secrets
from collections.abc import AsyncIterator, Sequence

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
from jaxserve.errors import EngineError, InvalidRequest, JaxserveError
from jaxserve.models.decoding import DYNAMIC, Decoding
from jaxserve.server.late import LateStream
from jaxserve.server.parallel import Asked, edits
from jaxserve.server.service import Engine, ServedModel, Stream

WEAKEST = 4  # one part in so many of a fragment is decided anew
# A pass over finished text: nothing is open, and no token is sure enough to take another one's place.
READ_ONCE = {"rule": DYNAMIC, "edit_threshold": 1 - 2**-24, "max_post_steps": 1}


@dataclasses.dataclass(frozen=True, slots=True)
class Round:
    """What was chosen from.

    Attributes:
        scores: mean log-probability of each fragment's tokens.
        chosen: which one it was; as many as there are candidates if it was decided anew in a part and became better.
        discarded: tokens that were generated and are not in the text.
    """

    scores: tuple[float, ...]
    chosen: int
    discarded: int


@dataclasses.dataclass(slots=True)
class Fragment:
    """What a request of a round has given; ``scores`` are those it is judged by."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    scores: tuple[float, ...] = ()
    reason: FinishReason | None = None
    error: JaxserveError | None = None
    account: Account = NOTHING
    passes: tuple[Pass, ...] = ()

    @property
    def score(self) -> float:
        """Its mean log-probability; 0 for nothing."""
        return sum(self.scores) / len(self.scores) if self.scores else 0.0


def check(asked: Asked, sampling: SamplingParams, *, best_of: bool) -> None:
    """Refuses what makes no sense with candidates.

    Raises:
        InvalidRequest: naming what.
    """
    if asked.candidates == 1:
        return
    refused = (
        (sampling.temperature == 0, "temperature", "0: all fragments would be the same"),
        (best_of, "best_of", "set: it is another way to choose"),
        (asked.predicted, "prediction", "set: it is a guess at one text"),
    )
    for wrong, name, what in refused:
        if wrong:
            raise InvalidRequest(f"'parallel.candidates' makes no sense with '{name}' {what}.", param=name)


class Candidates:
    """``Stream`` of the fragments that were chosen. A seed gives the same text always.

    Args:
        request: the whole of what is asked.
        turn: held by whoever waits for room among the streams of one HTTP request.

    Attributes:
        rounds: what each was chosen from.
    """

    def __init__(self, request: Request, model: ServedModel, asked: Asked, turn: asyncio.Lock) -> None:
        self.rounds: list[Round] = []
        self._request = request
        self._engine: Engine = model.engine
        self._decoding = model.decoding
        self._asked = asked
        self._turn = turn
        seed = request.sampling.seed
        self._seed = secrets.randbits(63) if seed is None else seed
        self._text: tuple[int, ...] = ()
        self._account = NOTHING
        self._streams: list[Stream] = []
        self._generated = 0
        self._requests = 0
        self._cancelled = False

    @property
    def generated(self) -> int:
        """Tokens of all fragments, chosen or not."""
        return self._generated + sum(stream.generated for stream in self._streams)

    def begin(self) -> None:
        """Submits the first round; raises what ``Engine.submit`` raises."""
        first, *others = self._round()
        self._streams = [self._engine.submit(first)]
        self._streams += [LateStream(request, self._engine, self._turn) for request in others]

    def cancel(self, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """See ``Stream``."""
        self._cancelled = True
        for stream in self._streams:
            stream.cancel(reason)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while not self._cancelled:
            if not self._streams:
                self._streams = [LateStream(request, self._engine, self._turn) for request in self._round()]
            fragments = await self._answers()
            failed = next((one for one in fragments if one.reason not in _ENDS), None)
            if failed is not None:
                error = failed.error or EngineError("The engine ended a candidate without a reason.")
                yield Delta(finish_reason=FinishReason.ERROR, error=error)
                return
            best = await self._chosen(fragments)
            self._text += best.tokens
            over = best.reason is FinishReason.STOP or len(self._text) >= self._request.sampling.max_tokens
            asked = self._request.sampling.logprobs is not None
            yield Delta(
                best.tokens,
                best.logprobs if asked else (),
                best.reason if over else None,
                account=self._account,
                passes=best.passes,
            )
            if over:
                return

    # --- a round ------------------------------------------------------------------------------------------------------

    def _round(self) -> list[Request]:
        """The requests of the next round, one a candidate."""
        return [self._fragment(place, self._asked.fragment_tokens) for place in range(self._asked.candidates)]

    def _fragment(self, place: int, tokens: int) -> Request:
        """A request for what comes next."""
        whole, written, index = self._request, len(self._text), len(self.rounds)
        length = min(tokens, whole.sampling.max_tokens - written)
        sampling = dataclasses.replace(
            whole.sampling,
            max_tokens=length,
            min_tokens=min(max(whole.sampling.min_tokens - written, 0), length),
            seed=_derived(self._seed, index, place),
            logprobs=whole.sampling.logprobs or 0,
        )
        self._requests += 1
        return dataclasses.replace(
            whole,
            id=f"{whole.id}-{self._requests}",
            prompt=whole.prompt + self._text,
            sampling=sampling,
            group=f"{whole.id}-{index}",
            written=written,
            provisional=False,
        )

    async def _answers(self) -> list[Fragment]:
        """What the streams that are under way give."""
        tasks = [asyncio.create_task(_read(stream)) for stream in self._streams]
        try:
            fragments = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            for stream in self._streams:
                stream.cancel()
            self._generated, self._streams = self.generated, []
        self._account = sum((one.account for one in fragments), self._account)
        return fragments

    async def _ask(self, requests: Sequence[Request]) -> list[Fragment]:
        self._streams = [LateStream(request, self._engine, self._turn) for request in requests]
        return await self._answers()

    async def _chosen(self, fragments: list[Fragment]) -> Fragment:
        """The best, corrected where it is weakest if the model can do that and it becomes better."""
        if self._asked.rescore == "verifier":
            await self._verify(fragments)
        best = max(fragments, key=lambda one: one.score)
        chosen, scores = fragments.index(best), [one.score for one in fragments]
        redone = await self._redone(best)
        if redone is not None:
            fragments.append(redone)
            scores.append(redone.score)
            if redone.score > best.score:
                best, chosen = redone, len(scores) - 1
        discarded = sum(len(one.tokens) for one in fragments) - len(best.tokens)
        self.rounds.append(Round(tuple(scores), chosen, discarded))
        return best

    # --- block models -------------------------------------------------------------------------------------------------

    async def _verify(self, fragments: Sequence[Fragment]) -> None:
        """Scores fragments by a pass that reads them finished: how much the model agrees with each token in its place.

        A fragment that the pass would change all the same keeps its own scores.
        """
        asked = [one for one in fragments if one.tokens]
        requests = [self._with_draft(place, one.tokens, READ_ONCE) for place, one in enumerate(asked)]
        for one, read in zip(asked, await self._ask(requests), strict=True):
            if read.tokens == one.tokens:
                one.scores = read.scores

    async def _redone(self, best: Fragment) -> Fragment | None:
        """The fragment with its weakest part decided anew and the rest open to edits; ``None`` where that can't be."""
        decoding, length = self._decoding, len(best.tokens) // WEAKEST
        if not _can_redo(decoding, dict(self._request.settings)) or not length:
            return None
        assert decoding is not None
        start = min(range(len(best.scores) - length + 1), key=lambda at: sum(best.scores[at : at + length]))
        masks = (decoding.mask_id,) * length
        draft = best.tokens[:start] + masks + best.tokens[start + length :]
        (redone,) = await self._ask([self._with_draft(self._asked.candidates, draft, {})])
        if redone.reason not in _ENDS or not redone.tokens:
            return None
        if self._asked.rescore == "verifier":
            await self._verify([redone])
        return redone

    def _with_draft(self, place: int, draft: tuple[int, ...], settings: dict[str, float]) -> Request:
        """A request for a fragment that looks like ``draft`` to begin with."""
        request = self._fragment(place, len(draft))
        told = tuple((dict(request.settings) | settings).items())
        return dataclasses.replace(request, draft=self._text + draft, settings=told)


_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


def _can_redo(decoding: Decoding | None, settings: dict[str, float]) -> bool:
    """Whether a part of a block may be masked again and the rest is edited: so by the model, and by the request."""
    if decoding is None or decoding.kind != "block" or not edits(decoding):
        return False
    return settings.get("max_post_steps", 1) > 0 and settings.get("edit_threshold", 0) < 1


async def _read(stream: Stream) -> Fragment:
    fragment = Fragment()
    async for delta in stream:
        fragment.tokens += delta.tokens
        fragment.logprobs += delta.logprobs
        fragment.passes += delta.passes
        fragment.reason, fragment.error = delta.finish_reason, delta.error
        if delta.account is not NOTHING:
            fragment.account = delta.account
        if delta.finish_reason is not None:
            break
    fragment.scores = tuple(entry.logprob for entry in fragment.logprobs)
    return fragment


def _derived(seed: int, index: int, place: int) -> int:
    """A seed for a place of a round: as good as drawn, and always the same."""
    digest = hashlib.blake2b(f"{seed}/{index}/{place}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
