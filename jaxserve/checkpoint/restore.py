"""From a verified checkpoint into arrays: each straight into the sharding and the dtype that it is asked for in.

It knows the manifest's tree and Orbax. It does not verify bytes: call :func:`jaxserve.checkpoint.manifest.verify`
first, since Orbax would restore a flipped bit and follow a link without a word.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from jaxserve.checkpoint import Progress, manifest, silent
from jaxserve.checkpoint.allocator import returned_at_once
from jaxserve.checkpoint.parameters import FOLDER
from jaxserve.errors import CheckpointError

_SPARE_BYTES: Final = 1 << 20  # Orbax refuses to read as much as it may


def restore(folder: Path, abstract: Mapping[str, Any], progress: Progress = silent) -> dict[str, Any]:
    """Loads the parameters of a version.

    Args:
        folder: the version's folder, already verified.
        abstract: nested dicts of ``jax.ShapeDtypeStruct`` with the tree of the manifest. A leaf's sharding is where its
            array goes, each device reading its part only; without one it goes to the first device. Its dtype is what
            it is cast to.
        progress: told "restore".

    Returns:
        The same tree of ``jax.Array``.

    Raises:
        CheckpointError: the tree, a shape or the kind of a dtype is not that of the checkpoint, or a read failed.
    """
    wanted = dict(_leaves(abstract, ""))
    _check_tree(folder, wanted)
    total = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in wanted.values())
    progress("restore", 0, total)
    try:
        context = ocp.Context()
        context.memory.read_concurrent_bytes = _largest(folder, wanted) + _SPARE_BYTES
        with context, returned_at_once():
            params: dict[str, Any] = ocp.load(folder / FOLDER, _placed(abstract))
            jax.block_until_ready(params)
    except Exception as error:  # not less: Orbax raises Exception itself where a file cannot be read
        reason = str(error).partition("\n")[0][:300]
        raise CheckpointError(f"{folder / FOLDER} cannot be restored: {type(error).__name__}: {reason}") from error
    _check_result(folder, wanted, dict(_leaves(params, "")))
    progress("restore", total, total)
    return params


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, child in tree.items():
        if isinstance(child, Mapping):
            yield from _leaves(child, f"{prefix}{name}.")
        else:
            yield prefix + name, child


def _largest(folder: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> int:
    """Bytes of the largest parameter, stored or cast: so much may be read before it is where it belongs.

    Orbax counts what is read in the dtype that it is asked for, and refuses a parameter that is larger.
    """
    stored = {leaf.path: np.dtype(leaf.dtype).itemsize for leaf in manifest.read(folder).tree}
    return max((leaf.size * max(leaf.dtype.itemsize, stored[path]) for path, leaf in wanted.items()), default=0)


def _placed(abstract: Mapping[str, Any]) -> Any:
    first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or first), dict(abstract)
    )


def _check_tree(folder: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    stored = {leaf.path: leaf for leaf in manifest.read(folder).tree}
    for path in sorted(stored.keys() ^ wanted.keys()):
        side = "lacks" if path in wanted else "has"
        raise CheckpointError(
            f"{folder} {side} the parameter {path}, contrary to this version of jaxserve: pull or convert it again."
        )
    for path, leaf in wanted.items():
        if stored[path].shape != tuple(leaf.shape):
            raise CheckpointError(f"{folder}: {path} has shape {stored[path].shape}, wanted is {tuple(leaf.shape)}.")
        own = np.dtype(stored[path].dtype)
        floats = jnp.issubdtype(own, jnp.floating) and jnp.issubdtype(leaf.dtype, jnp.floating)
        if own != leaf.dtype and not floats:
            raise CheckpointError(f"{folder}: {path} is {own.name}, which does not become {leaf.dtype.name}.")


def _check_result(folder: Path, wanted: Mapping[str, jax.ShapeDtypeStruct], found: Mapping[str, Any]) -> None:
    for path, leaf in wanted.items():
        array = found.get(path)
        same = isinstance(array, jax.Array) and array.shape == leaf.shape and array.dtype == leaf.dtype
        if not same:
            raise CheckpointError(f"{folder / FOLDER} holds something else than its manifest says for {path}.")
