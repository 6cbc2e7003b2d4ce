"""From a source's tensors to the arrays of a checkpoint, one tensor in memory at a time.

It knows rules, dtypes, disk space and how Orbax stores a tree. It does not know file formats nor model families.

Each tensor is written, in its final layout and dtype, to a memory-mapped file of its own; Orbax then saves from those
maps, so that it allocates nothing. Measured with 512 MiB of weights: Orbax's defaults (OCDBT, compression, a private
copy of host arrays) take 920 MiB of memory beyond the maps, the options below none. They also give every parameter
files of its own, so that hashing runs in parallel and a damaged file's name tells which parameter it was.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any, Final, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from orbax.checkpoint import v1 as ocp

from jaxserve.checkpoint import Progress
from jaxserve.checkpoint.files import require_space
from jaxserve.checkpoint.manifest import LeafEntry
from jaxserve.errors import CheckpointError
from jaxserve.models.weights import Piece, Rule, as_held, nest

# Orbax tells there of every file it opens, and warns of any layout but its default one.
logging.getLogger("absl").setLevel(logging.ERROR)

FOLDER: Final = "params"
COMMITTED: Final = "commit_success.txt"  # by which a saved folder is known to be whole
DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
_NEEDS_SCALE: Final = frozenset({"float8_e4m3fn", "float8_e5m2"})
DTYPE_CHOICES: Final = ("auto", *DTYPES, "source")
_PIECE_BYTES: Final = 8 << 20  # of a leaf that is converted and checked at once
_CHUNK_BYTES: Final = 64 << 20  # of one stored file: bounds what a shard's reader takes in beyond its shard
_SLACK_BYTES: Final = 64 << 20


class Tensor(Protocol):
    """What a source knows of a tensor before it reads it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Axes as in the Hugging Face form."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype in which the source yields it."""


class TensorSource(Protocol):
    """A checkpoint in someone else's format, read as if it were a Hugging Face one."""

    @property
    def quantised(self) -> bool:
        """Whether weights are stored in blocks with a scale."""

    def hf_config(self) -> dict[str, Any]:
        """The fields of ``config.json``."""

    def table(self) -> Mapping[str, Tensor]:
        """Every tensor by name."""

    def tensors(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Every tensor's name and values, one at a time."""


def write_parameters(
    source: TensorSource,
    rules: Sequence[Rule],
    ignored: Sequence[str],
    dtype: str,
    content: Path,
    scratch: Path,
    progress: Progress,
) -> tuple[LeafEntry, ...]:
    """Converts every tensor and saves the tree below ``content / "params"``.

    Args:
        source: where the tensors come from.
        rules: one for each leaf.
        ignored: prefixes of tensor names that no rule needs.
        dtype: one of :data:`DTYPE_CHOICES`. "source" keeps every tensor's own; "auto" does so where the source holds
            plain numbers, and means bfloat16 where it is quantised.
        content: the folder of the version to be.
        scratch: a folder for temporary files on the same disk.
        progress: told "convert" and "write".

    Returns:
        The leaves, sorted by path.

    Raises:
        CheckpointError: a missing, unexpected, misshapen or non-finite tensor, or too little disk space.
    """
    table = source.table()
    name = ("bfloat16" if source.quantised else "source") if dtype == "auto" else dtype
    by_source = _match(rules, ignored, table)
    leaves = {rule.param: _leaf(rule, table, name) for rule in rules}
    total = sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in leaves.values())
    require_space(content, 2 * total + _SLACK_BYTES, "converting")
    staged: dict[str, Path] = {}
    done = 0
    for tensor_name, tensor in source.tensors():
        for rule, piece in by_source.pop(tensor_name, ()):
            path = staged.setdefault(rule.param, scratch / str(len(staged)))
            done += _stage(leaves[rule.param], piece, tensor, path)
            progress("convert", done, total)
        del tensor  # before the next one is read
    progress("write", 0, total)
    maps = {
        param: np.memmap(path, leaves[param].dtype, "r", shape=leaves[param].shape) for param, path in staged.items()
    }
    _save(content / FOLDER, maps)
    progress("write", total, total)
    return tuple(leaves[param] for param in sorted(leaves))


