"""Arrays come back as they were converted, in any dtype and sharding asked for; any other tree is refused."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.checkpoint import manifest
from jaxserve.checkpoint import restore as restore_module
from jaxserve.checkpoint.convert import convert
from jaxserve.checkpoint.restore import restore
from jaxserve.checkpoint.store import Store
from jaxserve.errors import CheckpointError
from jaxserve.models.family import family_of
from jaxserve.models.weights import abstract, nest


def rules_of(folder: Path) -> Any:
    return family_of(json.loads((folder / "config.json").read_text())).rules


def leaf(tree: Any, path: str) -> Any:
    for name in path.split("."):
        tree = tree[name]
    return tree


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_values_are_those_of_the_source(published, tiny, dtype):
    manifest.verify(published.folder)
    rules = rules_of(published.folder)
    seen: list[tuple[str, int, int]] = []
    params = restore(published.folder, abstract(rules, dtype), lambda *report: seen.append(report))
    for rule in rules:
        array = leaf(params, rule.param)
        assert isinstance(array, jax.Array)
        assert array.dtype == dtype
        np.testing.assert_array_equal(array, rule.make(tiny.weights, np.float32).astype(dtype), err_msg=rule.param)
    total = sum(array.nbytes for array in jax.tree.leaves(params))
    assert seen == [("restore", 0, total), ("restore", total, total)]


def test_another_tree_is_refused(published):
    rules = rules_of(published.folder)
    with pytest.raises(CheckpointError, match=r"has the parameter norm\.scale"):
        restore(published.folder, abstract([rule for rule in rules if rule.param != "norm.scale"], jnp.float32))
    more = {rule.param: jax.ShapeDtypeStruct(rule.shape, jnp.float32) for rule in rules}
    with pytest.raises(CheckpointError, match=r"lacks the parameter norm\.bias"):
        restore(published.folder, nest(more | {"norm.bias": more["norm.scale"]}))


def test_another_shape_or_kind_of_number_is_refused(published):
    leaves = {rule.param: jax.ShapeDtypeStruct(rule.shape, jnp.float32) for rule in rules_of(published.folder)}
    with pytest.raises(CheckpointError, match=r"embedding has shape \(320, 64\), wanted is \(64, 320\)"):
        restore(published.folder, nest(leaves | {"embedding": jax.ShapeDtypeStruct((64, 320), jnp.float32)}))
    with pytest.raises(CheckpointError, match="embedding is float32, which does not become int8"):
        restore(published.folder, nest(leaves | {"embedding": jax.ShapeDtypeStruct((320, 64), jnp.int8)}))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:coroutine:RuntimeWarning")
def test_a_read_that_fails_is_one_sentence(version):
    (chunk,) = (version / "params" / "state" / "norm.scale" / "c").iterdir()
    chunk.unlink()
    with pytest.raises(CheckpointError, match="cannot be restored"):
        restore(version, abstract(rules_of(version), jnp.float32))
    gc.collect()  # Orbax leaves coroutines behind that nobody awaits; here, not in another test, they are let go


def test_why_the_manifest_is_needed_a_flipped_bit_is_restored(version, tiny):
    (chunk,) = (version / "params" / "state" / "norm.scale" / "c").iterdir()
    data = bytearray(chunk.read_bytes())
    data[2] ^= 64
    chunk.chmod(0o644)
    chunk.write_bytes(data)
    params = restore(version, abstract(rules_of(version), jnp.float32))
    assert np.sum(np.asarray(leaf(params, "norm.scale")) != tiny.weights["model.norm.weight"]) == 1
    with pytest.raises(CheckpointError, match=r"norm\.scale/c/0 is damaged"):
        manifest.verify(version)


SHARDED = """
import json, sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxserve.checkpoint.restore import restore
from jaxserve.models.family import family_of
from jaxserve.models.weights import nest

folder = Path(sys.argv[1])
mesh = jax.make_mesh((2, 4), ("x", "y"))
specs = {"embedding": ("y", "x"), "layers.0.ffn.down.kernel": ("x", "y"), "layers.1.mixer.o.kernel": ("y",)}
rules = family_of(json.loads((folder / "config.json").read_text())).rules
leaves = {
    rule.param: jax.ShapeDtypeStruct(
        rule.shape, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*specs.get(rule.param, ())))
    )
    for rule in rules
}
sharded = restore(folder, nest(leaves))
single = restore(folder, nest({name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in leaves.items()}))
jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), sharded, single)
jax.tree.map(lambda a, leaf: None if a.sharding == leaf.sharding else sys.exit(str(a.sharding)), sharded, nest(leaves))
print(len(jax.devices()), sharded["embedding"].addressable_shards[0].data.shape)
"""


def test_straight_into_the_shards_of_eight_devices(published, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    command = [sys.executable, "-c", SHARDED, str(published.folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "8 (80, 32)"


def test_numbers_may_become_wider(uncaged, tmp_path, forms, monkeypatch):
    """As goldens of a bfloat16 checkpoint do: more is read of a parameter than there is of it."""
    narrow = convert(forms["folder"], Store(tmp_path / "store"), "tiny", dtype="bfloat16")
    monkeypatch.setattr(restore_module, "_SPARE_BYTES", 1)
    params = restore(narrow.folder, abstract(rules_of(narrow.folder), jnp.float32))
    assert leaf(params, "embedding").dtype == jnp.float32
