"""One revision of a repository of the Hugging Face hub, as a folder.

It knows which files a conversion needs and what the hub's client raises. It does not know what the files hold.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError

from jaxserve.errors import CheckpointError, SourceUnavailable

_REPOSITORY: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_REVISION: Final = re.compile(r"[A-Za-z0-9][\w./-]{0,99}")
_WANTED: Final = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "LICEN[CS]E*",
    "NOTICE*",
    "USE_POLICY*",
)
# The hub's own error derives from that of the HTTP library in use, which is not always the same one.
_FAILURES: Final[tuple[type[Exception], ...]] = (
    ValueError,
    *(base for base in HfHubHTTPError.__mro__[:-2] if issubclass(base, Exception)),
)
_UNWANTED: Final = ("*/*", "consolidated*")  # other formats, and the same weights under other names


def snapshot(repository: str, revision: str | None, folder: Path) -> tuple[Path, str]:
    """Downloads the files of one commit below ``folder``.

    Args:
        repository: ``organisation/name``.
        revision: a branch, tag or commit; by default the main branch. It is resolved once, for all files.
        folder: an empty folder; it becomes a hub cache.

    Returns:
        The folder with the files, and the commit.

    Raises:
        SourceUnavailable: no network, no such repository or revision, or no right to it.
        CheckpointError: a malformed name.
    """
    if not _REPOSITORY.fullmatch(repository) or (revision is not None and not _REVISION.fullmatch(revision)):
        raise CheckpointError(
            f"{repository[:100]!r} at {revision!r} is not a repository 'organisation/name[@revision]'."
        )
    try:
        path = huggingface_hub.snapshot_download(
            repository,
            revision=revision,
            cache_dir=folder,
            allow_patterns=list(_WANTED),
            ignore_patterns=list(_UNWANTED),
        )
    except _FAILURES as error:
        reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        raise SourceUnavailable(f"{repository} could not be fetched from the hub: {reason}") from error
    found = Path(path)
    return found, found.name