def _match(
    rules: Sequence[Rule], ignored: Sequence[str], table: Mapping[str, Tensor]
) -> dict[str, list[tuple[Rule, Piece]]]:
    """What each tensor is for, after making sure that nothing is missing, left over or of another shape."""
    by_source: dict[str, list[tuple[Rule, Piece]]] = {}
    for rule in rules:
        for piece in rule.pieces(table):
            by_source.setdefault(piece.source, []).append((rule, piece))
    missing = sorted(by_source.keys() - table.keys())
    if missing:
        raise CheckpointError(f"The source lacks {_some(missing)}, which its configuration calls for.")
    unexpected = sorted(name for name in table.keys() - by_source.keys() if not name.startswith(tuple(ignored)))
    if unexpected:
        raise CheckpointError(f"The source has {_some(unexpected)}, which its configuration does not call for.")
    for name, uses in by_source.items():
        for _, piece in uses:
            shape = table[name].shape
            part = piece.part(shape)
            if part is None or not _same_rows(part, piece.shape):
                raise CheckpointError(f"Tensor {name} has shape {shape}, its configuration calls for {piece.shape}.")
    return by_source


def _same_rows(found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether one shape only splits or merges axes of the other: a transposed matrix has as many elements, too."""
    bounds, target = set(accumulate(found, mul)), set(accumulate(wanted, mul))
    return math.prod(found) == math.prod(wanted) and (bounds <= target or target <= bounds)


def _some(names: Sequence[str]) -> str:
    rest = f" and {len(names) - 3} more tensors" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest


def _leaf(rule: Rule, table: Mapping[str, Tensor], dtype: str) -> LeafEntry:
    sources = sorted({piece.source for piece in rule.pieces(table)})
    for source in sources:
        # ml_dtypes are no subtypes of np.floating; all that it defines and a source may hold are float formats.
        whole, packed = table[source].dtype.kind in "iub", rule.dtype == "uint8"
        if whole != packed:
            wanted = "packed bytes" if packed else "a floating number"
            raise CheckpointError(f"Tensor {source} holds {table[source].dtype.name}, a weight must be {wanted}.")
        # A number of eight bits means nothing without its scale: it is never made here, nor taken for a number.
        found = table[source].dtype.name
        if found != rule.dtype and _NEEDS_SCALE & {found, rule.dtype}:
            wanted = rule.dtype or "a wider number: its configuration names no quantisation"
            raise CheckpointError(f"Tensor {source} holds {found}, this weight must be {wanted}.")
    own = _widest(table[source].dtype for source in sources) if dtype == "source" else dtype
    return LeafEntry(rule.param, rule.shape, str(rule.held(own)))


def _widest(dtypes: Iterable[np.dtype[Any]]) -> str:
    """The dtype that holds all of these numbers: a leaf of several tensors may meet several."""
    found = {dtype.name for dtype in dtypes}
    return found.pop() if len(found) == 1 else "float32"


def _stage(leaf: LeafEntry, piece: Piece, tensor: NDArray[Any], path: Path) -> int:
    """Writes a piece of a leaf into the leaf's file, bit by bit; returns how many bytes."""
    dtype = np.dtype(leaf.dtype)
    staged = np.memmap(path, dtype, "r+" if path.exists() else "w+", shape=leaf.shape)
    target = staged[tuple(slice(*bounds) for bounds in piece.region)]
    values = piece.cut(as_held(tensor, dtype))
    if target.shape != values.shape:
        values = values.reshape(target.shape)
    if not target.shape or target.shape[0] == 1:
        _copy(target, values, piece.source)
    else:
        rows = max(1, _PIECE_BYTES * len(target) // target.nbytes)
        for start in range(0, len(target), rows):
            _copy(target[start : start + rows], values[start : start + rows], piece.source)
    staged.flush()
    return int(target.nbytes)


def _copy(target: NDArray[Any], values: NDArray[Any], name: str) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        cast = values.astype(target.dtype)
    if target.dtype.kind not in "iu" and not np.isfinite(cast).all():
        own = np.isfinite(values).all()
        what = f"does not fit into {target.dtype.name}" if own else "has a number that is infinite or none"
        raise CheckpointError(f"Tensor {name} {what}.")
    target[...] = cast


def _save(folder: Path, leaves: Mapping[str, NDArray[Any]]) -> None:
    context = ocp.Context()
    context.memory.deepcopy_host_arrays = False
    context.array.saving.use_ocdbt = False
    context.array.saving.use_compression = False
    context.array.saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    with context:
        ocp.save(folder, nest(leaves))
    # It says where the folder lay while it was written, which is nobody's business and nowhere any more.
    (folder / COMMITTED).write_text("complete\n", encoding="utf-8")
