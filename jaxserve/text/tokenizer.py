"""``Tokenizer``: text to token ids and back, the same whichever library and file a vocabulary comes from.

Knows control tokens, special ids, lengths and bytes. Does not know where a checkpoint comes from (``folder.py``,
``gguf.py`` do), what a conversation is (``chat.py``) or how a stream is cut (``detokenize.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from jaxserve.errors import CheckpointError, ContextLengthExceeded, InvalidRequest
from jaxserve.text.backend import Backend
from jaxserve.text.bound import LengthBound
from jaxserve.text.control import ControlMatcher
from jaxserve.text.folder import SpecialIds, read_folder, write_folder

_PROBE = "Hello, world! 123\n"
_STRANGE = "\U0010fffd"  # in no vocabulary: what stands for the unknown has to be
_LONG_TOKEN = 8  # characters; a text with more of them a token is looked at in part first
_LEAST_PART = 4096  # characters, so that what a cut changes at its edge is nothing beside the rest


class Tokenizer:
    """A vocabulary with its rules. Immutable; every method may be called from any thread.

    Attributes:
        vocab_size: ids lie in ``[0, vocab_size)``; a model's embedding may be padded beyond that.
        bos_id, pad_id, unk_id: ids with a role, ``None`` if there is none.
        eos_ids: every id that ends an output, the main one first.
        adds_bos, adds_eos: whether ``encode(add_special=True)`` puts one there.
        controls: spelling -> id of every control token.
        special_tokens: ``bos_token``, ``eos_token``, ... -> spelling, as chat templates want them.
        strips_space: the first space of a decoded text is the tokenizer's own and is dropped.
    """

    def __init__(self, backend: Backend, special: SpecialIds) -> None:
        self._backend = backend
        self._special = special
        self._matcher = ControlMatcher(backend.added)
        self.vocab_size = len(backend.spellings)
        self._check_special()
        self._bound = None
        if backend.dropped is not None:
            words = [backend.normalize(token.spelling).encode() for token in backend.added]  # found before normalising
            self._bound = LengthBound([*backend.surfaces, *words], backend.dropped)
        self.bos_id, self.pad_id, self.unk_id = special.bos, special.pad, special.unk
        self.eos_ids = special.eos
        self.adds_bos = special.bos is not None and special.bos in special.before
        self.adds_eos = any(token in special.after for token in special.eos)
        self.strips_space = backend.strips_space
        self.controls: Mapping[str, int] = MappingProxyType(
            {token.spelling: token.token for token in backend.added if token.control}
        )
        self._control_ids = frozenset(self.controls.values())
        self.special_tokens: Mapping[str, str] = MappingProxyType(self._special_tokens())
        self._check()

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Reads a checkpoint's ``tokenizer/`` folder or any Hugging Face folder. Raises CheckpointError."""
        backend, special = read_folder(Path(folder))
        try:
            return cls(backend, special)
        except CheckpointError as error:
            raise CheckpointError(f"{folder}: {error}") from error

    def within(self, rows: int) -> Tokenizer:
        """The tokenizer of a model whose embedding has so many ``rows``: no id beyond them is ever given.

        A vocabulary may end in added words for which a model has no row, such as placeholders of images. Text that
        spells one of them is text.

        Raises:
            CheckpointError: a token of ordinary text or one with a role is beyond them: that is another model's
                vocabulary.
        """
        return self if self.vocab_size <= rows else Tokenizer(self._backend.cut(rows), self._special)

    def save(self, folder: Path) -> None:
        """Writes the files that ``load`` reads; the folder is made if it is not there."""
        write_folder(Path(folder), self._backend, self._special)

    def encode(
        self,
        text: str,
        *,
        add_special: bool = True,
        parse_special: bool = False,
        inert: Collection[int] = frozenset(),
        max_tokens: int | None = None,
    ) -> list[int]:
        """Token ids of ``text``.

        Args:
            text: any string without lone surrogates.
            add_special: put the tokens before and after it that the model expects around a bare text.
            parse_special: text that spells a control token becomes that token; otherwise it stays text. (Added words
                that are no control tokens are matched in both cases, as every other tokenizer does.)
            inert: with ``parse_special``, character positions that no control token may cover.
            max_tokens: most tokens the caller can use. What a longer text costs depends on them, not on its length.

        Raises:
            InvalidRequest: the text has a lone surrogate.
            ContextLengthExceeded: there are more than ``max_tokens`` tokens.
        """
        _check_unicode(text)
        parts = self._matcher.split(text, inert) if parse_special else [text]
        if max_tokens is not None:
            self._refuse_hopeless(parts, max_tokens)
        ids = self._backend.encode(parts)
        if add_special:
            ids = [*self._special.before, *ids, *self._special.after]
        if max_tokens is not None:
            _check_length(len(ids), max_tokens)
        return ids

    def check_length(self, text: str, max_tokens: int) -> None:
        """Refuses a text that ``encode`` would refuse for its length, whatever of it is inert; not all of them.

        Raises:
            InvalidRequest, ContextLengthExceeded: as ``encode``.
        """
        _check_unicode(text)
        self._refuse_hopeless(self._matcher.split(text), max_tokens)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, continues: bool = False) -> str:
        """The text of ``ids``; bytes that are no UTF-8 become U+FFFD.

        ``continues``: the ids follow others, so a space at the start is a real one.
        """
        data = b"".join(self.token_bytes(token, skip_special=skip_special) for token in ids)
        if self.strips_space and not continues:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def token_bytes(self, token: int, *, skip_special: bool = True) -> bytes:
        """Exact bytes of one token: part of a character, perhaps; empty for control tokens if they are skipped.

        Ids that the vocabulary does not define (a padded embedding has some) have no bytes.
        """
        if not 0 <= token < self.vocab_size or (skip_special and token in self._control_ids):
            return b""
        return self._backend.surfaces[token]

    def token_text(self, token: int) -> str:
        """One token for display: its text, a control token's spelling, or ``bytes:\\xe2\\x82`` for part of one."""
        data = self.token_bytes(token, skip_special=False)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def token_id(self, spelling: str) -> int | None:
        """The id of the control token with this spelling."""
        return self.controls.get(spelling)

    def is_special(self, token: int) -> bool:
        """Whether the token is a control token: it counts as generated but is no text."""
        return token in self._control_ids

    def info(self) -> dict[str, Any]:
        """Facts for a client that tokenises on its own, in the words of ``tokenizer_config.json``."""
        return {
            **self.special_tokens,
            "vocab_size": self.vocab_size,
            "bos_token_id": self.bos_id,
            "eos_token_id": list(self.eos_ids),
            "pad_token_id": self.pad_id,
            "add_bos_token": self.adds_bos,
            "add_eos_token": self.adds_eos,
            "special_tokens": dict(self.controls),
        }

    def _refuse_hopeless(self, parts: Sequence[str | int], max_tokens: int) -> None:
        """Refuses what is much too long before all of it is tokenised: first by its bytes, then by its beginning."""
        _check_length(self._at_least(parts), max_tokens)
        length = sum(len(part) for part in parts if isinstance(part, str))
        size = max(_LONG_TOKEN * max_tokens, _LEAST_PART)
        while size < length:
            if len(self._backend.encode(_beginning(parts, size))) > 2 * max_tokens + _LEAST_PART // _LONG_TOKEN:
                _check_length(max_tokens + 1, max_tokens)
            size *= 2

    def _at_least(self, parts: Sequence[str | int]) -> int:
        """How many tokens ``parts`` have for certain; costs far less than making them."""
        if self._bound is None:
            return 0
        stretches = [self._backend.normalize(part) for part in parts if isinstance(part, str)]
        return len(parts) - len(stretches) + self._bound.at_least("".join(stretches).encode())

    def _special_tokens(self) -> dict[str, str]:
        special = self._special
        ids = {"bos_token": special.bos, "eos_token": next(iter(special.eos), None)}
        ids |= {"unk_token": special.unk, "pad_token": special.pad}
        return {name: self._backend.spellings[token] for name, token in ids.items() if token is not None}

    def _check_special(self) -> None:
        special = self._special
        named = [token for token in (special.bos, special.pad, special.unk) if token is not None]
        for token in (*named, *special.eos, *special.before, *special.after):
            if not 0 <= token < self.vocab_size:
                raise CheckpointError(f"The special token {token} is outside the vocabulary of {self.vocab_size}")

    def _check(self) -> None:
        """A vocabulary whose table of bytes does not fit its own encoder must not be served."""
        try:
            self.encode(_STRANGE, add_special=False)
            ids = self.encode(_PROBE, add_special=False)
        except Exception as error:  # the library raises nothing more precise
            raise CheckpointError("The tokenizer cannot encode a text") from error
        lossless = self._bound is not None and self._backend.normalize(_PROBE) == _PROBE
        if not ids or max(ids) >= self.vocab_size or (lossless and not self.decode(ids).endswith(_PROBE)):
            raise CheckpointError("The tokenizer does not give a text back that it has encoded itself")


def _beginning(parts: Sequence[str | int], size: int) -> list[str | int]:
    """The first ``size`` characters of text, with the ids among them."""
    taken: list[str | int] = []
    for part in parts:
        if size <= 0:
            break
        taken.append(part if isinstance(part, int) else part[:size])
        size -= 0 if isinstance(part, int) else len(part)
    return taken


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        message = f"The text holds a lone surrogate (U+{ord(text[error.start]):04X}): it is not valid Unicode."
        raise InvalidRequest(message, code="invalid_string") from None


def _check_length(count: int, limit: int) -> None:
    if count > limit:
        raise ContextLengthExceeded(f"The prompt has at least {count} tokens; at most {limit} fit.")
