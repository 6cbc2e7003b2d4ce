"""Hugging Face folders: ``config.json`` and safetensors, read without trusting a byte of them.

It knows the safetensors format, the index of sharded weights, and which files may lie beside them. It does not know
tensor names' meaning. Nothing in a folder is ever run: pickles are refused by name, Python files are not looked at.

Stricter than the format asks: no name twice, no name that looks like a path, no overlap, no hole, no byte left over.
Links are followed only as :mod:`jaxserve.checkpoint.files` says: inside a hub cache, to its own blobs.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from jaxserve.checkpoint.files import (
    is_plain_name,
    map_regular,
    parse_json_object,
    read_regular,
    regular_file,
)
from jaxserve.errors import CheckpointError

MAX_HEADER_BYTES: Final = 100_000_000  # the format's own limit
MAX_HEADER_ITEMS: Final = 1 << 21  # values in the header's JSON: bounds time and memory before it is parsed
MAX_JSON_BYTES: Final = 64 << 20
MAX_AXES: Final = 8
INDEX_NAME: Final = "model.safetensors.index.json"
PICKLE_SUFFIXES: Final = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy"})

DTYPES: Final[dict[str, np.dtype[Any]]] = {
    name: np.dtype(kind)
    for name, kind in {
        "BOOL": np.bool_,
        "I8": np.int8,
        "U8": np.uint8,
        "I16": np.int16,
        "U16": np.uint16,
        "I32": np.int32,
        "U32": np.uint32,
        "I64": np.int64,
        "U64": np.uint64,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F32": np.float32,
        "F64": np.float64,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    }.items()
}


@dataclasses.dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of a header; ``begin`` and ``end`` count bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    begin: int
    end: int


class SafetensorsFile:
    """One mapped file. ``infos`` holds its tensors in the order of their bytes.

    Raises:
        CheckpointError: from the constructor, naming the file and what is wrong with its header.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = map_regular(path)
        header, start = _read_header(path, self._data)
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise CheckpointError(f"{path}: '__metadata__' holds something other than strings.")
        infos = [_read_entry(path, name, entry, start) for name, entry in header.items()]
        self.infos = tuple(sorted(infos, key=lambda info: (info.begin, info.end)))
        expected = start
        for info in self.infos:
            if info.begin != expected:
                what = "overlaps the one before it" if info.begin < expected else "leaves a hole before it"
                raise CheckpointError(f"{path}, byte {info.begin}: tensor {info.name!r} {what}.")
            expected = info.end
        if expected != len(self._data):
            raise CheckpointError(f"{path}: its tensors end at byte {expected}, the file at {len(self._data)}.")

    def read(self, info: TensorInfo) -> NDArray[Any]:
        """The tensor as a read-only view of the file."""
        packed = np.frombuffer(self._data, np.uint8, info.end - info.begin, info.begin)
        return packed.view(info.dtype).reshape(info.shape)


