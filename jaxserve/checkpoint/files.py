"""The file system as checkpoints need it: regular files only, bounded reads, hashes, and writes that outlive a crash.

It knows paths, descriptors and JSON. It does not know what any file means.

Links. A symbolic link is followed in one case only: the files of a hub cache, ``snapshots/<revision>/<name>``, point to
``../../blobs/<hash>``. Any other link inside a folder is refused, wherever it leads.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from jaxserve.errors import CheckpointError

_READ_BYTES: Final = 1 << 20
_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")


def open_regular(path: Path, *, follow: bool = False) -> int:
    """A descriptor of a regular file. It never waits (a FIFO) and follows a final link only if told so.

    Raises:
        CheckpointError: absent, unreadable, a link, or no regular file.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if path.is_symlink() and not follow:
            raise CheckpointError(f"{path} is a symbolic link; links are not followed.") from None
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}.") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is not a regular file.")
    return descriptor


def map_regular(path: Path, *, follow: bool = False) -> mmap.mmap:
    """The whole of a regular, non-empty file as read-only memory."""
    descriptor = open_regular(path, follow=follow)
    try:
        if os.fstat(descriptor).st_size == 0:
            raise CheckpointError(f"{path} is empty.")
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)


def read_regular(path: Path, limit: int, *, follow: bool = False) -> bytes:
    """The contents of a regular file of at most ``limit`` bytes."""
    with open(open_regular(path, follow=follow), "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise CheckpointError(f"{path} has more than {limit} bytes.")
    return data


def parse_json_object(data: bytes | memoryview, where: str) -> dict[str, Any]:
    """A JSON object from untrusted bytes; ``where`` names it.

    No duplicate keys, no NaN, no bottomless nesting, and no half of a surrogate pair: such a string cannot be written.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise ValueError(f"{name[:80]!r} stands there twice")
            found[name] = value
        return found

    def no_constant(word: str) -> None:
        raise ValueError(f"{word} is no JSON number")

    try:
        text = str(data, "utf-8")
        parsed = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
        if _SURROGATE.search(text):
            json.dumps(parsed, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not valid JSON: {str(error)[:200]}.") from None
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{where} is not a JSON object.")
    return parsed


def is_plain_name(name: str) -> bool:
    """Whether a name from a foreign file is short, printable and cannot be mistaken for a path."""
    return 0 < len(name) <= 255 and name.isprintable() and not any(part in name for part in ("/", "\\", ".."))


def regular_file(folder: Path, name: str) -> Path:
    """Where the bytes of a folder's entry are: in itself, or in the blob that it links to in a hub cache.

    Raises:
        CheckpointError: the name is no plain file name, or the entry is any other link.
    """
    if not is_plain_name(name):
        raise CheckpointError(f"{folder} refers to {name[:100]!r}, which is not the name of a file in it.")
    path = folder / name
    if not path.is_symlink():
        return path
    target, resolved = path.resolve(), folder.resolve()
    if resolved.parent.name != "snapshots" or target.parent != resolved.parent.parent / "blobs":
        raise CheckpointError(f"{path} is a symbolic link, and not one of a hub cache to its own blobs.")
    return target


def sha256_of(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """Hex digest of a regular file; ``on_bytes`` is told the size of each piece as it is read."""
    digest = hashlib.sha256()
    buffer = bytearray(_READ_BYTES)
    view = memoryview(buffer)
    with open(open_regular(path), "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
            if on_bytes is not None:
                on_bytes(count)
    return digest.hexdigest()


def regular_files(folder: Path) -> dict[str, int]:
    """Size in bytes of every file below ``folder`` by its path relative to it, with forward slashes.

    Raises:
        CheckpointError: something below is neither a folder nor a regular file.
    """
    return dict(sorted(_sizes(folder, "")))


def _sizes(folder: Path, prefix: str) -> Iterator[tuple[str, int]]:
    try:
        entries = list(os.scandir(folder))
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be listed: {error.strerror}.") from None
    for entry in entries:
        mode = entry.stat(follow_symlinks=False)
        name = prefix + entry.name
        if stat.S_ISDIR(mode.st_mode):
            yield from _sizes(folder / entry.name, name + "/")
        elif stat.S_ISREG(mode.st_mode):
            yield name, mode.st_size
        else:
            kind = "a symbolic link" if stat.S_ISLNK(mode.st_mode) else "not a regular file"
            raise CheckpointError(f"{folder / entry.name} is {kind}; a checkpoint holds regular files only.")


def require_space(folder: Path, needed: int, purpose: str) -> None:
    """Raises CheckpointError unless the disk of ``folder`` has ``needed`` bytes free."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CheckpointError(f"The checkpoints' disk has {free} bytes free, {purpose} needs {needed}.")


def fsync_path(path: Path) -> None:
    """Flushes a file's data, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Flushes every file and folder below ``folder``, and ``folder`` itself: names last."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            fsync_path(Path(parent, name))
        fsync_path(Path(parent))


def replace_text(path: Path, text: str) -> None:
    """Writes a small file so that a reader or a crash at any instant meets the old text or the new, never a part."""
    temporary = path.with_name(f".tmp-{path.name}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    fsync_path(path.parent)
