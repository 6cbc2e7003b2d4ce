"""Hugging Face folders: what the reference library writes is read back, everything doubtful is refused by name."""

from __future__ import annotations

import json
import os
import pickle
import struct
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from jaxserve.checkpoint.safetensors import DTYPES, INDEX_NAME, SafetensorsFile, SafetensorsFolder
from jaxserve.errors import CheckpointError


def file_of(header: object, data: bytes = b"", size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def entry(shape: list[object], begin: object, end: object, dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


A = entry([2], 0, 8)
MALFORMED = {
    "empty": (b"", "empty"),
    "seven bytes": (b"\0" * 7, "cannot be"),
    "header of 2^63": (file_of({"a": A}, bytes(8), 1 << 63), "cannot be"),
    "header past the end": (file_of({"a": A}, bytes(8), 100_000), "cannot be"),
    "header of more than 100 MB": (struct.pack("<Q", 100_000_001) + bytes(16), "cannot be"),
    "no JSON": (file_of(b'{"a": '), "not valid JSON"),
    "a list": (file_of([1]), "not a JSON object"),
    "deep nesting": (file_of(b'{"a":' + b"[" * 100_000), "not valid JSON"),
    "millions of items": (file_of(b'{"a":[' + b"1," * 2_200_000 + b"1]}"), "more than 2097152 items"),
    "a name twice": (file_of(b'{"a":%s,"a":%s}' % ((json.dumps(A).encode(),) * 2), bytes(8)), "twice"),
    "a path": (file_of({"../../x": A}, bytes(8)), "looks like a path"),
    "an empty name": (file_of({"": A}, bytes(8)), "looks like a path"),
    "a name with NUL": (file_of({"a\0": A}, bytes(8)), "looks like a path"),
    "no entry": (file_of({"a": 7}, bytes(8)), "exactly dtype"),
    "a field missing": (file_of({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)), "exactly dtype"),
    "a field too many": (file_of({"a": A | {"x": 1}}, bytes(8)), "exactly dtype"),
    "an unknown dtype": (file_of({"a": entry([2], 0, 8, "F31")}, bytes(8)), "'F31'"),
    "a dtype of 4 bits": (file_of({"a": entry([2], 0, 1, "F4")}, bytes(1)), "'F4'"),
    "a dtype that is a list": (file_of({"a": entry([2], 0, 8, ["F32"])}, bytes(8)), "is unknown"),
    "a negative axis": (file_of({"a": entry([-2], 0, 8)}, bytes(8)), "whole numbers"),
    "a fractional axis": (file_of({"a": entry([2.0], 0, 8)}, bytes(8)), "whole numbers"),
    "a true axis": (file_of({"a": entry([True, 2], 0, 8)}, bytes(8)), "whole numbers"),
    "axes that overflow": (file_of({"a": entry([1 << 33, 1 << 33], 0, 8)}, bytes(8)), "takes"),
    "axes that wrap": (file_of({"a": entry([1 << 32, 1 << 32], 0, 0)}), "takes"),
    "nine axes": (file_of({"a": entry([1] * 9, 0, 4)}, bytes(4)), "short list"),
    "one offset": (file_of({"a": A | {"data_offsets": [0]}}, bytes(8)), "not a pair"),
    "offsets reversed": (file_of({"a": entry([2], 8, 0)}, bytes(8)), "span -8"),
    "too few bytes for the shape": (file_of({"a": entry([2], 0, 4)}, bytes(4)), "takes 8 bytes"),
    "data past the end": (file_of({"a": entry([4], 0, 16)}, bytes(8)), "end at byte"),
    "data left over": (file_of({"a": A}, bytes(9)), "end at byte"),
    "truncated": (file_of({"a": A}, bytes(7)), "end at byte"),
    "a hole": (file_of({"a": A, "b": entry([1], 12, 16)}, bytes(16)), "leaves a hole"),
    "a hole in front": (file_of({"a": entry([1], 4, 8)}, bytes(8)), "leaves a hole"),
    "overlap": (file_of({"a": A, "b": entry([2], 4, 12)}, bytes(12)), "overlaps"),
    "the same bytes twice": (file_of({"a": A, "b": A}, bytes(8)), "overlaps"),
    "metadata of numbers": (file_of({"__metadata__": {"a": 1}, "a": A}, bytes(8)), "__metadata__"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files_are_refused_by_name_and_reason(tmp_path, case):
    data, reason = MALFORMED[case]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    started = time.perf_counter()
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile(path)
    assert time.perf_counter() - started < 10
    assert reason in caught.value.message
    assert str(path) in caught.value.message
    assert len(caught.value.message) < 600


def test_the_malformed_files_are_one_fault_from_a_good_one(tmp_path):
    path = tmp_path / "good.safetensors"
    path.write_bytes(file_of({"__metadata__": {"a": "b"}, "a": A, "b": entry([1], 8, 12)}, bytes(12)))
    assert [info.name for info in SafetensorsFile(path).infos] == ["a", "b"]


def test_every_dtype_is_the_references(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {}
    for name, dtype in DTYPES.items():
        data = rng.integers(0, 2 if name == "BOOL" else 256, (3, 4 * dtype.itemsize), dtype=np.uint8)
        arrays[name] = data.view(dtype)
    safetensors.numpy.save_file(
        {name: array for name, array in arrays.items() if name not in ("F8_E8M0",)}, tmp_path / "a.safetensors"
    )
    file = SafetensorsFile(tmp_path / "a.safetensors")
    reference = dict(safetensors.deserialize((tmp_path / "a.safetensors").read_bytes()))
    assert {info.name for info in file.infos} == reference.keys()
    for info in file.infos:
        assert reference[info.name]["dtype"] == info.name
        assert info.dtype == DTYPES[info.name]
        assert info.shape == tuple(reference[info.name]["shape"])
        assert file.read(info).tobytes() == arrays[info.name].tobytes() == bytes(reference[info.name]["data"])


def test_scales_of_8_bits_are_read(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(file_of({"a": entry([3], 0, 3, "F8_E8M0")}, bytes([126, 127, 128])))
    (info,) = SafetensorsFile(path).infos
    assert SafetensorsFile(path).read(info).dtype == ml_dtypes.float8_e8m0fnu
    assert SafetensorsFile(path).read(info).astype(np.float32).tolist() == [0.5, 1.0, 2.0]


def test_random_damage_is_refused_or_read_but_never_anything_else(tmp_path, tiny):
    path, refused = tmp_path / "a.safetensors", 0
    safetensors.numpy.save_file(tiny.weights, path)
    good = path.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    rng = np.random.default_rng(11)
    for _ in range(300):
        data = bytearray(good)
        for position in rng.integers(0, header, rng.integers(1, 4)):
            data[position] = rng.choice([*b'0[]{}",:-', 255, data[position] ^ 1 << rng.integers(8)])
        path.write_bytes(data[: rng.integers(len(good))] if rng.random() < 0.1 else data)
        try:
            file = SafetensorsFile(path)
            for info in file.infos:
                assert file.read(info).shape == info.shape
        except CheckpointError:
            refused += 1
    assert 200 < refused < 300


# --- folders ---------------------------------------------------------------------------------------------------------


def test_a_folder_with_an_index(forms, tiny):
    folder = SafetensorsFolder(forms["folder"])
    read = dict(folder.tensors())
    assert read.keys() == tiny.weights.keys() == folder.table().keys()
    for name, array in read.items():
        np.testing.assert_array_equal(array, tiny.weights[name])
        assert not array.flags.writeable
    assert folder.hf_config() == tiny.config


@pytest.mark.parametrize("name", ["model.safetensors", "anything.safetensors"])
def test_a_folder_with_a_single_file(folder, tiny, name):
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    safetensors.numpy.save_file(tiny.weights, folder / name)
    assert SafetensorsFolder(folder).table().keys() == tiny.weights.keys()


def edit_index(folder: Path, **changes: str | None) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())["weight_map"] | changes
    index = {name: file for name, file in index.items() if file is not None}
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": index}))


def test_an_index_must_agree_with_its_files(folder):
    first = "model-00001-of-00002.safetensors"
    edit_index(folder, **{"lm_head.weight": None})
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' into no file, it is in model-0000"):
        SafetensorsFolder(folder)
    edit_index(folder, **{"lm_head.weight": "model-00002-of-00002.safetensors", "absent": first})
    with pytest.raises(CheckpointError, match=f"puts ('absent' into {first}, it is in none|'lm_head.weight')"):
        SafetensorsFolder(folder)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x.safetensors", "a/x.safetensors", "x.bin", 7])
def test_an_index_names_files_of_its_folder(folder, name):
    edit_index(folder, absent=name)
    with pytest.raises(CheckpointError, match=r"not the name of a file in it|no safetensors file"):
        SafetensorsFolder(folder)


def test_a_missing_shard_is_named(folder):
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors cannot be opened"):
        SafetensorsFolder(folder)


def test_a_tensor_in_two_files_is_refused(folder, tiny):
    safetensors.numpy.save_file(tiny.weights, folder / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="same name in two files"):
        SafetensorsFolder(folder)


def test_no_weights_or_no_configuration(folder):
    (folder / "config.json").rename(folder / "config.txt")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be opened"):
        SafetensorsFolder(folder)
    (folder / "config.txt").rename(folder / "config.json")
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="0 safetensors files"):
        SafetensorsFolder(folder)
    with pytest.raises(CheckpointError, match="not a folder"):
        SafetensorsFolder(folder / "config.json")


class Payload:
    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.sentinel,)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "a.pt", "b.pth", "c.pkl", "D.PKL", "e.ckpt", "f.npy", "g.pickle"]
)
def test_pickles_are_refused_by_name_and_not_opened(folder, tmp_path, name):
    sentinel = tmp_path / "sentinel"
    (folder / name).write_bytes(pickle.dumps(Payload(sentinel)))
    with pytest.raises(CheckpointError, match=name):
        SafetensorsFolder(folder)
    assert not sentinel.exists()
    pickle.loads((folder / name).read_bytes())  # the payload would have worked
    assert sentinel.exists()


@pytest.mark.parametrize("name", ["config.json", "model-00001-of-00002.safetensors", INDEX_NAME])
def test_links_and_fifos_are_refused(folder, tmp_path, name):
    (folder / name).rename(tmp_path / "real")
    (folder / name).symlink_to(tmp_path / "real")
    with pytest.raises(CheckpointError, match=rf"{name} is a symbolic link"):
        SafetensorsFolder(folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=rf"{name} is not a regular file"):
        SafetensorsFolder(folder)


def test_a_hub_cache_is_read(folder, tmp_path, tiny):
    cache = tmp_path / "models--a--b"
    snapshot = cache / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    folder.rename(cache / "blobs")
    for number, path in enumerate(sorted((cache / "blobs").iterdir())):
        path.rename(cache / "blobs" / f"{number:064}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:064}")
    assert dict(SafetensorsFolder(snapshot).tensors()).keys() == tiny.weights.keys()
