"""A tokenizer's folder: which files say what, in Hugging Face's layout, and how a folder of our own is written.

``tokenizer.json`` wins over ``tokenizer.model``; names of special tokens come from ``tokenizer_config.json``, then
``special_tokens_map.json``; end tokens are the union of every file that names one.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.text import sentencepiece_backend, tokenizers_backend
from jaxserve.text.backend import Backend
from jaxserve.text.control import AddedToken, end_of_turn_tokens
from jaxserve.text.sentencepiece_backend import SentencePieceBackend
from jaxserve.text.tokenizers_backend import TokenizersBackend

CONFIG_FILE = "tokenizer_config.json"


@dataclasses.dataclass(frozen=True, slots=True)
class SpecialIds:
    """Ids with a role. ``eos`` are all ids that end an output, the model's main one first."""

    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None
    unk: int | None = None
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; empty if there is no such file. Raises CheckpointError for anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is JSON but not an object")
    return value


def spelling_of(value: object) -> str | None:
    """A special token's spelling as Hugging Face files give it: a string, or an object with ``content``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def read_folder(folder: Path) -> tuple[Backend, SpecialIds]:
    """Loads the tokenizer of ``folder``. Raises CheckpointError that names the file at fault."""
    config = read_json(folder / CONFIG_FILE)
    names = {**read_json(folder / "special_tokens_map.json"), **{k: v for k, v in config.items() if v is not None}}
    extra = [*_declared(config, folder / CONFIG_FILE)]
    json_file, model_file = folder / tokenizers_backend.FILE, folder / sentencepiece_backend.FILE
    backend: Backend
    if json_file.is_file():
        backend = _read_json_backend(json_file, extra, names)
    elif model_file.is_file():
        legacy = config.get("legacy")
        backend = SentencePieceBackend(
            _read_bytes(model_file), extra, space_after_control=legacy is not False, source=str(model_file)
        )
    else:
        raise CheckpointError(f"{folder} holds neither {json_file.name} nor {model_file.name}")
    return backend, _special_ids(folder, backend, config, names)


def write_folder(folder: Path, backend: Backend, special: SpecialIds) -> None:
    """Writes the model file and ``tokenizer_config.json`` so that ``read_folder`` gives the same back."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, object] = {**backend.save(folder), "clean_up_tokenization_spaces": False}
    roles = {"bos_token": special.bos, "eos_token": next(iter(special.eos), None)}
    for name, token in (roles | {"pad_token": special.pad, "unk_token": special.unk}).items():
        if token is not None:
            config[name] = backend.spellings[token]
    if special.eos:
        config["eos_token_id"] = list(special.eos)
    if (special.before, special.after) != backend.around or not any(backend.around):
        config["add_bos_token"] = bool(special.before)
        config["add_eos_token"] = bool(special.after)
    text = json.dumps(config, ensure_ascii=False, indent=2)
    (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _read_json_backend(path: Path, extra: list[AddedToken], names: Mapping[str, Any]) -> TokenizersBackend:
    try:
        text = _read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8: {error}") from error
    known = {token.spelling for token in extra}
    for role in ("bos_token", "eos_token", "unk_token"):
        spelling = spelling_of(names.get(role))
        if spelling is not None and spelling not in known:
            extra.append(AddedToken(-1, spelling, control=True))
    return TokenizersBackend(text, extra, source=str(path))


def _declared(config: Mapping[str, Any], path: Path) -> Iterable[AddedToken]:
    entries = config.get("added_tokens_decoder") or {}
    try:
        for token, entry in entries.items():
            yield AddedToken(
                token=int(token),
                spelling=str(entry["content"]),
                control=bool(entry.get("special")),
                lstrip=bool(entry.get("lstrip")),
                rstrip=bool(entry.get("rstrip")),
                single_word=bool(entry.get("single_word")),
            )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: added_tokens_decoder is malformed: {error!r}") from error


def _special_ids(folder: Path, backend: Backend, config: Mapping[str, Any], names: Mapping[str, Any]) -> SpecialIds:
    ids = {spelling: token for token, spelling in reversed(list(enumerate(backend.spellings))) if spelling}
    own = isinstance(backend, SentencePieceBackend)

    def named(role: str) -> int | None:
        token = ids.get(spelling_of(names.get(f"{role}_token")) or "")
        if token is None and isinstance(backend, SentencePieceBackend):
            token = {"bos": backend.bos_id, "eos": backend.eos_id, "pad": backend.pad_id, "unk": backend.unk_id}[role]
        return None if token is None or token < 0 else token

    bos, eos = named("bos"), named("eos")
    ends = [] if eos is None else [eos]
    for path in (CONFIG_FILE, "generation_config.json", "config.json"):
        value = read_json(folder / path).get("eos_token_id")
        ends += [token for token in (value if isinstance(value, list) else [value]) if type(token) is int]
    ends += end_of_turn_tokens({token.spelling: token.token for token in backend.added if token.control})
    before, after = backend.around
    if own or isinstance(config.get("add_bos_token"), bool) or isinstance(config.get("add_eos_token"), bool):
        before = (bos,) if bos is not None and config.get("add_bos_token", own) else ()
        after = (eos,) if eos is not None and config.get("add_eos_token", False) else ()
    in_range = tuple(dict.fromkeys(token for token in ends if 0 <= token < len(backend.spellings)))
    return SpecialIds(bos, in_range, named("pad"), named("unk"), before, after)
