"""How a family turns passes into text where it does not do so one token at a time.

Knows the facts that a configuration states and a model card recommends. What is done with them is ``decode``'s affair.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxserve.errors import CheckpointError

# Which masks of a block a pass fills: ids, in the order of their names. ``decode.unmasking.BlockRows`` explains them.
STATIC, DYNAMIC, SEQUENTIAL, PREFIX, ENTROPY, LEVENSHTEIN = range(6)
RULES = (
    "low_confidence_static",
    "low_confidence_dynamic",
    "sequential",
    "left_prefix",
    "entropy_bounded",
    "levenshtein",
)
NO_EDITS = 1.0  # no confidence is above it

LARGEST_BLOCK, MOST_POST_STEPS = 1024, 1024
# As LLaDA2.1's own `generate` names them; a configuration that has them speaks for one model, not for its family.
_THRESHOLDS = {"threshold": "threshold", "edit_threshold": "editing_threshold"}


@dataclasses.dataclass(frozen=True)
class Decoding:
    """Facts of a model that fills in blocks of positions; a request may have settings of its own instead.

    Attributes:
        kind: ``block`` where positions to be decided hold a mask, ``canvas`` where they hold any tokens.
        block: positions that see each other, also in the prompt, counted from the first position of the text.
        mask_id: the token of a position that is not decided; -1 where there is none.
        rule: which masks a pass fills, a name of ``RULES``.
        threshold: probability above which a mask is filled.
        edit_threshold: probability above which a decided token is overwritten; from 1 on none is.
        post_steps: passes at most that edit when no mask is left.
        denoising_steps: passes among which the masks of a block are spread.
        delete_id, insert_id: tokens that are instructions to remove a position, or to put a mask before it.
    """

    kind: str
    block: int
    mask_id: int = -1
    rule: str = "low_confidence_dynamic"
    threshold: float = 0.9
    edit_threshold: float = 1.0
    post_steps: int = 0
    denoising_steps: int = 1
    delete_id: int | None = None
    insert_id: int | None = None

    @property
    def read(self) -> int:
        """Positions that see each other where a prompt is read: a canvas begins behind the prompt."""
        return self.block if self.kind == "block" else 1

    @property
    def beyond(self) -> int:
        """Positions behind the last of a text that a pass may read: a canvas is whole wherever it begins."""
        return self.block - 1 if self.kind == "canvas" else 0


def blocks_from_hf(hf: Mapping[str, Any], *, block: int, mask_id: int, **facts: Any) -> Decoding | None:
    """Block diffusion as the fields ``block_size`` and ``mask_token_id`` describe it, and how a model is best asked.

    Args:
        block: positions of a block where the file does not say.
        mask_id: the mask where the file does not say.
        facts: what the family knows better; as many denoising steps as a block has positions by default.

    Returns:
        ``None`` where the mask is the family's and the vocabulary is too small to have it: such a model reads text and
        cannot fill it in.

    Raises:
        CheckpointError: a block, a token or a threshold that cannot be.
    """
    size, vocab = hf.get("block_size", block), hf["vocab_size"]
    if type(size) is not int or not 1 <= size <= LARGEST_BLOCK:
        raise CheckpointError(
            f"config.json: block_size is no whole number from 1 to {LARGEST_BLOCK}", param="block_size"
        )
    stated = {"mask_id": hf.get("mask_token_id"), "delete_id": hf.get("delete_token_id")}
    stated["insert_id"] = hf.get("split_token_id")
    for name, token in stated.items():
        if token is not None and (type(token) is not int or not 0 <= token < vocab):
            raise CheckpointError(f"config.json: {name} {token!r} is no token of {vocab}", param=name)
    if stated["mask_id"] is None and mask_id >= vocab:
        return None
    if (stated["delete_id"] is None) != (stated["insert_id"] is None):
        raise CheckpointError("config.json: of delete_token_id and split_token_id there is only one")
    fields: dict[str, Any] = {"mask_id": mask_id, "denoising_steps": size} | facts | _advice(hf)
    return Decoding("block", size, **(fields | {name: token for name, token in stated.items() if token is not None}))


def _advice(hf: Mapping[str, Any]) -> dict[str, Any]:
    advice = {own: hf[name] for own, name in _THRESHOLDS.items() if hf.get(name) is not None}
    for own, value in advice.items():
        if type(value) not in (int, float) or not 0 <= value <= 1:
            raise CheckpointError(f"config.json: {_THRESHOLDS[own]} is no number from 0 to 1", param=_THRESHOLDS[own])
    advice, steps = {own: float(value) for own, value in advice.items()}, hf.get("max_post_steps")
    if steps is None:
        return advice
    if type(steps) is not int or not 0 <= steps <= MOST_POST_STEPS:
        raise CheckpointError(
            f"config.json: max_post_steps is no whole number from 0 to {MOST_POST_STEPS}", param="max_post_steps"
        )
    return advice | {"post_steps": steps}
