"""Tokens that are found in text by their spelling: where they stand, and which of them are control tokens.

Knows spellings and ids. Does not know how the text between them becomes tokens (see ``backend.py``).
"""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping

_WHITESPACE = "\t\n\v\f\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # Unicode's White_Space
_SPACES = re.compile(f"[{_WHITESPACE}]*")
_WORD_CATEGORIES = ("L", "M", "Nd", "Nl", "Pc")  # Unicode's \w; Python's own differs in marks and fractions
_OTHER_WORD = re.compile("[\u200c\u200d\u24b6-\u24e9\U0001f130-\U0001f149\U0001f150-\U0001f169\U0001f170-\U0001f189]")

_END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<turn|>",
    "<eos>",
    "<|return|>",
    "<|call|>",
    "<|endoftext|>",
    "<|end_of_text|>",
)


@dataclasses.dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is matched by its spelling before the text around it is split.

    Attributes:
        token: its id.
        spelling: what stands in the text.
        control: it steers the model (turn markers, end of text) and is no text; ``False`` for a plain added word.
        lstrip, rstrip: the match takes the white space before or after it along.
        single_word: it only counts where it does not touch a word character.
    """

    token: int
    spelling: str
    control: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class ControlMatcher:
    """Cuts text at control tokens: leftmost match first, the longest one at a place. Immutable, safe in threads."""

    def __init__(self, added: Iterable[AddedToken]) -> None:
        self._added = {token.spelling: token for token in added if token.spelling}
        self._pattern = re.compile(longest_of(self._added))

    def split(self, text: str, inert: Collection[int] = frozenset()) -> list[str | int]:
        """Returns ``text`` as plain stretches (str) and control token ids (int), in order, with no empty stretch.

        ``inert`` holds character positions that no control token may cover: text from a client that merely looks
        like one stays text.
        """
        parts: list[str | int] = []
        done = at = 0
        while (match := self._pattern.search(text, at)) is not None:
            start, at = match.span()
            token = self._added[match.group()]
            if not token.control or (token.single_word and _touches_word(text, start, at)):
                continue
            if inert and any(position in inert for position in range(start, at)):
                at = start + 1
                continue
            if token.lstrip:
                start = _before_spaces(text, start, done)
            if token.rstrip:
                at = _end_of_spaces(text, at)
            if start > done:
                parts.append(text[done:start])
            parts.append(token.token)
            done = at
        if done < len(text):
            parts.append(text[done:])
        return parts


def end_of_turn_tokens(controls: Mapping[str, int]) -> tuple[int, ...]:
    """Ids of the control tokens that end a turn or a text in the common chat formats, whatever the metadata names.

    ``<|end|>`` ends a turn in some formats and merely a message in the one that also has ``<|return|>``.
    """
    names = _END_OF_TURN if "<|return|>" in controls else (*_END_OF_TURN, "<|end|>")
    return tuple(controls[name] for name in names if name in controls)


def longest_of(words: Collection[str]) -> str:
    """A pattern that matches the longest of ``words`` at a place, a step a letter however many there are."""
    return f"(?:{_trie(sorted(set(words)))})" if words else "(?!)"


def _trie(words: list[str]) -> str:
    tails: dict[str, list[str]] = {}
    for word in words:
        tails.setdefault(word[0], []).append(word[1:])
    branches = []
    for head, group in tails.items():
        shared = _shared_start(group[0], group[-1])  # sorted: what these two share, all share
        longer = _trie([tail[len(shared) :] for tail in group if len(tail) > len(shared)])
        ends_here = shared in group
        rest = f"(?:{longer}){'?' if ends_here else ''}" if longer else ""
        branches.append(re.escape(head + shared) + rest)
    return "|".join(branches)


def _shared_start(first: str, last: str) -> str:
    length = 0
    while length < min(len(first), len(last)) and first[length] == last[length]:
        length += 1
    return first[:length]


def _before_spaces(text: str, start: int, floor: int) -> int:
    while start > floor and _end_of_spaces(text, start - 1) > start - 1:
        start -= 1
    return start


def _end_of_spaces(text: str, at: int) -> int:
    match = _SPACES.match(text, at)
    return at if match is None else match.end()


def _touches_word(text: str, start: int, stop: int) -> bool:
    return any(
        unicodedata.category(character).startswith(_WORD_CATEGORIES) or _OTHER_WORD.match(character)
        for character in text[max(0, start - 1) : start] + text[stop : stop + 1]
    )
