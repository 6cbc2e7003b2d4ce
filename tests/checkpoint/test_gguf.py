"""GGUF files: what the reference writer writes is read back, and what is malformed is refused quickly and by name."""

from __future__ import annotations

import math
import os
import struct
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from jaxserve.checkpoint.gguf import GGUFFile
from jaxserve.errors import CheckpointError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import gguf

K = gguf.GGMLQuantizationType


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def pair(key: str, value: object) -> bytes:
    if isinstance(value, bytes):  # an already encoded type and value
        return string(key) + value
    if isinstance(value, str):
        return string(key) + struct.pack("<I", 8) + string(value)
    return string(key) + (struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value))


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    axes = struct.pack(f"<{len(shape)}Q", *reversed(shape))
    return string(name) + struct.pack("<I", len(shape)) + axes + struct.pack("<IQ", kind, offset)


METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 32,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
EMBEDDING = tensor("token_embd.weight", (4, 32))


def file_of(
    pairs: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    *,
    data: bytes = b"\0" * 512,
    version: int = 3,
    counts: tuple[int | None, int | None] = (None, None),
) -> bytes:
    pairs = [pair(key, value) for key, value in METADATA.items()] + (pairs or [])
    tensors = [EMBEDDING] if tensors is None else tensors
    head = b"GGUF" + struct.pack("<I", version)
    head += struct.pack(
        "<QQ", *(own if own is not None else len(real) for own, real in zip(counts, (tensors, pairs), strict=True))
    )
    head += b"".join(pairs) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32) + data


def array_of(kind: int, count: int, items: bytes = b"") -> bytes:
    return struct.pack("<IIQ", 9, kind, count) + items


