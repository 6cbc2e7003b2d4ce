"""What it took, as a client gets it: the usage with its details, the passes, and blocks that are not final yet.

Knows the engine's accounts and the wire's names for them. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from jaxserve.engine.request import Account, Pass
from jaxserve.server import wire
from jaxserve.server.candidates import Round
from jaxserve.server.extensions import BlockUpdate, ParallelDetails, TracedPass
from jaxserve.server.generation import MIN_LOGPROB, Generation, Piece
from jaxserve.server.parallel import Asked
from jaxserve.server.service import ServedModel
from jaxserve.server.shapes import Envelope

UNDECIDED = "\u2591"


def usage(generation: Generation, asked: Asked, model: ServedModel, *, last: bool) -> wire.Usage:
    """Tokens so far, and what they took where that was asked for or tokens were decided in parallel.

    Args:
        last: nothing comes behind it, so the passes belong here.
    """
    read, written, account = generation.prompt_tokens, generation.completion_tokens, generation.account
    predicted: wire.CompletionTokensDetails | UnsetType = UNSET
    if asked.predicted:
        predicted = wire.CompletionTokensDetails(account.predicted_accepted, account.predicted_rejected)
    told: ParallelDetails | UnsetType = UNSET
    if asked.told or account.drafted or model.decoding is not None:
        trace, left = _trace(generation, asked, model) if last and asked.trace != "none" else (UNSET, UNSET)
        told = _details(account, written, trace, left)
        if generation.rounds:
            told = msgspec.structs.replace(told, **_choosing(generation.rounds, asked.candidates))
    return wire.Usage(read, written, read + written, predicted, told)


def _details(
    account: Account, written: int, trace: list[TracedPass] | UnsetType, left: int | UnsetType
) -> ParallelDetails:
    return ParallelDetails(
        passes=account.passes,
        drafted_tokens=account.drafted,
        accepted_tokens=account.accepted,
        rejected_tokens=account.rejected,
        edited_tokens=account.edited,
        inserted_tokens=account.inserted,
        deleted_tokens=account.deleted,
        wasted_tokens=account.wasted,
        blocks=account.blocks,
        post_steps=account.post_steps,
        tokens_per_pass=round(written / max(account.passes, 1), 3),
        trace=trace,
        untraced_passes=left,
    )


def _choosing(rounds: Sequence[Round], candidates: int) -> dict[str, Any]:
    """What fragments were chosen from."""
    return {
        "candidates": candidates,
        "chosen_index": [one.chosen for one in rounds],
        "candidate_scores": [[round(max(score, MIN_LOGPROB), 6) for score in one.scores] for one in rounds],
        "discarded_tokens": sum(one.discarded for one in rounds),
    }


def _trace(generation: Generation, asked: Asked, model: ServedModel) -> tuple[list[TracedPass], int | UnsetType]:
    """The passes of all choices, and how many more there were."""
    whole = asked.trace == "steps"
    passes = [
        _traced(choice, step, one, model, whole=whole)
        for choice, each in enumerate(generation.passes)
        for step, one in enumerate(each)
    ]
    left = generation.account.passes - len(passes)
    return passes, left if left > 0 else UNSET


def _traced(choice: int, step: int, one: Pass, model: ServedModel, *, whole: bool) -> TracedPass:
    account, masks = one.account, None
    if model.decoding is not None and model.decoding.mask_id >= 0:
        masks = one.canvas.count(model.decoding.mask_id)
    return TracedPass(
        choice=choice,
        step=step,
        committed=len(one.tokens),
        drafted=account.drafted,
        accepted=account.accepted,
        edited=account.edited,
        inserted=account.inserted,
        deleted=account.deleted,
        masks=masks,
        tokens=[model.tokenizer.token_text(token) for token in one.tokens] if whole else None,
        canvas=_texts(one.canvas, model) if whole else None,
    )


class Updates:
    """What has been told of each choice's present block."""

    def __init__(self, model: ServedModel, envelope: Envelope | None) -> None:
        self._model = model
        self._names = {} if envelope is None else envelope.names()
        self._before: dict[int, tuple[int, tuple[int, ...]]] = {}

    def of(self, piece: Piece) -> BlockUpdate:
        """The block as it stands, beside what was told of it."""
        block, before = self._before.get(piece.index, (-1, ()))
        self._before[piece.index] = piece.block, piece.canvas
        mask = -1 if self._model.decoding is None else self._model.decoding.mask_id
        known: Sequence[int] = before if block == piece.block and len(before) == len(piece.canvas) else ()
        known = known or (mask,) * len(piece.canvas)
        changed = [place for place, (old, new) in enumerate(zip(known, piece.canvas, strict=True)) if old != new]
        tokens = _texts(piece.canvas, self._model)
        return BlockUpdate(
            choice=piece.index,
            block_index=piece.block,
            text=_shown(piece.canvas, mask, self._model),
            tokens=tokens,
            changed=changed,
            **self._names,
        )


def _texts(canvas: Sequence[int], model: ServedModel) -> list[str | None]:
    mask = -1 if model.decoding is None else model.decoding.mask_id
    return [None if token == mask else model.tokenizer.token_text(token) for token in canvas]


def _shown(canvas: Sequence[int], mask: int, model: ServedModel) -> str:
    """Text as it stands; a place without a token is one sign."""
    parts: list[str] = []
    run: list[int] = []
    for token in (*canvas, None):
        if token is None or token == mask:
            parts.append(model.tokenizer.decode(run, continues=True) if run else "")
            parts.append("" if token is None else UNDECIDED)
            run = []
        else:
            run.append(token)
    return "".join(parts)
