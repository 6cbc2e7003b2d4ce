"""Which characters of a rendered prompt came from a client and look like the start of a control token.

Before rendering, such characters in the client's strings are replaced by private-use characters, one for one; after it
they are put back and their places are known. Templates may trim, cut, repeat or escape the strings: only what a
template does with exactly these characters could show, and ``chat.py`` compares with a plain rendering to see that.
Knows strings and spellings; neither templates nor tokens.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Collection, Iterable
from typing import Any

from jaxserve.text.control import longest_of

_FIRST_MASK = 0x10F800  # in Unicode's last private-use plane
_SLICE = 65536
_RUN = "{1,1024}"  # signs in a match: within one no other thread runs


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
        spellings = [spelling for spelling in controls if spelling]
        heads = sorted({spelling[0] for spelling in spellings})
        masks = [chr(_FIRST_MASK + index) for index in range(len(heads))]
        self._mask = str.maketrans(dict(zip(heads, masks, strict=True)))
        self._unmask = str.maketrans(dict(zip(masks, heads, strict=True)))
        self._head, self._masked = re.compile(_one_of(heads)), re.compile(_one_of(masks))
        self._control = re.compile(longest_of(spellings))
        self._begins = frozenset(spelling[:end] for spelling in spellings for end in range(1, len(spelling)))
        self._longest = max(map(len, self._begins), default=0)
        readable = [text for text in literals if len(text) > 1 and text not in self._begins and text[0] in heads]
        # A letter is left alone: templates change the case of letters, and no control token begins in mid-word.
        signs = _one_of([head for head in heads if not head.isalnum()])
        exact = f"(?={self._control.pattern}){_one_of(heads)}"
        self._to_mask = {
            Care.EXACT: re.compile(f"(?:{exact}){_RUN}"),
            Care.FULL: re.compile(f"(?:{exact}|(?!{longest_of(readable)}){signs}){_RUN}"),
        }

    def holds_control(self, value: Any) -> bool:
        """Whether any string in ``value`` (plain JSON data) spells a control token."""
        return any(self._control.search(text) for text in _strings(value))

    def needed(self, value: Any) -> bool:
        """Whether ``put_on`` would replace anything in ``value``."""
        return any(self._head.search(text) for text in _strings(value))

    def put_on(self, value: Any, care: Care) -> Any:
        """A copy of ``value`` (plain JSON data) with the characters in its strings and keys replaced."""
        if isinstance(value, str):
            return self._put_on_text(value, care)
        if isinstance(value, list):
            return [self.put_on(item, care) for item in value]
        if isinstance(value, dict):
            return {self.put_on(key, care): self.put_on(item, care) for key, item in value.items()}
        return value

    def take_off(self, text: str) -> tuple[str, frozenset[int]]:
        """The readable text, and the positions of the characters that were disguised."""
        places = frozenset(match.start() for match in self._masked.finditer(text))
        if not places:
            return text, places
        # In slices: within one translation no other thread runs.
        slices = (text[begin : begin + _SLICE] for begin in range(0, len(text), _SLICE))
        return "".join(part.translate(self._unmask) for part in slices), places

    def _put_on_text(self, text: str, care: Care) -> str:
        masked = self._to_mask[care].sub(lambda run: run.group().translate(self._mask), text)
        for at in range(max(0, len(text) - self._longest), len(text)):
            if text[at:] in self._begins:  # what follows in the prompt could complete it
                masked = masked[:at] + text[at].translate(self._mask) + masked[at + 1 :]
        return masked


@functools.lru_cache(maxsize=8)
def disguise_for(controls: frozenset[str], literals: frozenset[str]) -> Disguise:
    """The ``Disguise`` of a vocabulary and a template; making one takes longer than using it."""
    return Disguise(controls, literals)


def _one_of(characters: list[str]) -> str:
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
