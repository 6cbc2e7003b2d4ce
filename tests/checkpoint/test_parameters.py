"""Every tensor goes where its rule says, in the right dtype, and in little memory; nothing is guessed or left over."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore
from numpy.typing import NDArray

from jaxserve.checkpoint import silent
from jaxserve.checkpoint.manifest import LeafEntry
from jaxserve.checkpoint.parameters import DTYPE_CHOICES, write_parameters
from jaxserve.errors import CheckpointError
from jaxserve.models.weights import rule


@dataclasses.dataclass
class Arrays:
    """A source that holds its tensors."""

    arrays: dict[str, NDArray[Any]]
    quantised: bool = False

    def hf_config(self) -> dict[str, Any]:
        return {}

    def table(self) -> dict[str, NDArray[Any]]:
        return self.arrays

    def tensors(self) -> Iterator[tuple[str, NDArray[Any]]]:
        yield from self.arrays.items()


RULES = (
    rule("a.kernel", "x.weight", (4, 6), (None, None), order=(1, 0)),
    rule("a.heads", "q.weight", (2, 3, 4), (None, None, None), order=(2, 0, 1)),
    rule("a.scale", "n.weight", (6,), (None,)),
)


def arrays(dtype: Any = np.float32) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(0)
    shapes = {"x.weight": (4, 6), "q.weight": (6, 4), "n.weight": (6,)}
    return {name: rng.standard_normal(shape, np.float32).astype(dtype) for name, shape in shapes.items()}


@pytest.fixture
def write(tmp_path):
    """Writes a source and returns the leaves' entries."""

    def write(source: Arrays, dtype: str = "auto", rules=RULES, ignored=(), progress=silent) -> tuple[LeafEntry, ...]:
        for name in ("content", "scratch"):
            (tmp_path / name).mkdir()
        return write_parameters(source, rules, ignored, dtype, tmp_path / "content", tmp_path / "scratch", progress)

    return write


def stored(folder: Path, leaf: LeafEntry) -> NDArray[Any]:
    """A leaf as it lies on the disk, read without Orbax."""
    place = {"driver": "file", "path": str(folder / "content" / "params" / "state" / leaf.path)}
    return tensorstore.open({"driver": "zarr3", "kvstore": place}).result().read().result()


def test_each_leaf_is_its_tensor_reshaped_and_transposed(write, tmp_path):
    source = arrays()
    seen: list[tuple[str, int, int]] = []
    leaves = {leaf.path: leaf for leaf in write(Arrays(source), progress=lambda *report: seen.append(report))}
    assert list(leaves) == ["a.heads", "a.kernel", "a.scale"]
    assert [leaf.shape for leaf in leaves.values()] == [(4, 2, 3), (6, 4), (6,)]
    np.testing.assert_array_equal(stored(tmp_path, leaves["a.kernel"]), source["x.weight"].T)
    np.testing.assert_array_equal(stored(tmp_path, leaves["a.scale"]), source["n.weight"])
    heads = stored(tmp_path, leaves["a.heads"])
    for head in range(2):
        np.testing.assert_array_equal(heads[:, head], source["q.weight"][3 * head : 3 * head + 3].T)
    assert seen[-1] == ("write", 216, 216)
    assert [report for report in seen if report[0] == "convert"][-1] == ("convert", 216, 216)


