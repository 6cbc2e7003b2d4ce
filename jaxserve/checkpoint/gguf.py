"""GGUF files: one mapped file of metadata and tensors, read without trusting a byte of it.

It knows the container, versions 2 and 3: header, metadata, tensor table, alignment. What an architecture's names and
values mean is in :mod:`gguf_architectures`, what a block's bits mean in :mod:`dequantize`.

Every count, length and offset is checked against the file's size before it is used, and the whole of the metadata is
bounded, so that a malformed file is refused within a second and a few hundred megabytes, by file, offset and reason.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from jaxserve.checkpoint.dequantize import BLOCK_TYPES, BlockType, dequantize
from jaxserve.checkpoint.files import is_plain_name, map_regular
from jaxserve.checkpoint.gguf_architectures import ROPE_DIVISORS, Architecture, architecture_of
from jaxserve.errors import CheckpointError

MAX_HEADER_BYTES: Final = 64 << 20  # the largest known vocabularies need 10 MiB
MAX_ARRAY_ITEMS: Final = 1 << 21  # in all arrays together; those vocabularies have 1.3 million
MAX_TENSORS: Final = 1 << 17
MAX_NAME_BYTES: Final = 255
MAX_ALIGNMENT: Final = 1 << 16

_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS: Final[dict[int, np.dtype[Any]]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("<u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class TensorInfo:
    """One row of the tensor table; ``shape`` is row-major, ``offset`` counts bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    kind: BlockType
    offset: int
    size: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of its values: its own, or float32 if they must be computed from blocks."""
        return np.dtype(np.float32) if self.kind.dtype is None else self.kind.dtype


class _Cursor:
    """A position in the mapped header that refuses to leave it."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.offset = 0
        self.end = min(len(data), MAX_HEADER_BYTES)
        self.items_left = MAX_ARRAY_ITEMS

    def fail(self, reason: str, offset: int | None = None) -> CheckpointError:
        return CheckpointError(f"{self.path}, byte {self.offset if offset is None else offset}: {reason}.")

    def need(self, size: int, what: str) -> None:
        if size > self.end - self.offset:
            limit = f"the file's {self.end} bytes" if self.end == len(self.data) else f"{self.end} bytes of header"
            raise self.fail(f"{what} takes {size} bytes, which is past {limit}")

    def number(self, form: struct.Struct, what: str) -> int:
        self.need(form.size, what)
        (value,) = form.unpack_from(self.data, self.offset)
        self.offset += form.size
        return int(value)

    def count(self, limit: int, smallest: int, what: str) -> int:
        """A number of things that must be at most ``limit`` and take at least ``smallest`` bytes each."""
        start = self.offset
        value = self.number(_U64, what)
        if value > limit or value * smallest > self.end - self.offset:
            raise self.fail(f"{what} is {value}, more than there can be", start)
        return value

    def string(self, what: str, limit: int = MAX_HEADER_BYTES) -> str:
        start = self.offset
        size = self.number(_U64, f"the length of {what}")
        if size > limit:
            raise self.fail(f"{what} has {size} bytes, more than {limit}", start)
        self.need(size, what)
        raw = self.data[self.offset : self.offset + size]
        self.offset += size
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8", start) from None

    def strings(self, count: int, what: str) -> list[str]:
        # Hundreds of thousands in a large vocabulary: the loop is bare, its checks are those of `string`.
        data, position, end, size_of = self.data, self.offset, self.end, _U64.unpack_from
        found = []
        for _ in range(count):
            start = position + 8
            position = start + size_of(data, position)[0] if start <= end else end + 1
            if position > end:
                raise self.fail(f"a string of {what} reaches past the end of the header", start - 8)
            try:
                found.append(data[start:position].decode())
            except UnicodeDecodeError:
                raise self.fail(f"a string of {what} is not UTF-8", start - 8) from None
        self.offset = position
        return found

    def value(self, what: str) -> Any:
        start = self.offset
        kind = self.number(_U32, f"the type of {what}")
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self.array(what)
        if kind not in _SCALARS:
            raise self.fail(f"{what} has the unknown type {kind}", start)
        return self.scalars(kind, 1, what)[0]

    def array(self, what: str) -> list[Any]:
        start = self.offset
        kind = self.number(_U32, f"the item type of {what}")
        if kind != _STRING and kind not in _SCALARS:
            raise self.fail(f"{what} is an array of type {kind}, which is unknown or an array itself", start)
        count = self.count(self.items_left, 8 if kind == _STRING else _SCALARS[kind].itemsize, f"the length of {what}")
        self.items_left -= count
        return self.strings(count, what) if kind == _STRING else self.scalars(kind, count, what)

    def scalars(self, kind: int, count: int, what: str) -> list[Any]:
        dtype = _SCALARS[kind]
        self.need(count * dtype.itemsize, what)
        items = np.frombuffer(self.data, dtype, count, self.offset)
        self.offset += items.nbytes
        return [item != 0 for item in items.tolist()] if kind == _BOOL else items.tolist()