class SafetensorsFolder:
    """A model folder as the Hugging Face hub lays it out: ``config.json`` and one or several safetensors files.

    Attributes:
        path: the folder as it was given.
        quantised: always false: float8 is a number format here, its scales are tensors of their own.

    Raises:
        CheckpointError: from the constructor when a file is missing, malformed, a pickle or a link.
    """

    quantised = False

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise CheckpointError(f"{path} is not a folder.")
        self.path = path
        for entry in sorted(path.iterdir()):
            if entry.suffix.lower() in PICKLE_SUFFIXES:
                raise CheckpointError(
                    f"{entry} may be a pickle, which can run code when it is read: remove it from the folder first."
                )
        self._config = parse_json_object(self.read_side_file("config.json"), str(path / "config.json"))
        index = self._index()
        names = sorted(set(index.values())) if index else [self._single_name()]
        self._files = [SafetensorsFile(regular_file(self.path, name)) for name in names]
        self._check_names(names, index)

    def hf_config(self) -> dict[str, Any]:
        """The fields of ``config.json``."""
        return dict(self._config)

    def table(self) -> dict[str, TensorInfo]:
        """Every tensor by name."""
        return {info.name: info for file in self._files for info in file.infos}

    def tensors(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Each tensor by name, in the order of the files, as a read-only view in its own dtype."""
        for file in self._files:
            for info in file.infos:
                yield info.name, file.read(info)

    def weight_files(self) -> list[Path]:
        """The safetensors files, links resolved."""
        return [file.path for file in self._files]

    def has(self, name: str) -> bool:
        """Whether the folder has an entry of that name."""
        return (self.path / name).exists() or (self.path / name).is_symlink()

    def read_side_file(self, name: str) -> bytes:
        """The contents of a file beside the weights, at most :data:`MAX_JSON_BYTES`."""
        return read_regular(regular_file(self.path, name), MAX_JSON_BYTES)

    def _index(self) -> dict[str, str]:
        if not self.has(INDEX_NAME):
            return {}
        where = str(self.path / INDEX_NAME)
        mapping = parse_json_object(self.read_side_file(INDEX_NAME), where).get("weight_map")
        if not isinstance(mapping, dict) or not mapping:
            raise CheckpointError(f"{where} has no 'weight_map'.")
        for name in mapping.values():
            if not isinstance(name, str) or not name.endswith(".safetensors"):
                raise CheckpointError(f"{where} names {str(name)[:80]!r}, which is no safetensors file.")
        return mapping

    def _single_name(self) -> str:
        names = sorted(entry.name for entry in self.path.iterdir() if entry.suffix == ".safetensors")
        if "model.safetensors" in names:
            return "model.safetensors"
        if len(names) != 1:
            raise CheckpointError(f"{self.path} has {len(names)} safetensors files and no {INDEX_NAME}.")
        return names[0]

    def _check_names(self, names: list[str], index: dict[str, str]) -> None:
        found = {info.name: name for name, file in zip(names, self._files, strict=True) for info in file.infos}
        if len(found) != sum(len(file.infos) for file in self._files):
            raise CheckpointError(f"{self.path} has a tensor of the same name in two files.")
        if not index:
            return
        for tensor in index.keys() | found.keys():
            if index.get(tensor) != found.get(tensor):
                told, real = index.get(tensor, "no file"), found.get(tensor, "none")
                raise CheckpointError(f"{self.path / INDEX_NAME} puts {tensor!r} into {told}, it is in {real}.")


def _read_header(path: Path, data: mmap.mmap) -> tuple[dict[str, Any], int]:
    """The parsed header and the byte at which tensors start."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 10 or size > min(len(data) - 8, MAX_HEADER_BYTES):
        raise CheckpointError(f"{path}, byte 0: a header of {size} bytes in a file of {len(data)} cannot be.")
    header = data[8 : 8 + size]
    if header.count(b",") > MAX_HEADER_ITEMS:
        raise CheckpointError(f"{path}, byte 8: the header has more than {MAX_HEADER_ITEMS} items.")
    return parse_json_object(header, f"{path}, byte 8: the header"), 8 + size


def _read_entry(path: Path, name: str, entry: object, start: int) -> TensorInfo:
    def fail(reason: str) -> CheckpointError:
        return CheckpointError(f"{path}, tensor {name[:120]!r}: {reason}.")

    if not is_plain_name(name):
        raise fail("the name is empty, unprintable or looks like a path")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise fail("the entry must have exactly dtype, shape and data_offsets")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in DTYPES:
        raise fail(f"the dtype {str(kind)[:40]!r} is unknown or not supported")
    for numbers, most in ((shape, MAX_AXES), (offsets, 2)):
        whole = isinstance(numbers, list) and all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)
        if not whole or len(numbers) > most:
            raise fail("shape or data_offsets is no short list of whole numbers")
    if len(offsets) != 2:
        raise fail("data_offsets is not a pair")
    size = math.prod(shape) * DTYPES[kind].itemsize
    if offsets[1] - offsets[0] != size:
        raise fail(f"shape {shape} of {kind} takes {size} bytes, its offsets span {offsets[1] - offsets[0]}")
    return TensorInfo(name, tuple(shape), DTYPES[kind], start + offsets[0], start + offsets[1])
