"""Vocabularies in the form of ``tokenizer.json``, run by the ``tokenizers`` library.

Knows that file: which decoder makes which bytes of a token, what its added tokens are. The library is used for one
thing only, turning text into ids; bytes come from a table made once, so that decoding is the same for both backends.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from jaxserve.errors import CheckpointError
from jaxserve.text.backend import SPACE_MARK, fallback_byte
from jaxserve.text.control import AddedToken

FILE = "tokenizer.json"
_KEEPS_ALL = {"Split", "ByteLevel", "Metaspace", "Digits", "Punctuation", "Sequence"}
_SPACE_DECODERS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
_UTF8_BYTES = frozenset(range(256)) - {0xC0, 0xC1, *range(0xF5, 0x100)}  # the others occur in no text


def byte_letters() -> dict[int, str]:
    """Byte -> the printable character that byte-level BPE vocabularies write for it."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(rest)}


_LETTER_BYTES = {letter: byte for byte, letter in byte_letters().items()}


class TokenizersBackend:
    """A ``tokenizer.json``; see ``Backend`` for the attributes."""

    def __init__(self, text: str, extra: Iterable[AddedToken] = (), *, source: str = FILE) -> None:
        """Builds the tokenizer from the JSON ``text``.

        ``extra`` are tokens that other files of the same folder declare; ``source`` names the file in errors. Raises
        CheckpointError for anything that is no tokenizer or that decodes in a way not known here.
        """
        self._source = source
        definition = _parse(text, source)
        try:
            self._read(definition, text if not _declare(definition, extra) else json.dumps(definition), source)
        except BaseException as error:
            # The library raises plain Exception, and for some malformed files its panics, which are no Exception.
            if isinstance(error, CheckpointError) or not (isinstance(error, Exception) or _is_panic(error)):
                raise
            raise CheckpointError(f"{source} is not a usable tokenizer: {error!r}") from error
        # An added token of our own stands in for each control token while the text around it is tokenised, so that
        # the library sees exactly the pieces it would cut itself. Nobody can guess its spelling.
        self._stand_in = f"\U0010ffff{secrets.token_hex(16)}\U0010ffff"
        self._tokenizer.add_tokens([tokenizers.AddedToken(self._stand_in, normalized=False)])
        self._stand_in_id = self._tokenizer.token_to_id(self._stand_in)

    def _read(self, definition: dict[str, Any], text: str, source: str) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_str(text)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # control tokens are our own matcher's business
        added = [self._added_token(entry, source) for entry in definition["added_tokens"] if entry["content"]]
        # Added words that the library looks for in normalised text it finds after all others.
        late = {entry["content"] for entry in definition["added_tokens"] if entry.get("normalized", True)}
        self.added = tuple(token for token in added if token.control or token.spelling not in late)
        self.spellings = self._read_spellings(source)
        self.surfaces, self.dropped = self._read_surfaces(definition, source)
        if not _keeps_all(definition["pre_tokenizer"]) or any(token.lstrip or token.rstrip for token in added):
            self.dropped = None
        normalizers = _flatten(definition["normalizer"], "normalizers")
        self._prepended = "".join(entry["prepend"] for entry in normalizers if entry["type"] == "Prepend")
        self.strips_space = _strips_space(definition["decoder"])
        self.around = self._probe_post_processor()

    def encode(self, parts: Sequence[str | int]) -> list[int]:
        """See ``Backend.encode``."""
        text = "".join(part if isinstance(part, str) else self._stand_in for part in parts)
        # The plain `encode` keeps Python's lock: every other thread would stand still, the event loop's, too.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        controls = [part for part in parts if isinstance(part, int)]
        if not controls:
            return ids
        following = iter(controls)
        return [next(following) if token == self._stand_in_id else token for token in ids]

    def cut(self, size: int) -> TokenizersBackend:
        """See ``Backend.cut``."""
        definition = self._definition()
        added = {entry["content"] for entry in definition["added_tokens"] if entry["id"] >= size}
        for token, spelling in enumerate(self.spellings[size:], size):
            if spelling and spelling not in added:
                raise CheckpointError(f"{self._source}: token {token} ({spelling[:40]!r}) is part of ordinary text")
        definition["added_tokens"] = [entry for entry in definition["added_tokens"] if entry["id"] < size]
        vocabulary = definition["model"]["vocab"]
        if isinstance(vocabulary, dict):
            definition["model"]["vocab"] = {word: token for word, token in vocabulary.items() if token < size}
        else:
            del vocabulary[size:]
        return TokenizersBackend(json.dumps(definition), source=self._source)

    def normalize(self, text: str) -> str:
        """See ``Backend.normalize``."""
        normalizer = self._tokenizer.normalizer
        if normalizer is None:
            return text
        # What a normaliser prepends it prepends to each piece between added words: count none of it.
        return str(normalizer.normalize_str(text)).removeprefix(self._prepended).replace(SPACE_MARK, " ")

    def save(self, folder: Path) -> dict[str, object]:
        """See ``Backend.save``."""
        (folder / FILE).write_text(json.dumps(self._definition(), ensure_ascii=False), encoding="utf-8")
        return {"tokenizer_class": "PreTrainedTokenizerFast"}

    def _definition(self) -> dict[str, Any]:
        definition: dict[str, Any] = json.loads(self._tokenizer.to_str())
        definition["added_tokens"] = [
            entry for entry in definition["added_tokens"] if entry["content"] != self._stand_in
        ]
        return definition

    def _added_token(self, entry: Mapping[str, Any], source: str) -> AddedToken:
        token = self._tokenizer.token_to_id(entry["content"])
        if token is None or token != entry.get("id", token):
            # The library numbers added tokens itself; where the file leaves gaps, it would serve other ids.
            raise CheckpointError(f"{source}: added token {entry['content']!r} has id {entry.get('id')}, not {token}")
        return AddedToken(
            token=token,
            spelling=entry["content"],
            control=bool(entry["special"]),
            lstrip=bool(entry.get("lstrip")),
            rstrip=bool(entry.get("rstrip")),
            single_word=bool(entry.get("single_word")),
        )

    def _read_spellings(self, source: str) -> list[str]:
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise CheckpointError(f"{source} has an empty vocabulary")
        spellings = [""] * (max(vocabulary.values()) + 1)
        for spelling, token in vocabulary.items():
            spellings[token] = spelling
        return spellings

    def _read_surfaces(self, definition: Mapping[str, Any], source: str) -> tuple[list[bytes], bytes | None]:
        """Bytes of every token, and ``dropped`` as far as the model decides it."""
        model = definition["model"]
        kinds = {entry["type"] for entry in _flatten(definition["decoder"], "decoders")}
        if kinds and kinds <= {"ByteLevel", "Fuse"}:
            words = {entry["content"] for entry in definition["added_tokens"]}  # written as they are
            surfaces = [word.encode() if word in words else _from_letters(word) for word in self.spellings]
            alone = [surface for surface in surfaces if len(surface) == 1]
        elif kinds and kinds <= _SPACE_DECODERS:
            falls_back = bool(model.get("byte_fallback"))
            surfaces = [_from_marked(spelling, falls_back) for spelling in self.spellings]
            alone = [byte for spelling in self.spellings if falls_back and (byte := fallback_byte(spelling))]
        else:
            raise CheckpointError(f"{source} has a decoder that is not supported: {sorted(kinds) or None}")
        missing = bytes(sorted(_UTF8_BYTES - {byte[0] for byte in alone}))
        skips_unknown = "ByteLevel" in kinds and model.get("unk_token") is None
        return surfaces, missing if model.get("type") == "BPE" and (skips_unknown or not missing) else None

    def _probe_post_processor(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        full = self._tokenizer.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(plain) + 1):
            if full[start : start + len(plain)] == plain:
                return tuple(full[:start]), tuple(full[start + len(plain) :])
        return (), ()