class GGUFFile:
    """A GGUF model: its metadata, its Hugging Face configuration, and its tensors one at a time.

    Attributes:
        metadata: key to str, int, float, bool or list of those.
        infos: the tensor table in file order.

    Raises:
        CheckpointError: from the constructor when the file is malformed or its architecture unknown.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = map_regular(path, follow=True)
        cursor = _Cursor(path, self._data)
        tensors, pairs = self._read_header(cursor)
        self.metadata = _read_metadata(cursor, pairs)
        self.infos = _read_tensor_table(cursor, tensors, self.metadata)
        if self.metadata.get("split.count", 1) not in (0, 1):
            raise CheckpointError(f"{path} is one part of a split file; merge the parts first.")
        shapes = {info.name: info.shape for info in self.infos}
        divisors = next((self._numbers(info) for info in self.infos if info.name == ROPE_DIVISORS), None)
        self._architecture: Architecture = architecture_of(path, self.metadata, shapes, divisors)

    @property
    def quantised(self) -> bool:
        """Whether any tensor is stored in blocks with a scale."""
        return any(info.kind.quantised for info in self.infos)

    def hf_config(self) -> dict[str, Any]:
        """The fields of a Hugging Face ``config.json``."""
        return dict(self._architecture.config)

    def table(self) -> dict[str, TensorInfo]:
        """Every tensor that :meth:`tensors` yields, by its Hugging Face name."""
        return {self._architecture.names[info.name]: info for info in self._weights()}

    def tensors(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Each tensor in file order, under the name, in the layout and with the values of the Hugging Face form.

        float32, except that tensors stored as float16 or bfloat16 keep that type.
        """
        for info in self._weights():
            yield self._architecture.names[info.name], self._architecture.restore(info.name, self._numbers(info))

    def _numbers(self, info: TensorInfo) -> NDArray[Any]:
        try:
            return dequantize(np.frombuffer(self._data, np.uint8, info.size, info.offset), info.kind, info.shape)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}, tensor {info.name}: {error.message}") from None

    def _weights(self) -> Iterator[TensorInfo]:
        return (info for info in self.infos if info.name in self._architecture.names)

    @staticmethod
    def _read_header(cursor: _Cursor) -> tuple[int, int]:
        magic = cursor.data[:4]
        if magic != b"GGUF":
            raise cursor.fail(f"a GGUF file starts with 'GGUF', this one with {magic!r}")
        cursor.offset = 4
        version = cursor.number(_U32, "the version")
        if version not in (2, 3):
            swapped = " (a big-endian file?)" if version & 0xFFFF == 0 else ""
            raise cursor.fail(f"GGUF version {version}{swapped} is not supported, only 2 and 3", 4)
        tensors = cursor.count(MAX_TENSORS, 24, "the number of tensors")
        return tensors, cursor.count(MAX_ARRAY_ITEMS, 13, "the number of metadata entries")


def _read_metadata(cursor: _Cursor, pairs: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        start = cursor.offset
        key = cursor.string("a metadata key", MAX_NAME_BYTES)
        if key in metadata:
            raise cursor.fail(f"the metadata key {key!r} stands there twice", start)
        metadata[key] = cursor.value(f"metadata {key!r}")
    return metadata


def _read_tensor_table(cursor: _Cursor, count: int, metadata: dict[str, Any]) -> tuple[TensorInfo, ...]:
    table_start = cursor.offset
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {alignment!r}, not a power of two up to {MAX_ALIGNMENT}")
    rows = [_read_tensor_row(cursor, alignment) for _ in range(count)]
    names = {row.name for row in rows}
    if len(names) != count:
        raise cursor.fail("a tensor name stands in the table twice", table_start)
    start = -(-cursor.offset // alignment) * alignment
    infos = tuple(dataclasses.replace(row, offset=row.offset + start) for row in rows)
    taken, previous = start, "the tensor table"
    for info in sorted(infos, key=lambda info: info.offset):
        if info.offset < taken:
            raise cursor.fail(f"tensor {info.name!r} overlaps {previous}", info.offset)
        taken, previous = info.offset + info.size, repr(info.name)
        if taken > len(cursor.data):
            raise cursor.fail(f"tensor {info.name!r} ends at {taken}, the file at {len(cursor.data)}", info.offset)
    return infos


def _read_tensor_row(cursor: _Cursor, alignment: int) -> TensorInfo:
    """One row, its offset still counted from the start of the data."""
    start = cursor.offset
    name = cursor.string("a tensor name", MAX_NAME_BYTES)
    if not is_plain_name(name):
        raise cursor.fail(f"{name!r} is no tensor name", start)
    axes = cursor.number(_U32, f"the number of axes of {name!r}")
    if not 1 <= axes <= 4:
        raise cursor.fail(f"tensor {name!r} has {axes} axes", start)
    shape = tuple(reversed([cursor.number(_U64, f"an axis of {name!r}") for _ in range(axes)]))
    code = cursor.number(_U32, f"the type of {name!r}")
    if code not in BLOCK_TYPES:
        raise cursor.fail(f"tensor {name!r} has the unknown type {code}", start)
    kind = BLOCK_TYPES[code]
    offset = cursor.number(_U64, f"the offset of {name!r}")
    size = math.prod(shape) // kind.weights * kind.bytes
    if min(shape) < 1 or size > len(cursor.data):
        raise cursor.fail(f"tensor {name!r} of shape {shape} cannot lie in a file of {len(cursor.data)} bytes", start)
    if shape[-1] % kind.weights:
        raise cursor.fail(f"tensor {name!r}: rows of {shape[-1]} are no whole {kind.name} blocks", start)
    if offset % alignment or offset > len(cursor.data):
        raise cursor.fail(f"tensor {name!r} has the offset {offset}, misaligned or past the end", start)
    return TensorInfo(name, shape, kind, offset, size)
