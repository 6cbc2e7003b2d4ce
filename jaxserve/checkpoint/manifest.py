"""The manifest: what a checkpoint's folder must hold, byte for byte, and where it came from.

It knows sizes, digests and the order in which they are checked. It does not know what is in the files.

The first twelve digits of the manifest's own SHA-256 are in the name of its folder, so that the name vouches for the
manifest and the manifest for every file. Orbax restores a flipped bit without a word; this is what catches it.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import re
from pathlib import Path
from typing import Final, Literal

import msgspec

from jaxserve.checkpoint import Progress, silent
from jaxserve.checkpoint.files import read_regular, regular_files, sha256_of
from jaxserve.errors import CheckpointError

SCHEMA: Final = 1  # raised whenever the same source would be converted into something else
FILE_NAME: Final = "manifest.json"
VERSION_NAME: Final = re.compile(r"\d{8}-([0-9a-f]{12})")
_MAX_BYTES: Final = 64 << 20


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file by its path relative to the folder, with its size in bytes and its SHA-256 in hex."""

    path: str
    bytes: int
    sha256: str


class LeafEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A parameter by its dotted path, with its shape and the dtype it is stored in."""

    path: str
    shape: tuple[int, ...]
    dtype: str


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the weights came from.

    Attributes:
        kind: a GGUF file, a Hugging Face folder, a file in Python wheels, or a repository of the hub.
        name: file or folder name, ``package==version`` or ``organisation/name``; never a path.
        revision: the hub's commit, if it came from there.
        files: what was read. The digests, not the names, tell whether two sources are the same.
    """

    kind: Literal["gguf", "folder", "wheel", "hub"]
    name: str
    revision: str | None
    files: tuple[FileEntry, ...]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything about a checkpoint but its weights.

    Attributes:
        schema: :data:`SCHEMA` of the version that wrote it.
        model: identifier under which it is served.
        engine: the jaxserve that wrote it.
        config_sha256: of ``config.json``.
        dtype: what was asked for: bfloat16, float16, float32 or source.
        licence: as the source names it.
        source: where it came from.
        tokenizer: the tokenizer's files, relative to the folder.
        chat_template, generation_config, goldens: the names of those files where they exist.
        tree: every parameter, sorted by path.
        files: every file but the manifest itself, sorted by path.
    """

    schema: int
    model: str
    engine: str
    config_sha256: str
    dtype: str
    licence: str | None
    source: Source
    tokenizer: tuple[str, ...]
    chat_template: str | None
    generation_config: str | None
    goldens: str | None
    tree: tuple[LeafEntry, ...]
    files: tuple[FileEntry, ...]


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint's folder, unverified."""
    return _decode(folder / FILE_NAME, read_regular(folder / FILE_NAME, _MAX_BYTES))


def write(folder: Path, manifest: Manifest) -> str:
    """Writes the manifest into ``folder`` and returns its SHA-256 in hex: equal manifests have equal digests."""
    data = msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"
    (folder / FILE_NAME).write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def hash_files(folder: Path, phase: str, progress: Progress = silent) -> tuple[FileEntry, ...]:
    """Size and digest of every file below ``folder`` except its manifest, sorted by path."""
    sizes = {path: size for path, size in regular_files(folder).items() if path != FILE_NAME}
    digests = _hash_all(folder, sizes, phase, progress)
    return tuple(FileEntry(path, size, digests[path]) for path, size in sizes.items())


def verify(folder: Path, progress: Progress = silent) -> Manifest:
    """Checks every byte of a published checkpoint: names and sizes first, then all digests in parallel.

    Raises:
        CheckpointError: one sentence that names the first file that is missing, extra, no regular file, or other than
            the manifest says, with the expected and the found size or digest.
    """
    data = read_regular(folder / FILE_NAME, _MAX_BYTES)
    name = VERSION_NAME.fullmatch(folder.resolve().name)
    if name is None:
        raise CheckpointError(f"{folder} is not named like a version, YYYYMMDD-<12 hex digits>.")
    found = hashlib.sha256(data).hexdigest()
    if found[:12] != name[1]:
        raise CheckpointError(
            f"{folder / FILE_NAME} is damaged: expected a SHA-256 that starts with {name[1]}, found {found}."
        )
    manifest = _decode(folder / FILE_NAME, data)
    _check_sizes(folder, manifest)
    sizes = {entry.path: entry.bytes for entry in manifest.files}
    digests = _hash_all(folder, sizes, "verify", progress)
    for entry in manifest.files:
        if digests[entry.path] != entry.sha256:
            raise CheckpointError(
                f"{folder / entry.path} is damaged: expected SHA-256 {entry.sha256}, found {digests[entry.path]}."
            )
    return manifest


def _decode(path: Path, data: bytes) -> Manifest:
    try:
        schema = msgspec.json.decode(data, type=dict[str, msgspec.Raw]).get("schema")
        if schema is None or bytes(schema) != str(SCHEMA).encode():
            written = "no schema" if schema is None else f"schema {bytes(schema)[:20].decode()}"
            raise CheckpointError(f"{path} has {written}, this version reads schema {SCHEMA}: convert the model again.")
        return msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no manifest: {error}.") from None


def _check_sizes(folder: Path, manifest: Manifest) -> None:
    sizes = regular_files(folder)
    expected = {entry.path for entry in manifest.files} | {FILE_NAME}
    for entry in manifest.files:
        if entry.path not in sizes:
            raise CheckpointError(f"{folder / entry.path} is missing.")
        if sizes[entry.path] != entry.bytes:
            raise CheckpointError(
                f"{folder / entry.path} is damaged: expected {entry.bytes} bytes, found {sizes[entry.path]}."
            )
    for extra in sorted(sizes.keys() - expected):
        raise CheckpointError(f"{folder / extra} does not belong to the checkpoint: the manifest does not list it.")


def _hash_all(folder: Path, sizes: dict[str, int], phase: str, progress: Progress) -> dict[str, str]:
    total, done = sum(sizes.values()), 0
    digests: dict[str, str] = {}
    progress(phase, 0, total)
    with concurrent.futures.ThreadPoolExecutor(min(32, os.cpu_count() or 1)) as pool:
        # Largest first, so that no thread is left alone with a large file at the end.
        order = sorted(sizes, key=lambda path: -sizes[path])
        futures = {pool.submit(sha256_of, folder / path): path for path in order}
        try:
            for future in concurrent.futures.as_completed(futures):
                path = futures[future]
                digests[path] = future.result()
                done += sizes[path]
                progress(phase, done, total)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return digests
