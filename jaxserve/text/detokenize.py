"""Tokens to text while they arrive: whole characters only, and nothing of a stop string or after it.

Whatever the cuts between pushes, the pieces joined are the decoded whole. Work per token does not depend on how much
came before.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from jaxserve.errors import InvalidRequest
from jaxserve.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one output. Not for several threads at once.

    Attributes:
        stopped: a stop string was found; the text has ended before it and later tokens are ignored.
        stop: that stop string, ``None`` while there is none.
        text_offset: where the next token's text begins: characters decoded so far, those still withheld included. Read
            it before each ``push`` of one token for OpenAI's ``text_offset``. A character that is spread over tokens
            begins where the first of them does, and so do the others.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        skip_special: bool = True,
        continues: bool = False,
        text_offset: int = 0,
    ) -> None:
        """Starts an output.

        Args:
            tokenizer: gives the bytes of tokens.
            stop: the output ends before the first of these to be complete (the longest of those that end together).
            skip_special: control tokens are no text.
            continues: the output goes on from other text, so a space at its start is a real one.
            text_offset: where in the whole text this output begins.

        Raises:
            InvalidRequest: a stop string is empty.
        """
        if any(not text for text in stop):
            raise InvalidRequest("A stop string must not be empty", param="stop")
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._drops_space = tokenizer.strips_space and not continues
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._watchers = [_Watcher(text) for text in dict.fromkeys(stop)]
        self._withheld = ""
        self.stop: str | None = None
        self.text_offset = text_offset

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.stop is not None

    def push(self, tokens: Iterable[int]) -> str:
        """Takes the next tokens; returns the text that is now certain to be part of the output."""
        data = b"".join(self._tokenizer.token_bytes(token, skip_special=self._skip_special) for token in tokens)
        if data and self._drops_space:
            data = data.removeprefix(b" ")
            self._drops_space = False
        return self._release(self._decoder.decode(data))

    def finish(self) -> str:
        """Ends the output; returns what was withheld. A cut character becomes U+FFFD."""
        text = self._release(self._decoder.decode(b"", final=True)) + self._withheld
        self._withheld = ""
        return text

    def _release(self, text: str) -> str:
        if self.stopped:
            return ""
        self.text_offset += len(text)
        if not self._watchers:
            return text
        pending = self._withheld + text
        for position, character in enumerate(text, start=len(self._withheld) + 1):
            found = [watcher for watcher in self._watchers if watcher.advance(character)]
            if found:
                self.stop = max((watcher.text for watcher in found), key=len)
                self._withheld = ""
                return pending[: position - len(self.stop)]
        kept = max(watcher.matched for watcher in self._watchers)
        self._withheld = pending[len(pending) - kept :]
        return pending[: len(pending) - kept]


class _Watcher:
    """Knuth, Morris and Pratt's search for one stop string, a character at a time."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0  # how long a beginning of ``text`` the characters so far end with
        self._fallback = [0] * len(text)  # the next shorter beginning to try, by characters matched - 1
        length = 0
        for index in range(1, len(text)):
            while length and text[index] != text[length]:
                length = self._fallback[length - 1]
            length += text[index] == text[length]
            self._fallback[index] = length

    def advance(self, character: str) -> bool:
        """Takes one character; true if the stop string is complete with it."""
        while self.matched and self.text[self.matched] != character:
            self.matched = self._fallback[self.matched - 1]
        self.matched += self.text[self.matched] == character
        return self.matched == len(self.text)