MALFORMED = {
    "no magic": (b"GGML" + file_of()[4:], "starts with"),
    "empty": (b"", "empty"),
    "only a magic": (b"GGUF", "past the file's"),
    "version 1": (file_of(version=1), "version 1"),
    "version 4": (file_of(version=4), "version 4"),
    "big endian": (file_of(version=3 << 24), "big-endian"),
    "2^60 tensors": (file_of(counts=(1 << 60, None)), "number of tensors is"),
    "2^60 metadata entries": (file_of(counts=(None, 1 << 60)), "number of metadata entries is"),
    "one tensor too many": (file_of(counts=(2, None)), "byte"),
    "one entry too many": (file_of(counts=(None, 9)), "byte"),
    "a key of 2^60 bytes": (file_of()[:24] + struct.pack("<Q", 1 << 60) + file_of()[32:], "metadata key has"),
    "a string of 2^63 bytes": (
        file_of([string("x") + struct.pack("<IQ", 8, 1 << 63)]),
        "has 9223372036854775808 bytes",
    ),
    "an array of 2^60 numbers": (file_of([pair("x", array_of(4, 1 << 60))]), "length of metadata 'x' is"),
    "an array of 2^60 strings": (file_of([pair("x", array_of(8, 1 << 60))]), "length of metadata 'x' is"),
    "an array of arrays": (file_of([pair("x", array_of(9, 1, array_of(4, 0)))]), "array of type 9"),
    "an array of unknowns": (file_of([pair("x", array_of(77, 1))]), "array of type 77"),
    "an item past the end": (
        file_of([pair("x", array_of(8, 2, string("a") + struct.pack("<Q", 1 << 40)))]),
        "past the end",
    ),
    "an unknown value type": (file_of([string("x") + struct.pack("<I", 99)]), "unknown type 99"),
    "a key twice": (file_of([pair("llama.block_count", 2)]), "stands there twice"),
    "a key that is no text": (file_of([string(b"\xff\xfe") + struct.pack("<II", 4, 1)]), "not UTF-8"),
    "a value that is no text": (file_of([string("x") + struct.pack("<I", 8) + string(b"\xff")]), "not UTF-8"),
    "an item that is no text": (file_of([pair("x", array_of(8, 1, string(b"\xff")))]), "not UTF-8"),
    "alignment 0": (file_of([pair("general.alignment", 0)]), "alignment"),
    "alignment 2^31": (file_of([pair("general.alignment", 1 << 31)]), "alignment"),
    "alignment 33": (file_of([pair("general.alignment", 33)]), "alignment"),
    "alignment in words": (file_of([pair("general.alignment", "32")]), "alignment"),
    "a name with a path": (file_of(tensors=[tensor("../../etc/passwd", (4, 32))]), "no tensor name"),
    "a name with a backslash": (file_of(tensors=[tensor("a\\b", (4, 32))]), "no tensor name"),
    "a name with NUL": (file_of(tensors=[tensor("a\0b", (4, 32))]), "no tensor name"),
    "an empty name": (file_of(tensors=[tensor("", (4, 32))]), "no tensor name"),
    "a name of 1000 bytes": (file_of(tensors=[tensor("a" * 1000, (4, 32))]), "more than 255"),
    "a name twice": (file_of(tensors=[EMBEDDING, EMBEDDING], data=b"\0" * 1024), "twice"),
    "no axis": (file_of(tensors=[tensor("token_embd.weight", ())]), "0 axes"),
    "2^31 axes": (file_of(tensors=[string("a") + struct.pack("<I", 1 << 31)]), "2147483648 axes"),
    "an axis of 0": (file_of(tensors=[tensor("token_embd.weight", (4, 0))]), "cannot lie"),
    "axes that overflow": (file_of(tensors=[tensor("token_embd.weight", (1 << 62, 1 << 62))]), "cannot lie"),
    "axes that wrap to nothing": (file_of(tensors=[tensor("a", (1 << 32, 1 << 32))]), "cannot lie"),
    "half a block": (file_of(tensors=[tensor("token_embd.weight", (4, 24), kind=8)]), "no whole Q8_0 blocks"),
    "an unknown tensor type": (file_of(tensors=[tensor("token_embd.weight", (4, 32), kind=99)]), "unknown type 99"),
    "a removed tensor type": (file_of(tensors=[tensor("token_embd.weight", (4, 32), kind=4)]), "unknown type 4"),
    "a misaligned offset": (file_of(tensors=[tensor("token_embd.weight", (4, 32), offset=8)]), "misaligned"),
    "an offset of 2^63": (file_of(tensors=[tensor("token_embd.weight", (4, 32), offset=1 << 63)]), "past the end"),
    "data past the end": (file_of(tensors=[tensor("token_embd.weight", (4, 32), offset=32)]), "ends at"),
    "truncated data": (file_of()[:-1], "ends at"),
    "overlap": (file_of(tensors=[EMBEDDING, tensor("output_norm.weight", (32,), offset=384)]), "overlaps"),
    "same place": (file_of(tensors=[EMBEDDING, tensor("output_norm.weight", (32,))]), "overlaps"),
    "one of several files": (file_of([pair("split.count", 3)]), "split"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files_are_refused_by_name_and_reason(tmp_path, case):
    data, reason = MALFORMED[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    started = time.perf_counter()
    with pytest.raises(CheckpointError) as caught:
        GGUFFile(path)
    assert time.perf_counter() - started < 10
    assert reason in caught.value.message
    assert str(path) in caught.value.message


def test_the_malformed_files_are_one_fault_from_a_good_one(tmp_path):
    path = tmp_path / "good.gguf"
    for version in (2, 3):
        path.write_bytes(file_of(version=version))
        assert [name for name, _ in GGUFFile(path).tensors()] == ["model.embed_tokens.weight"]


def test_malformed_files_take_little_memory(tmp_path):
    for number, (data, _) in enumerate(MALFORMED.values()):
        (tmp_path / f"{number}.gguf").write_bytes(data)
    (tmp_path / "long.gguf").write_bytes(file_of([pair("x", array_of(4, 1 << 22, bytes(1 << 24)))]))
    (tmp_path / "many.gguf").write_bytes(file_of([pair("x", array_of(8, 1 << 22, bytes(8 << 22)))]))
    (tmp_path / "wide.gguf").write_bytes(file_of([string("x") + struct.pack("<I", 8) + string(bytes(65 << 20))]))
    program = """
import resource, sys
from pathlib import Path
from jaxserve.checkpoint.gguf import GGUFFile
from jaxserve.errors import CheckpointError
(used,) = [int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")]
resource.setrlimit(resource.RLIMIT_DATA, ((used << 10) + (256 << 20),) * 2)
for path in Path(sys.argv[1]).iterdir():
    try:
        GGUFFile(path)
    except CheckpointError:
        print(path.name)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == len(MALFORMED) + 3


def test_a_fifo_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match="not a regular file"):
        GGUFFile(tmp_path / "a.gguf")


def test_random_damage_is_refused_or_read_but_never_anything_else(tmp_path, tiny, to_gguf):
    good = to_gguf(tiny, tmp_path / "good.gguf").read_bytes()
    header = len(good) - sum(array.nbytes for array in tiny.weights.values())
    rng = np.random.default_rng(7)
    path, refused = tmp_path / "bad.gguf", 0
    for _ in range(300):
        data = bytearray(good)
        for position in rng.integers(0, header, rng.integers(1, 4)):
            data[position] = rng.choice([0, 1, 127, 128, 255, data[position] ^ 1 << rng.integers(8)])
        path.write_bytes(data[: rng.integers(header)] if rng.random() < 0.1 else data)
        try:
            file = GGUFFile(path)
            with np.errstate(all="ignore"):
                assert all(math.prod(array.shape) for _, array in file.tensors())
        except CheckpointError:
            refused += 1
    assert 50 < refused < 300


# --- what the reference writer writes --------------------------------------------------------------------------------


def test_reads_what_was_written(tmp_path, tiny, to_gguf):
    file = GGUFFile(to_gguf(tiny, tmp_path / "a.gguf"))
    read = dict(file.tensors())
    assert read.keys() == tiny.weights.keys() == file.table().keys()
    for name, array in read.items():
        np.testing.assert_array_equal(array, tiny.weights[name], err_msg=name)
        assert file.table()[name].shape == array.shape
        assert file.table()[name].dtype == array.dtype
    assert not file.quantised
    config = file.hf_config()
    assert {key: config[key] for key in tiny.config} == tiny.config


def test_control_without_the_permutation_queries_and_keys_are_wrong(tmp_path, tiny, to_gguf):
    read = dict(GGUFFile(to_gguf(tiny, tmp_path / "a.gguf", permuted=False)).tensors())
    wrong = {name for name in read if not np.array_equal(read[name], tiny.weights[name])}
    assert wrong == {name for name in read if "q_proj" in name or "k_proj" in name}


def test_keeps_half_precision_and_computes_the_rest_in_single(tmp_path, tiny, to_gguf):
    kinds = {
        "model.embed_tokens.weight": K.F16,
        "lm_head.weight": K.BF16,
        "model.layers.0.self_attn.q_proj.weight": K.Q8_0,
        "model.layers.1.self_attn.q_proj.weight": K.Q4_1,
        "model.layers.0.mlp.down_proj.weight": K.Q5_0,
    }
    file = GGUFFile(to_gguf(tiny, tmp_path / "a.gguf", kinds))
    read = dict(file.tensors())
    assert file.quantised
    types = {name: array.dtype.name for name, array in read.items()}
    assert types == {name: {K.F16: "float16", K.BF16: "bfloat16"}.get(kinds.get(name), "float32") for name in read}
    for name, kind in kinds.items():
        packed = gguf.quants.quantize(tiny.weights[name], kind)  # rows are what is permuted, so blocks stay whole
        expected = gguf.quants.dequantize(packed, kind)
        np.testing.assert_array_equal(read[name].astype(np.float32), expected, err_msg=name)


def test_metadata_is_what_the_reference_reader_sees(tmp_path, tiny, to_gguf):
    def more(writer: gguf.GGUFWriter) -> None:
        for name, value in (("uint8", 200), ("int8", -3), ("uint16", 60000), ("int16", -300), ("int32", -70000)):
            getattr(writer, f"add_{name}")(f"x.{name}", value)
        writer.add_uint64("x.uint64", 1 << 60)
        writer.add_int64("x.int64", -(1 << 60))
        writer.add_float64("x.float64", 0.1)
        writer.add_bool("x.bool", True)
        writer.add_array("x.floats", [0.5, -1.5])
        writer.add_array("x.bools", [True, False])
        writer.add_array("x.strings", ["", "½", "a" * 300])

    path = to_gguf(tiny, tmp_path / "a.gguf", extra=more)
    metadata, reference = GGUFFile(path).metadata, gguf.GGUFReader(path)
    expected = {key: field.contents() for key, field in reference.fields.items() if not key.startswith("GGUF.")}
    assert metadata == expected
    assert type(metadata["x.bool"]) is bool
    assert [(info.name, info.offset, info.size) for info in GGUFFile(path).infos] == [
        (info.name, info.data_offset, info.n_bytes) for info in reference.tensors
    ]


def test_undecodable_tensors_are_named(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(file_of(tensors=[tensor("token_embd.weight", (2, 256), kind=19)]))
    with pytest.raises(CheckpointError, match=r"a\.gguf, tensor token_embd\.weight: .*IQ1_S"):
        list(GGUFFile(path).tensors())


def test_large_vocabularies_are_read_quickly(tmp_path):
    tokens = b"".join(string(f"token{number}") for number in range(262_144))
    merges = b"".join(string(f"a{number} b{number}") for number in range(500_000))
    path = tmp_path / "a.gguf"
    arrays = {"tokens": array_of(8, 262_144, tokens), "merges": array_of(8, 500_000, merges)}
    arrays |= {"scores": array_of(6, 262_144, bytes(4 * 262_144))}
    path.write_bytes(file_of([pair(f"tokenizer.ggml.{key}", value) for key, value in arrays.items()]))
    started = time.perf_counter()
    metadata = GGUFFile(path).metadata
    assert time.perf_counter() - started < 15
    assert metadata["tokenizer.ggml.merges"][-1] == "a499999 b499999"


def test_links_to_a_file_are_the_users_choice(tmp_path, forms):
    link = tmp_path / "link.gguf"
    link.symlink_to(forms["gguf"])
    assert GGUFFile(Path(link)).hf_config()["hidden_size"] == 64
