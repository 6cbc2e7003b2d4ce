"""Which characters of a rendered prompt came from a client and look like the start of a control token.

Before rendering, such characters in the client's strings are replaced by private-use characters, one for one; after it
they are put back and their places are known. Templates may trim, cut, repeat or escape the strings: only what a
template does with exactly these characters could show, and ``chat.py`` compares with a plain rendering to see that.
Knows strings and spellings; neither templates nor tokens.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Iterable
from typing import Any

_FIRST_MASK = 0x10F800  # in Unicode's last private-use plane


class Care(enum.Enum):
    """How much is replaced. ``FULL``: every sign that a control token starts with. ``EXACT``: only where one stands."""

    FULL = 1
    EXACT = 2


class Disguise:
    """Replaces and restores the characters that control tokens start with."""

    def __init__(self, controls: Iterable[str], literals: Collection[str] = ()) -> None:
        """Prepares for the control tokens' spellings.

        ``literals`` are strings that the template itself looks for in messages (``</think>``); they are left readable
        unless a control token could grow out of them.
        """
        self._controls = tuple(sorted(controls, key=len, reverse=True))
        heads = sorted({spelling[0] for spelling in self._controls})
        self._masks = {head: chr(_FIRST_MASK + index) for index, head in enumerate(heads)}
        self._heads = {mask: head for head, mask in self._masks.items()}
        self._head_pattern = re.compile(_one_of(heads))
        self._mask_pattern = re.compile(_one_of(self._heads))
        self._begins = frozenset(
            spelling[:length] for spelling in self._controls for length in range(1, len(spelling) + 1)
        )
        self._readable = tuple(text for text in literals if len(text) > 1 and text not in self._begins)

    def holds_control(self, value: Any) -> bool:
        """Whether any string in ``value`` (plain JSON data) spells a control token."""
        return any(spelling in text for text in _strings(value) for spelling in self._controls)

    def needed(self, value: Any) -> bool:
        """Whether ``put_on`` would replace anything in ``value``."""
        return any(self._head_pattern.search(text) for text in _strings(value))

    def put_on(self, value: Any, care: Care) -> Any:
        """A copy of ``value`` (plain JSON data) with the characters in its strings and keys replaced."""
        if isinstance(value, str):
            return self._head_pattern.sub(lambda match: self._disguised(match, care), value)
        if isinstance(value, list):
            return [self.put_on(item, care) for item in value]
        if isinstance(value, dict):
            return {self.put_on(key, care): self.put_on(item, care) for key, item in value.items()}
        return value

    def take_off(self, text: str) -> tuple[str, frozenset[int]]:
        """The readable text, and the positions of the characters that were disguised."""
        places = frozenset(match.start() for match in self._mask_pattern.finditer(text))
        return self._mask_pattern.sub(lambda match: self._heads[match.group()], text), places

    def _disguised(self, match: re.Match[str], care: Care) -> str:
        head, text, at = match.group(), match.string, match.start()
        if text.startswith(self._controls, at) or self._runs_out(text, at):
            return self._masks[head]
        # A letter is left alone: templates change the case of letters, and no control token begins in mid-word.
        if care is Care.EXACT or head.isalnum() or text.startswith(self._readable, at):
            return head
        return self._masks[head]

    def _runs_out(self, text: str, at: int) -> bool:
        """Whether the text ends in the middle of what could become a control token with what follows it."""
        return len(text) - at <= len(self._controls[0]) and text[at:] in self._begins


def _one_of(characters: Iterable[str]) -> str:
    return f"[{re.escape(''.join(characters))}]" if characters else "(?!)"


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
