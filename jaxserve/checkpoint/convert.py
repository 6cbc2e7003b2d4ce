"""Conversion: from a GGUF file or a Hugging Face folder to a published version in the store.

It knows the order of the steps and what goes into the manifest. It does not know where a source was fetched from.

Foreign files are parsed in a child process with limits (:func:`main` is the child); the parent hashes them, relays
progress, lets the caller compute goldens, writes the manifest and publishes. Whatever fails leaves nothing behind.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import jax
import msgspec

import jaxserve
from jaxserve.checkpoint import Progress, cage, manifest, silent
from jaxserve.checkpoint.files import parse_json_object, regular_file, sha256_of
from jaxserve.checkpoint.gguf import GGUFFile
from jaxserve.checkpoint.manifest import FileEntry, LeafEntry, Manifest, Source
from jaxserve.checkpoint.parameters import DTYPE_CHOICES, write_parameters
from jaxserve.checkpoint.safetensors import SafetensorsFolder
from jaxserve.checkpoint.side_files import (
    CONFIG,
    GENERATION_CONFIG,
    GOLDENS,
    SideFiles,
    add_sampling,
    is_side_file,
    write_side_files,
)
from jaxserve.checkpoint.store import Store
from jaxserve.errors import CheckpointError
from jaxserve.models.family import family_of

Goldens = Callable[[Path], dict[str, Any]]
"""Takes a complete but unpublished version's folder and returns what the model computes, as JSON values."""

_GGUF_SUFFIX: Final = ".gguf"


@dataclasses.dataclass(frozen=True, slots=True)
class Published:
    """A version in the store. ``fresh`` is false when the same source had been converted before."""

    model: str
    version: str
    folder: Path
    fresh: bool


class _Result(msgspec.Struct, frozen=True):
    tree: tuple[LeafEntry, ...]
    side: SideFiles


def convert(
    path: Path,
    store: Store,
    model: str,
    *,
    origin: Source | None = None,
    dtype: str = "auto",
    licence: str | None = None,
    licence_files: Iterable[Path] = (),
    sampling: Mapping[str, float] = MappingProxyType({}),
    goldens: Goldens | None = None,
    limits: cage.Limits | None = None,
    progress: Progress = silent,
) -> Published:
    """Converts a model and publishes it as the version in use.

    Args:
        path: a ``.gguf`` file or a folder with ``config.json`` and safetensors.
        store: where the version goes.
        model: name of the model there.
        origin: where the files came from, if not from ``path`` itself; its ``files`` are filled in here.
        dtype: one of :data:`jaxserve.checkpoint.parameters.DTYPE_CHOICES`.
        licence: its name, if the caller knows better than the source.
        licence_files: further texts to keep in the version.
        sampling: defaults to keep in ``generation_config.json`` where the source says nothing.
        goldens: computes what the server's self-test compares with.
        limits: of the child process, by default :meth:`cage.Limits.for_source`.
        progress: told "hash", "convert", "write", "manifest" and what ``goldens`` reports itself.

    Returns:
        The new version, or the existing one if the same files were converted in the same way and it is intact.

    Raises:
        CheckpointError: anything wrong with the source, the disk or the name.
    """
    if dtype not in DTYPE_CHOICES:
        raise CheckpointError(f"dtype {dtype!r} is none of {', '.join(DTYPE_CHOICES)}.")
    try:
        files = _source_files(path)
        source = _identify(path, files, origin, progress)
        existing = find_converted(store, model, source, dtype, goldens is not None)
        if existing is not None:
            return existing
        with store.workspace(model) as work:
            arguments = {"path": str(path), "dtype": dtype, "content": str(work.content), "scratch": str(work.scratch)}
            size = sum(entry.bytes for entry in source.files)
            answer = cage.run(__name__, arguments, limits or cage.Limits.for_source(size), progress)
            result = msgspec.convert(answer, _Result)
            if sampling:
                add_sampling(work.content, sampling)
                side = msgspec.structs.replace(result.side, generation_config=GENERATION_CONFIG)
                result = msgspec.structs.replace(result, side=side)
            for text in licence_files:
                shutil.copyfile(text, work.content / text.name)
            _complete(work.content, model, source, dtype, licence, result, goldens, progress)
            version = store.publish(model, work.content)
    except OSError as error:
        raise CheckpointError(f"Converting {path.name} failed: {error.strerror or error}.") from error
    return Published(model, version, store.path(model, version), fresh=True)


