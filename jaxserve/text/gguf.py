"""A tokenizer from the metadata of a GGUF file.

Knows the ``tokenizer.ggml.*`` keys and what they leave unsaid. Three kinds are supported: ``gpt2`` (byte-level BPE),
``llama`` (SentencePiece BPE with scores) and ``gemma4`` (BPE over UTF-8 with spaces marked).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.text.backend import SPACE_MARK, Backend, fallback_byte
from jaxserve.text.control import end_of_turn_tokens
from jaxserve.text.folder import SpecialIds
from jaxserve.text.gguf_pretokenizers import PRE_TOKENIZERS
from jaxserve.text.sentencepiece_backend import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    SentencePieceBackend,
    bpe_model,
)
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.tokenizers_backend import TokenizersBackend

_PREFIX = "tokenizer.ggml."
_SOURCE = "the GGUF file's tokenizer metadata"
_SCORED_DEFAULTS = {"unknown": 0, "bos": 1, "eos": 2}


class _Metadata:
    """Typed look-ups that say which key is at fault."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.model = self.text("model")
        self.tokens: list[str] = self._array("tokens", str, required=True)
        size = len(self.tokens)
        self.types: list[int] = self._array("token_type", int) or [NORMAL] * size
        self.scores: list[float] = self._array("scores", (int, float)) or [0.0] * size
        self.merges: list[str] = self._array("merges", str)
        if not size or len(self.types) != size or len(self.scores) != size:
            raise CheckpointError(f"{_SOURCE}: tokens, token_type and scores differ in length or are empty")

    def text(self, key: str) -> str:
        value = self._values.get(_PREFIX + key)
        if value is not None and not isinstance(value, str):
            raise CheckpointError(f"{_SOURCE}: {_PREFIX}{key} is not a string")
        return value or ""

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(_PREFIX + key, default)
        if not isinstance(value, (bool, int)):
            raise CheckpointError(f"{_SOURCE}: {_PREFIX}{key} is not a boolean")
        return bool(value)

    def id(self, role: str) -> int | None:
        value = self._values.get(f"{_PREFIX}{role}_token_id")
        if value is None or (isinstance(value, int) and (value < 0 or value == 0xFFFFFFFF)):
            return None
        if type(value) is not int or value >= len(self.tokens):
            raise CheckpointError(f"{_SOURCE}: {_PREFIX}{role}_token_id is no token of {len(self.tokens)}")
        return value

    def _array(self, key: str, kind: type | tuple[type, ...], *, required: bool = False) -> list[Any]:
        value = self._values.get(_PREFIX + key)
        if value is None and not required:
            return []
        if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(v, kind) for v in value):
            raise CheckpointError(f"{_SOURCE}: {_PREFIX}{key} is missing or malformed")
        return list(value)


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer that a GGUF file describes.

    ``metadata`` holds plain str, int, float, bool and lists of them. Raises CheckpointError for a kind or a
    pre-tokenizer that is not known: a wrong one would serve wrong tokens without any sign of it.
    """
    data = _Metadata(metadata)
    if data.model == "llama":
        return _from_scores(data)
    if data.model == "gpt2":
        return _from_merges(data)
    if data.model == "gemma4":
        return _from_marked_merges(data)
    raise CheckpointError(f"{_SOURCE}: tokenizer.ggml.model is {data.model or 'missing'!r}, which is not supported")


def _from_merges(data: _Metadata) -> Tokenizer:
    name = data.text("pre") or "default"
    rule = PRE_TOKENIZERS.get(name)
    if rule is None:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise CheckpointError(f"{_SOURCE}: unknown pre-tokenizer {name!r}; known are {known}")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in rule.patterns
    ]
    definition = _bpe_definition(data) | {
        "normalizer": {"type": "NFC"} if rule.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "decoder": byte_level,
    }
    definition["model"] |= {"ignore_merges": rule.ignore_merges}
    backend = TokenizersBackend(json.dumps(definition), source=_SOURCE)
    return Tokenizer(backend, _special_ids(data, backend, rule.adds_bos))


def _from_marked_merges(data: _Metadata) -> Tokenizer:
    decoders = [
        {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    definition = _bpe_definition(data) | {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
    }
    unknown = data.id("unknown")
    definition["model"] |= {
        "byte_fallback": True,
        "fuse_unk": True,
        "unk_token": None if unknown is None else data.tokens[unknown],
    }
    backend = TokenizersBackend(json.dumps(definition), source=_SOURCE)
    return Tokenizer(backend, _special_ids(data, backend, adds_bos=True))


def _bpe_definition(data: _Metadata) -> dict[str, Any]:
    """The part of a ``tokenizer.json`` that both kinds of BPE share."""
    vocabulary: dict[str, int] = {}
    for token, spelling in enumerate(data.tokens):
        if spelling:
            vocabulary.setdefault(spelling, token)
    merges = []
    for merge in data.merges:
        cut = merge.find(" ", 1)
        if cut < 0:
            raise CheckpointError(f"{_SOURCE}: {_PREFIX}merges holds {merge!r}, which is no pair")
        merges.append([merge[:cut], merge[cut + 1 :]])
    added = [
        {
            "id": token,
            "content": spelling,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != USER_DEFINED,
        }
        for token, (spelling, kind) in enumerate(zip(data.tokens, data.types, strict=True))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) and vocabulary.get(spelling) == token
    ]
    return {
        "version": "1.0",
        "added_tokens": added,
        "post_processor": None,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
    }


def _from_scores(data: _Metadata) -> Tokenizer:
    unknown = data.id("unknown")
    if unknown is None:
        unknown = data.types.index(UNKNOWN) if UNKNOWN in data.types else _SCORED_DEFAULTS["unknown"]
    seen: set[str] = set()
    pieces = []
    for token, (spelling, score) in enumerate(zip(data.tokens, data.scores, strict=True)):
        kind = _piece_type(data.types[token], token == unknown, spelling)
        # Files hold added words with literal spaces; the library looks for them after it has marked the spaces.
        piece = spelling.replace(" ", SPACE_MARK) if kind == USER_DEFINED else spelling
        if not piece or piece in seen:
            piece, kind = f"<no token {token}>", UNUSED
        seen.add(piece)
        pieces.append((piece, score, kind))
    bos, eos, pad = (data.id(role) for role in ("bos", "eos", "padding"))
    ids = {
        "unk": unknown,
        "bos": _SCORED_DEFAULTS["bos"] if bos is None else bos,
        "eos": _SCORED_DEFAULTS["eos"] if eos is None else eos,
        "pad": -1 if pad is None else pad,
    }
    model = bpe_model(pieces, ids, add_dummy_prefix=data.flag("add_space_prefix", True))
    backend = SentencePieceBackend(model, source=_SOURCE)
    return Tokenizer(backend, _special_ids(data, backend, adds_bos=True))


def _piece_type(kind: int, is_unknown: bool, spelling: str) -> int:
    """Only one piece may be the unknown one; some files mark many so."""
    if is_unknown:
        return UNKNOWN
    if kind == BYTE and fallback_byte(spelling) is None:
        raise CheckpointError(f"{_SOURCE}: {spelling!r} is marked as a byte but names none")
    return kind if kind in (CONTROL, USER_DEFINED, UNUSED, BYTE) else NORMAL


def _special_ids(data: _Metadata, backend: Backend, adds_bos: bool) -> SpecialIds:
    defaults = _SCORED_DEFAULTS if data.model == "llama" else {}

    def role(name: str) -> int | None:
        token = data.id(name)
        return defaults.get(name) if token is None else token

    bos, eos = role("bos"), role("eos")
    ends = [token for token in (eos, data.id("eot"), data.id("eom")) if token is not None]
    ends += end_of_turn_tokens({token.spelling: token.token for token in backend.added if token.control})
    return SpecialIds(
        bos=bos,
        eos=tuple(dict.fromkeys(ends)),
        pad=data.id("padding"),
        unk=role("unknown"),
        before=(bos,) if bos is not None and data.flag("add_bos_token", adds_bos) else (),
        after=(eos,) if eos is not None and data.flag("add_eos_token", False) else (),
    )