@pytest.mark.parametrize("dtype", DTYPE_CHOICES)
@pytest.mark.parametrize("own", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("quantised", [False, True])
def test_dtypes(write, tmp_path, dtype, own, quantised):
    kept = np.dtype(own).name
    expected = {"source": kept, "auto": "bfloat16" if quantised else kept}.get(dtype, dtype)
    source = arrays(own)
    (_, kernel, _) = write(Arrays(source, quantised), dtype)
    assert kernel.dtype == expected
    np.testing.assert_array_equal(stored(tmp_path, kernel), source["x.weight"].T.astype(expected))


def test_one_tensor_may_fill_two_leaves(write, tmp_path):
    rules = (*RULES, rule("b", "n.weight", (2, 3), (None, None)))
    leaves = write(Arrays(arrays()), rules=rules)
    np.testing.assert_array_equal(stored(tmp_path, leaves[-1]).reshape(-1), arrays()["n.weight"])


def test_missing_tensors_are_named(write):
    source = arrays()
    del source["q.weight"]
    with pytest.raises(CheckpointError, match=r"lacks q\.weight"):
        write(Arrays(source))


def test_unexpected_tensors_are_named_unless_they_are_ignored(write, tmp_path):
    source = arrays() | {f"visual.{number}": np.zeros(1, np.float32) for number in range(9)}
    with pytest.raises(
        CheckpointError, match=r"has visual\.0, visual\.1, visual\.2 and 6 more tensors, .* not call for"
    ):
        write(Arrays(source))
    for name in ("content", "scratch"):
        (tmp_path / name).rmdir()
    assert len(write(Arrays(source), ignored=("visual.",))) == 3


@pytest.mark.parametrize("shape", [(6, 4), (4, 7), (24, 2), (2, 12), (3, 8)])
def test_misshapen_tensors_are_named_even_with_as_many_numbers(write, shape):
    with pytest.raises(CheckpointError, match=r"x\.weight has shape"):
        write(Arrays(arrays() | {"x.weight": np.zeros(shape, np.float32)}))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["source", "bfloat16"])
def test_weights_that_are_no_numbers_are_refused(write, value, dtype):
    source = arrays()
    source["q.weight"][5, 3] = value
    with pytest.raises(CheckpointError, match=r"q\.weight has a number that is infinite or none"):
        write(Arrays(source), dtype)


def test_weights_too_large_for_the_dtype_are_refused(write, tmp_path):
    source = arrays()
    source["q.weight"][5, 3] = 70000
    with pytest.raises(CheckpointError, match=r"q\.weight does not fit into float16"):
        write(Arrays(source), "float16")


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.bool_])
def test_whole_numbers_are_no_weights(write, dtype):
    with pytest.raises(CheckpointError, match=r"n\.weight holds"):
        write(Arrays(arrays() | {"n.weight": np.ones(6, dtype)}))


def test_too_small_a_disk_is_found_before_anything_is_written(write, tmp_path):
    huge = np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (1 << 30, 1 << 20), (0, 0))
    rules = (rule("a", "x.weight", huge.shape, (None, None)),)
    with pytest.raises(CheckpointError, match=r"bytes free, converting needs 9007199\d+"):
        write(Arrays({"x.weight": huge}), rules=rules)
    assert not list((tmp_path / "scratch").iterdir())


MEASURE = """
import sys, threading, time
from pathlib import Path
import numpy as np
sys.path.insert(0, sys.argv[1])
from test_parameters import Arrays, rule, silent, write_parameters

def anonymous():
    return [int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("RssAnon")][0]

class Lazy(Arrays):
    def table(self):
        like = np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (2048, 2048), (0, 0))
        return {str(n): like for n in range(16)}
    def tensors(self):
        for n in range(16):
            yield str(n), np.random.default_rng(n).standard_normal((2048, 2048), np.float32)

rules = [rule(f"p{n}.kernel", str(n), (2048, 2048), (None, None), order=(1, 0)) for n in range(16)]
root = Path(sys.argv[2])
for name in ("warm", "content", "scratch"):
    (root / name).mkdir()
warm = rule("a", "x", (4,), (None,))  # once, so that what is measured holds no imports and thread pools
write_parameters(Arrays({"x": np.ones(4, np.float32)}), [warm], (), "float32", root / "warm", root / "warm", silent)
start = peak = anonymous()
done = False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.002)
watcher = threading.Thread(target=watch)
watcher.start()
write_parameters(Lazy({}), rules, (), "float32", root / "content", root / "scratch", silent)
done = True
watcher.join()
print(peak - start)
"""


def test_one_tensor_at_a_time_is_in_memory(tmp_path):
    command = [sys.executable, "-c", MEASURE, str(Path(__file__).parent), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    tensor = 2048 * 2048 * 4  # of 16, 256 MiB together
    assert int(done.stdout) < 2 * tensor + (32 << 20), f"peak {int(done.stdout) / 2**20:.0f} MiB"
