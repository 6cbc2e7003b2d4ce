"""A cheap lower bound on how many tokens a text has, to refuse a hopeless one before it is tokenised.

Every token covers at most so many bytes of each class (letters, spaces, other ASCII, the rest). A text with n bytes of
a class therefore has at least n / that many tokens. Exact for what it refuses, and it bounds the work for what it
lets pass: at most ``limit`` times the longest token of each class.
"""

from __future__ import annotations

import math
import string
from collections.abc import Iterable

_CLASSES = (
    (string.ascii_letters + string.digits).encode(),
    string.whitespace.encode(),
    bytes(byte for byte in range(128) if chr(byte) not in string.ascii_letters + string.digits + string.whitespace),
    bytes(range(128, 256)),
)


class LengthBound:
    """Bounds token counts by byte counts; knows the vocabulary only by the longest run of each class in a token."""

    def __init__(self, surfaces: Iterable[bytes], dropped: bytes = b"") -> None:
        """Measures the tokens' ``surfaces``; ``dropped`` are bytes that tokens do not cover."""
        self._dropped = dropped
        longest = [1] * len(_CLASSES)
        for surface in surfaces:
            for index, count in enumerate(_count(surface)):
                if count > longest[index]:
                    longest[index] = count
        self._longest = tuple(longest)

    def at_least(self, text: bytes) -> int:
        """A number of tokens that ``text`` (UTF-8) certainly has or exceeds."""
        counts = _count(text.translate(None, self._dropped))
        return max(math.ceil(count / most) for count, most in zip(counts, self._longest, strict=True))


def _count(data: bytes) -> list[int]:
    return [len(data) - len(data.translate(None, members)) for members in _CLASSES]
