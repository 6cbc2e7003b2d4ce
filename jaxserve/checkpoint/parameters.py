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
from collections.abc import Iterator, Mapping, Sequence
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
from jaxserve.models.weights import Rule, nest

# Orbax tells there of every file it opens, and warns of any layout but its default one.
logging.getLogger("absl").setLevel(logging.ERROR)

FOLDER: Final = "params"
DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
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
    by_source = _match(rules, ignored, table)
    name = ("bfloat16" if source.quantised else "source") if dtype == "auto" else dtype
    leaves = {rule.param: _leaf(rule, table[rule.source], name) for rule in rules}
    total = sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in leaves.values())
    require_space(content, 2 * total + _SLACK_BYTES, "converting")
    maps: dict[str, NDArray[Any]] = {}
    done = 0
    for tensor_name, tensor in source.tensors():
        for rule in by_source.pop(tensor_name, ()):
            leaf = leaves[rule.param]
            maps[rule.param] = _stage(rule, tensor, np.dtype(leaf.dtype), scratch / str(len(maps)))
            done += maps[rule.param].nbytes
            progress("convert", done, total)
        del tensor  # before the next one is read
    progress("write", 0, total)
    _save(content / FOLDER, maps)
    progress("write", total, total)
    return tuple(leaves[param] for param in sorted(leaves))


def _match(rules: Sequence[Rule], ignored: Sequence[str], table: Mapping[str, Tensor]) -> dict[str, list[Rule]]:
    """Rules by tensor name, after making sure that nothing is missing, left over or of another shape."""
    by_source: dict[str, list[Rule]] = {}
    for rule in rules:
        by_source.setdefault(rule.source, []).append(rule)
    missing = sorted(by_source.keys() - table.keys())
    if missing:
        raise CheckpointError(f"The source lacks {_some(missing)}, which its configuration calls for.")
    unexpected = sorted(name for name in table.keys() - by_source.keys() if not name.startswith(tuple(ignored)))
    if unexpected:
        raise CheckpointError(f"The source has {_some(unexpected)}, which its configuration does not call for.")
    for rule in rules:
        shape = table[rule.source].shape
        if not _same_rows(shape, rule.shape):
            raise CheckpointError(f"Tensor {rule.source} has shape {shape}, its configuration calls for {rule.shape}.")
    return by_source


def _same_rows(found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether one shape only splits or merges axes of the other: a transposed matrix has as many elements, too."""
    bounds, target = set(accumulate(found, mul)), set(accumulate(wanted, mul))
    return math.prod(found) == math.prod(wanted) and (bounds <= target or target <= bounds)


def _some(names: Sequence[str]) -> str:
    rest = f" and {len(names) - 3} more tensors" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest


def _leaf(rule: Rule, tensor: Tensor, dtype: str) -> LeafEntry:
    # ml_dtypes are no subtypes of np.floating; all that it defines and a source may hold are float formats.
    if tensor.dtype.kind in "iub":
        raise CheckpointError(f"Tensor {rule.source} holds {tensor.dtype.name}, a weight must be a floating number.")
    return LeafEntry(rule.param, rule.leaf_shape, tensor.dtype.name if dtype == "source" else dtype)


def _stage(rule: Rule, tensor: NDArray[Any], dtype: np.dtype[Any], path: Path) -> NDArray[Any]:
    """Writes a leaf to ``path`` piece by piece and returns it as a read-only map."""
    leaf = rule.apply(tensor)
    staged = np.memmap(path, dtype, "w+", shape=leaf.shape)
    rows = max(1, _PIECE_BYTES * len(leaf) // leaf.nbytes)
    for start in range(0, len(leaf), rows):
        with np.errstate(over="ignore", invalid="ignore"):
            piece = leaf[start : start + rows].astype(dtype)
        if not np.isfinite(piece).all():
            own = np.isfinite(leaf[start : start + rows]).all()
            what = f"does not fit into {dtype.name}" if own else "has a number that is infinite or none"
            raise CheckpointError(f"Tensor {rule.source} {what}.")
        staged[start : start + rows] = piece
    staged.flush()
    del staged  # its pages are the kernel's from here on
    return np.memmap(path, dtype, "r", shape=leaf.shape)


def _save(folder: Path, leaves: Mapping[str, NDArray[Any]]) -> None:
    context = ocp.Context()
    context.memory.deepcopy_host_arrays = False
    context.array.saving.use_ocdbt = False
    context.array.saving.use_compression = False
    context.array.saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    with context:
        ocp.save(folder, nest(leaves))
