"""What a tokenizer library must offer to ``Tokenizer``, and the facts both libraries share.

Two implementations: ``tokenizers_backend.py`` and ``sentencepiece_backend.py``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from jaxserve.text.control import AddedToken

SPACE_MARK = "\u2581"  # how SentencePiece vocabularies write a space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Backend(Protocol):
    """A vocabulary and the rule that turns text into it. Immutable once built; every method is safe in threads.

    Attributes:
        spellings: token id -> how the vocabulary writes it; empty for an id that has no token.
        surfaces: token id -> the exact bytes of text it stands for (UTF-8, perhaps part of a character).
        added: tokens that are matched by spelling; the control tokens among them.
        strips_space: the first space of a decoded text is the tokenizer's own and is dropped.
        dropped: bytes that no token stands for and that are left out of a text; its tokens cover every other byte
            of it after normalisation. ``None`` if that is not so: unknown characters are merged, spaces are eaten.
        around: ids that the library itself puts before and after a text when asked for special tokens.
    """

    spellings: list[str]
    surfaces: list[bytes]
    added: tuple[AddedToken, ...]
    strips_space: bool
    dropped: bytes | None
    around: tuple[tuple[int, ...], tuple[int, ...]]

    def encode(self, parts: Sequence[str | int]) -> list[int]:
        """Tokens of plain stretches (no control token is recognised in them) with the given ids between them."""

    def cut(self, size: int) -> Backend:
        """The same without the tokens from id ``size`` on: text that spells them becomes others.

        Raises:
            CheckpointError: one of them is more than a word matched by its spelling, so that texts would not read the
                same.
        """

    def normalize(self, text: str) -> str:
        """``text`` as the vocabulary's surfaces cover it."""

    def save(self, folder: Path) -> dict[str, object]:
        """Writes the model file into ``folder``; returns what ``tokenizer_config.json`` must say about it."""


def fallback_byte(spelling: str) -> bytes | None:
    """The byte that a byte-fallback token such as ``<0xE2>`` stands for, ``None`` for any other spelling."""
    match = _BYTE_TOKEN.fullmatch(spelling)
    return bytes([int(match.group(1), 16)]) if match else None