def find_converted(store: Store, model: str, source: Source, dtype: str, with_goldens: bool) -> Published | None:
    """The newest intact version that the same files were converted into in the same way, if there is one.

    A version whose parameters are not those of this jaxserve's families, or that lacks goldens where ``with_goldens``
    asks for them, does not count.
    """
    wanted = sorted((entry.path, entry.sha256) for entry in source.files)
    for version in reversed(store.versions(model)):
        folder = store.path(model, version)
        try:
            known = manifest.read(folder)
            same = wanted == sorted((entry.path, entry.sha256) for entry in known.source.files)
            if same and known.dtype == dtype and (known.goldens is not None or not with_goldens):
                manifest.verify(folder)
                config = parse_json_object((folder / CONFIG).read_bytes(), str(folder / CONFIG))
                needed = {rule.param: rule.shape for rule in family_of(config).rules}
                if needed == {leaf.path: leaf.shape for leaf in known.tree}:
                    return Published(model, version, folder, fresh=False)
        except CheckpointError:
            continue  # damaged or of another schema: converted anew, and `verify` says what is wrong with the old one
    return None


def main() -> None:
    """The child: converts what its request names, under its limits."""
    jax.config.update("jax_platforms", "cpu")  # the accelerator may be another process's
    cage.serve(_convert_in_cage)


def _convert_in_cage(arguments: dict[str, Any], progress: Progress) -> dict[str, Any]:
    path, content, scratch = (Path(arguments[key]) for key in ("path", "content", "scratch"))
    source = GGUFFile(path) if path.suffix.lower() == _GGUF_SUFFIX else SafetensorsFolder(path)
    config = source.hf_config()
    family = family_of(config)
    side = write_side_files(source, config, family.shape.vocab_size, content, scratch)
    tree = write_parameters(source, family.rules, family.ignored, arguments["dtype"], content, scratch, progress)
    result: dict[str, Any] = msgspec.to_builtins(_Result(tree, side))
    return result


def _source_files(path: Path) -> dict[str, Path]:
    """Every file that the conversion reads, by name; what is not listed here has no part in it."""
    if path.is_dir():
        names = [entry.name for entry in path.iterdir() if entry.suffix == ".safetensors" or is_side_file(entry.name)]
        names += [entry.name for entry in path.iterdir() if entry.name.endswith(".safetensors.index.json")]
        return {name: regular_file(path, name) for name in sorted(names)}
    if path.suffix.lower() != _GGUF_SUFFIX:
        raise CheckpointError(f"{path} is neither a folder nor a {_GGUF_SUFFIX} file.")
    return {path.name: path.resolve()}


def _identify(path: Path, files: dict[str, Path], origin: Source | None, progress: Progress) -> Source:
    entries, done, total = [], 0, sum(file.stat().st_size for file in files.values())
    for name, file in files.items():
        progress("hash", done, total)
        entries.append(FileEntry(name, file.stat().st_size, sha256_of(file)))
        done += entries[-1].bytes
    progress("hash", done, total)
    if origin is None:
        origin = Source("folder" if path.is_dir() else "gguf", path.resolve().name, None, ())
    return msgspec.structs.replace(origin, files=tuple(entries))


def _complete(
    content: Path,
    model: str,
    source: Source,
    dtype: str,
    licence: str | None,
    result: _Result,
    goldens: Goldens | None,
    progress: Progress,
) -> None:
    """Writes the manifest; with goldens it is written twice, since computing them restores the version."""
    files = manifest.hash_files(content, "manifest", progress)
    digest = next(entry.sha256 for entry in files if entry.path == CONFIG)
    draft = Manifest(
        schema=manifest.SCHEMA,
        model=model,
        engine=jaxserve.__version__,
        config_sha256=digest,
        dtype=dtype,
        licence=licence or result.side.licence,
        source=source,
        tokenizer=result.side.tokenizer,
        chat_template=result.side.chat_template,
        generation_config=result.side.generation_config,
        goldens=None,
        tree=result.tree,
        files=files,
    )
    manifest.write(content, draft)
    if goldens is None:
        return
    path = content / GOLDENS
    path.write_text(json.dumps(goldens(content), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    entry = FileEntry(GOLDENS, path.stat().st_size, sha256_of(path))
    complete = tuple(sorted((*files, entry), key=lambda entry: entry.path))
    manifest.write(content, msgspec.structs.replace(draft, goldens=GOLDENS, files=complete))
