"""What lies beside the weights: tokenizer, chat template, generation defaults, licence.

It knows where a GGUF file and a Hugging Face folder keep them and under which names a checkpoint does. It does not know
how a tokenizer or a template works. Whatever is taken over is parsed first: a tokenizer by loading it, JSON by reading
it; licences are text. Everything else in a folder stays behind, code above all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from jaxserve.checkpoint.files import parse_json_object
from jaxserve.checkpoint.gguf import GGUFFile
from jaxserve.checkpoint.safetensors import SafetensorsFolder
from jaxserve.errors import CheckpointError
from jaxserve.text.gguf import tokenizer_from_gguf
from jaxserve.text.tokenizer import Tokenizer

CONFIG: Final = "config.json"
TOKENIZER: Final = "tokenizer"
CHAT_TEMPLATE: Final = "chat_template.jinja"
GENERATION_CONFIG: Final = "generation_config.json"
GOLDENS: Final = "goldens.json"

_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json")
_FOREIGN_FIELDS: Final = ("auto_map", "_name_or_path")  # code to run, and somebody's path
_LICENCE_WORDS: Final = ("licence", "license", "notice", "copying", "use_policy", "terms")
_PROBE: Final = "Hello, world! ½ of 123 naïve words: 你好 🙂\n"


class SideFiles(msgspec.Struct, frozen=True):
    """Names of what was written, relative to the checkpoint's folder, and the licence as the source names it."""

    tokenizer: tuple[str, ...]
    chat_template: str | None
    generation_config: str | None
    licence: str | None


def write_side_files(
    source: GGUFFile | SafetensorsFolder, config: Mapping[str, Any], rows: int, content: Path, scratch: Path
) -> SideFiles:
    """Writes ``config.json`` and everything beside the weights into ``content``.

    Args:
        config: the fields of ``config.json``.
        rows: of the model's embedding: tokens that it has none for are left out.

    Raises:
        CheckpointError: the tokenizer is missing, broken or another model's, or a file is malformed.
    """
    _write_json(content / CONFIG, {key: value for key, value in config.items() if key not in _FOREIGN_FIELDS})
    if isinstance(source, GGUFFile):
        tokenizer = tokenizer_from_gguf(source.metadata)
        template = source.metadata.get("tokenizer.chat_template")
        generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        licence = source.metadata.get("general.license")
    else:
        tokenizer = _load_tokenizer(source, scratch)
        template = _folder_template(source)
        generation = _side_json(source, GENERATION_CONFIG)
        licence = None
        _copy_licences(source, content)
    tokenizer = _fitting(tokenizer, rows, template)
    tokenizer.save(content / TOKENIZER)
    generation = {key: value for key, value in generation.items() if value is not None}
    if generation:
        _write_json(content / GENERATION_CONFIG, generation)
    if isinstance(template, str):
        (content / CHAT_TEMPLATE).write_text(template, encoding="utf-8")
    return SideFiles(
        tokenizer=tuple(sorted(f"{TOKENIZER}/{path.name}" for path in (content / TOKENIZER).iterdir())),
        chat_template=CHAT_TEMPLATE if isinstance(template, str) else None,
        generation_config=GENERATION_CONFIG if generation else None,
        licence=licence[:200] if isinstance(licence, str) else None,
    )


def is_licence(name: str) -> bool:
    """Whether a file's name says that it holds a licence or terms of use."""
    path = Path(name.lower())
    return path.suffix in ("", ".txt", ".md", ".html") and path.stem.startswith(_LICENCE_WORDS)


def is_side_file(name: str) -> bool:
    """Whether a file of a Hugging Face folder beside its weights has a part in the conversion."""
    known = (CONFIG, CHAT_TEMPLATE, GENERATION_CONFIG, *_TOKENIZER_FILES)
    return name in known or is_licence(name)


def _load_tokenizer(source: SafetensorsFolder, scratch: Path) -> Tokenizer:
    """Loads from copies: they are regular files of known size, whatever the names in the folder lead to."""
    copies = scratch / TOKENIZER
    copies.mkdir()
    for name in (*_TOKENIZER_FILES, CONFIG, GENERATION_CONFIG):
        if source.has(name):
            (copies / name).write_bytes(source.read_side_file(name))
    return Tokenizer.load(copies)


def _fitting(tokenizer: Tokenizer, rows: int, template: object) -> Tokenizer:
    """The tokenizer without what the model has no embedding for, if it does without."""
    try:
        fitting = tokenizer.within(rows)
    except CheckpointError as error:
        raise CheckpointError(
            f"The tokenizer has {tokenizer.vocab_size} tokens, the model's embedding {rows} rows: they do not match "
            f"({error.message})."
        ) from error
    lost = [spelling for spelling, token in tokenizer.controls.items() if token >= rows]
    if isinstance(template, str) and (used := next((spelling for spelling in lost if spelling in template), None)):
        raise CheckpointError(f"The chat template writes {used!r}, for which the model's embedding has no row.")
    ids = fitting.encode(_PROBE)
    if not ids or max(ids) >= fitting.vocab_size or not fitting.decode(ids):
        raise CheckpointError("The tokenizer cannot encode and decode a plain sentence.")
    return fitting


def _folder_template(source: SafetensorsFolder) -> object:
    if source.has(CHAT_TEMPLATE):
        try:
            return source.read_side_file(CHAT_TEMPLATE).decode()
        except UnicodeDecodeError:
            raise CheckpointError(f"{source.path / CHAT_TEMPLATE} is not UTF-8.") from None
    template = _side_json(source, "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):  # several by name, in older files
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        return named[0].get("template") if named else None
    return template


def add_sampling(content: Path, sampling: Mapping[str, float]) -> None:
    """Adds sampling defaults to a version's ``generation_config.json``; what stands there already wins."""
    path = content / GENERATION_CONFIG
    present = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    _write_json(path, dict(sampling) | present)


def _side_json(source: SafetensorsFolder, name: str) -> dict[str, Any]:
    return parse_json_object(source.read_side_file(name), str(source.path / name)) if source.has(name) else {}


def _copy_licences(source: SafetensorsFolder, content: Path) -> None:
    for entry in sorted(source.path.iterdir()):
        if is_licence(entry.name) and not entry.is_dir():
            (content / entry.name).write_bytes(source.read_side_file(entry.name))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