def _is_panic(error: BaseException) -> bool:
    return type(error).__name__ == "PanicException"  # the class cannot be imported


def _parse(text: str, source: str) -> dict[str, Any]:
    try:
        definition = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source} is not JSON: {error}") from error
    if not isinstance(definition, dict) or not isinstance(definition.get("model"), dict):
        raise CheckpointError(f"{source} is JSON but not a tokenizer: it has no model")
    added = definition.setdefault("added_tokens", [])
    valid = isinstance(added, list) and all(isinstance(entry, dict) and "content" in entry for entry in added)
    if not valid or not isinstance(definition["model"].get("vocab"), (dict, list)):
        raise CheckpointError(f"{source} is JSON but not a tokenizer: its vocabulary or added tokens are malformed")
    for key in ("normalizer", "pre_tokenizer", "decoder"):
        definition.setdefault(key, None)
    for entry in added:
        entry.setdefault("special", False)
    return definition


def _declare(definition: dict[str, Any], extra: Iterable[AddedToken]) -> bool:
    """Adds to the definition what ``extra`` says beyond it; true if that changed anything.

    An id of -1 stands for a token that is only named: it counts if the vocabulary has it.
    """
    entries = {entry["content"]: entry for entry in definition["added_tokens"]}
    changed = False
    for token in extra:
        known = entries.get(token.spelling)
        if known is None:
            number = token.token if token.token >= 0 else _model_id(definition, token.spelling)
            if number is None:
                continue
            entries[token.spelling] = {
                "id": number,
                "content": token.spelling,
                "single_word": token.single_word,
                "lstrip": token.lstrip,
                "rstrip": token.rstrip,
                "normalized": False,
                "special": token.control,
            }
            changed = True
        elif token.control and not known["special"]:
            known["special"] = changed = True
    definition["added_tokens"] = sorted(entries.values(), key=lambda entry: int(entry["id"]))
    return changed


def _model_id(definition: Mapping[str, Any], spelling: str) -> int | None:
    vocabulary = definition["model"]["vocab"]
    if isinstance(vocabulary, dict):
        number = vocabulary.get(spelling)
        return number if isinstance(number, int) else None
    return next((index for index, piece in enumerate(vocabulary) if piece[0] == spelling), None)


def _flatten(entry: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    if not isinstance(entry, dict):
        return []
    if entry.get("type") == "Sequence":
        return [leaf for child in entry.get(key, []) for leaf in _flatten(child, key)]
    return [entry]


def _keeps_all(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    return all(
        entry["type"] in _KEEPS_ALL and entry.get("behavior") != "Removed"
        for entry in _flatten(pre_tokenizer, "pretokenizers")
    )


def _strips_space(decoder: Mapping[str, Any] | None) -> bool:
    for entry in _flatten(decoder, "decoders"):
        if entry["type"] == "Strip" and entry.get("start"):
            return True
        if entry["type"] == "Metaspace":
            return str(entry.get("prepend_scheme", "always")) != "never" and entry.get("add_prefix_space", True)
    return False


def _from_letters(spelling: str) -> bytes:
    try:
        return bytes(_LETTER_BYTES[letter] for letter in spelling)
    except KeyError:
        return spelling.encode()


def _from_marked(spelling: str, falls_back: bool) -> bytes:
    byte = fallback_byte(spelling) if falls_back else None
    return spelling.replace(SPACE_MARK, " ").encode() if byte is None else byte
