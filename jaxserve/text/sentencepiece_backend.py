"""Vocabularies in SentencePiece's own form (``tokenizer.model``), run by the ``sentencepiece`` library.

Knows the model proto: piece types, the dummy space before a text, byte fallback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import sentencepiece
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from sentencepiece import sentencepiece_model_pb2

from jaxserve.errors import CheckpointError
from jaxserve.text.backend import SPACE_MARK, fallback_byte
from jaxserve.text.control import AddedToken

FILE = "tokenizer.model"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # ModelProto.SentencePiece.Type
_new_proto: Callable[[], Any] = sentencepiece_model_pb2.ModelProto  # type: ignore[attr-defined]


class SentencePieceBackend:
    """A SentencePiece model; see ``Backend`` for the attributes.

    ``bos_id``, ``eos_id``, ``pad_id`` and ``unk_id`` are the model's own, -1 for none.
    """

    def __init__(
        self, data: bytes, extra: Iterable[AddedToken] = (), *, space_after_control: bool = True, source: str = FILE
    ) -> None:
        """Builds the tokenizer from a serialised ``ModelProto``.

        Args:
            data: the file's content.
            extra: tokens that other files declare: a known piece may become a control token, new ids extend the model.
            space_after_control: the dummy space also goes before text that follows a control token ("legacy").
            source: names the file in errors.
        """
        self._source = source
        proto = _parse(data, source)
        flags = {token.token: token for token in extra}
        _declare(proto, flags, source)
        self._proto = proto
        self._first = _load(proto, source)
        self._space_after_control = space_after_control
        self._later = self._first
        if proto.normalizer_spec.add_dummy_prefix and not space_after_control:
            bare = _new_proto()
            bare.CopyFrom(proto)
            bare.normalizer_spec.add_dummy_prefix = False
            self._later = _load(bare, source)
        self.spellings = [piece.piece for piece in proto.pieces]
        self.surfaces = [_surface(piece) for piece in proto.pieces]
        self.added = tuple(_added(index, piece, flags) for index, piece in enumerate(proto.pieces) if _is_added(piece))
        spec = proto.normalizer_spec
        self.strips_space = bool(spec.add_dummy_prefix or spec.remove_extra_whitespaces)
        covered = sum(piece.type == BYTE for piece in proto.pieces) == 256
        self.dropped = None if not covered or any(token.lstrip or token.rstrip for token in self.added) else b""
        self.around: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        self.bos_id, self.eos_id = int(self._first.bos_id()), int(self._first.eos_id())
        self.pad_id, self.unk_id = int(self._first.pad_id()), int(self._first.unk_id())

    def encode(self, parts: Sequence[str | int]) -> list[int]:
        """See ``Backend.encode``."""
        ids: list[int] = []
        for index, part in enumerate(parts):
            if isinstance(part, int):
                ids.append(part)
            else:
                processor = self._first if index == 0 else self._later
                ids.extend(processor.Encode(part, out_type=int))
        return ids

    def cut(self, size: int) -> SentencePieceBackend:
        """See ``Backend.cut``."""
        for index, piece in enumerate(self._proto.pieces[size:], size):
            if piece.type not in (CONTROL, USER_DEFINED, UNUSED):
                raise CheckpointError(f"{self._source}: token {index} ({piece.piece[:40]!r}) is part of ordinary text")
        shorter = _new_proto()
        shorter.CopyFrom(self._proto)
        del shorter.pieces[size:]
        shorter.trainer_spec.vocab_size = size
        kept = [token for token in self.added if token.token < size]
        return SentencePieceBackend(
            shorter.SerializeToString(), kept, space_after_control=self._space_after_control, source=self._source
        )

    def normalize(self, text: str) -> str:
        """See ``Backend.normalize``."""
        spec = self._proto.normalizer_spec
        if not spec.precompiled_charsmap and not spec.remove_extra_whitespaces:
            return text
        return str(self._first.Normalize(text)).replace(SPACE_MARK, " ")

    def save(self, folder: Path) -> dict[str, object]:
        """See ``Backend.save``."""
        (folder / FILE).write_bytes(self._proto.SerializeToString())
        flagged = [token for token in self.added if token.lstrip or token.rstrip or token.single_word]
        return {
            "legacy": self._space_after_control,
            "added_tokens_decoder": {
                str(token.token): {
                    "content": token.spelling,
                    "lstrip": token.lstrip,
                    "normalized": False,
                    "rstrip": token.rstrip,
                    "single_word": token.single_word,
                    "special": token.control,
                }
                for token in flagged
            },
        }


def bpe_model(pieces: Iterable[tuple[str, float, int]], ids: Mapping[str, int], *, add_dummy_prefix: bool) -> bytes:
    """A serialised BPE model of (spelling, score, type) in order of id.

    ``ids`` maps ``unk``, ``bos``, ``eos`` and ``pad`` to ids, -1 for none. Text is not normalised.
    """
    proto = _new_proto()
    for piece, score, kind in pieces:
        proto.pieces.add(piece=piece, score=score, type=kind)
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    trainer.model_type = trainer.BPE
    trainer.vocab_size = len(proto.pieces)
    trainer.byte_fallback = any(piece.type == BYTE for piece in proto.pieces)
    for role, token in ids.items():
        setattr(trainer, f"{role}_id", token)
        if 0 <= token < len(proto.pieces):
            setattr(trainer, f"{role}_piece", proto.pieces[token].piece)
    normalizer.name, normalizer.escape_whitespaces = "identity", True
    normalizer.remove_extra_whitespaces, normalizer.add_dummy_prefix = False, add_dummy_prefix
    return bytes(proto.SerializeToString())


def _parse(data: bytes, source: str) -> Any:
    proto = _new_proto()
    try:
        proto.ParseFromString(data)
    except DecodeError as error:
        raise CheckpointError(f"{source} is not a SentencePiece model: {error}") from error
    # A file cut between two pieces still parses; what comes after the pieces shows that it is whole.
    if not proto.pieces or not proto.HasField("trainer_spec") or not proto.HasField("normalizer_spec"):
        raise CheckpointError(f"{source} is not a whole SentencePiece model: pieces or specifications are missing")
    if any(isinstance(piece.piece, bytes) for piece in proto.pieces):
        raise CheckpointError(f"{source} is not a SentencePiece model: a piece is not UTF-8")
    if proto.trainer_spec.treat_whitespace_as_suffix:
        raise CheckpointError(f"{source} writes spaces behind words (treat_whitespace_as_suffix): not supported")
    return proto


def _load(proto: Any, source: str) -> sentencepiece.SentencePieceProcessor:
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    except (RuntimeError, ValueError, TypeError) as error:
        raise CheckpointError(f"{source} is not a usable SentencePiece model: {error}") from error


def _declare(proto: Any, flags: dict[int, AddedToken], source: str) -> None:
    """Writes ``flags`` into the model: the library then matches plain added words and never spells control tokens."""
    for token in sorted(flags):
        declared = flags[token]
        if token < len(proto.pieces):
            piece = proto.pieces[token]
            if declared.control and piece.type in (NORMAL, USER_DEFINED, UNUSED):
                piece.type = CONTROL
            continue
        if token > len(proto.pieces) + 65536:
            raise CheckpointError(f"{source}: added token {declared.spelling!r} has the impossible id {token}")
        while len(proto.pieces) < token:
            proto.pieces.add(piece=f"<hole {len(proto.pieces)}>", score=0.0, type=UNUSED)
        spelling = declared.spelling if declared.control else declared.spelling.replace(" ", SPACE_MARK)
        proto.pieces.add(piece=spelling, score=0.0, type=CONTROL if declared.control else USER_DEFINED)


def _is_added(piece: Any) -> bool:
    return piece.type in (UNKNOWN, CONTROL)


def _added(index: int, piece: Any, flags: dict[int, AddedToken]) -> AddedToken:
    declared = flags.get(index)
    if declared is None:
        return AddedToken(index, piece.piece, control=True)
    return AddedToken(
        index, piece.piece, True, lstrip=declared.lstrip, rstrip=declared.rstrip, single_word=declared.single_word
    )


def _surface(piece: Any) -> bytes:
    if piece.type in (UNKNOWN, CONTROL):
        return bytes(piece.piece.encode())
    byte = fallback_byte(piece.piece) if piece.type == BYTE else None
    return bytes(piece.piece.replace(SPACE_MARK, " ").encode()) if byte is None else byte
