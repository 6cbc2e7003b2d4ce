"""The JSON that is this server's own: what is asked of parallel generation, and what is told of it.

Knows names and types, as ``wire`` does for OpenAI's; ranges and meanings are in ``parallel``.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType, field


class Parallel(Struct, frozen=True, kw_only=True):
    """How several tokens are decided at once, what is told of it, and how sure the model must be.

    ``mode``: ``off`` decides one token a pass, from the left; ``draft`` and ``block`` say which way it must be.
    ``quality`` sets thresholds, the other fields single ones: a mask becomes a token where its probability is above
    ``mask_threshold``, a decided token is overwritten where another's is above ``edit_threshold``, in
    ``max_post_steps`` passes at most when no mask is left. Of ``candidates`` fragments of ``fragment_tokens`` each, the
    likeliest is taken and gone on with, by the log-probabilities it was written with, or by those of a pass over it
    when it is finished (``rescore``). ``trace`` tells of each pass in ``usage.parallel_details``. With ``stream`` set
    to ``provisional``, events ``block.update`` tell what a block looks like before it is final.
    """

    mode: str | None = None
    draft_tokens: int | None = None
    block_length: int | None = None
    mask_threshold: float | None = None
    edit_threshold: float | None = None
    max_post_steps: int | None = None
    denoising_steps: int | None = None
    candidates: int | None = None
    fragment_tokens: int | None = None
    rescore: str | None = None
    quality: str | None = None
    trace: str | None = None
    stream: str | None = None


class TracedPass(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one pass did to a choice.

    ``canvas`` and ``tokens`` are there with ``trace: steps``: what the pass left of a block that is not final (``null``
    where nothing is decided), and what it made final.
    """

    choice: int
    step: int
    committed: int
    drafted: int = 0
    accepted: int = 0
    edited: int = 0
    inserted: int = 0
    deleted: int = 0
    masks: int | None = None
    tokens: list[str] | None = None
    canvas: list[str | None] | None = None


class ParallelDetails(Struct, frozen=True, kw_only=True):
    """What it took to decide the tokens of all choices: ``drafted_tokens`` are ``accepted`` or ``rejected`` ones.

    Drafted is what was proposed for a place, accepted what stands there in the end. ``wasted_tokens`` were decided
    behind the end of a text. Of so many ``candidates`` one was taken in each round, one choice after the other: their
    scores are mean log-probabilities; one more than there are candidates is that of the best with its weakest part
    decided anew. ``discarded_tokens`` are those of the others. ``trace`` holds the first passes, and
    ``untraced_passes`` says how many more there were.
    """

    passes: int
    drafted_tokens: int
    accepted_tokens: int
    rejected_tokens: int
    edited_tokens: int
    inserted_tokens: int
    deleted_tokens: int
    wasted_tokens: int
    blocks: int
    post_steps: int
    tokens_per_pass: float
    candidates: int | UnsetType = UNSET
    chosen_index: list[int] | UnsetType = UNSET
    candidate_scores: list[list[float]] | UnsetType = UNSET
    discarded_tokens: int | UnsetType = UNSET
    trace: list[TracedPass] | UnsetType = UNSET
    untraced_passes: int | UnsetType = UNSET


class BlockUpdate(Struct, frozen=True, kw_only=True):
    """The data of an event ``block.update``: what a block looks like that is not final yet.

    Only for those who asked. ``choices`` is empty, so that a client that looks at no event's type takes it for a chunk
    without text. ``tokens`` are ``null`` where nothing is decided, which ``text`` shows as ``\u2591``; ``changed`` are
    the places that differ from the update before. It begins behind the last token that is final.
    """

    id: str | UnsetType = UNSET
    object: str = "block.update"
    created: int | UnsetType = UNSET
    model: str | UnsetType = UNSET
    choices: list[Any] = field(default_factory=list)
    choice: int
    block_index: int
    text: str
    tokens: list[str | None]
    changed: list[int]
