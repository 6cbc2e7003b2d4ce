"""From logical axes to a mesh of devices: the only place that writes partition specs. ``axes`` says what is split."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.axes import MeshShape, split


def make_mesh(expert: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of ``expert x tensor`` devices, the first ones there are."""
    devices = jax.devices() if devices is None else devices
    chosen = np.asarray(devices[: expert * tensor]).reshape(expert, tensor)
    return Mesh(chosen, ("expert", "tensor"))


def under(mesh: Mesh | None) -> contextlib.AbstractContextManager[object]:
    """Inside of it programs are traced for this mesh; ``None`` is one device, for which nothing needs to be said."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def axis_size(name: str) -> int:
    """Devices along a mesh axis, of the mesh under which a program is being traced; 1 outside of any.

    Programs for a mesh are traced under it, see ``under``.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else dict(mesh.shape).get(name, 1)


def spec(axes: Sequence[str | None], shape: Sequence[int], mesh: MeshShape | None = None) -> PartitionSpec:
    """How an array with these logical axes is split, by default over the mesh under which a program is being traced.

    An axis that the mesh does not divide stays whole.
    """
    mesh = MeshShape(axis_size("expert"), axis_size("tensor")) if mesh is None else mesh
    names = (choice[0] if len(choice) == 1 else choice or None for choice in split(axes, shape, mesh))
    return PartitionSpec(*names)


def sharding(mesh: Mesh, axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
    """Where an array with these logical axes lies."""
    return NamedSharding(mesh, spec(axes, shape, MeshShape(**mesh.shape)))


def fed(x: jax.Array, axes: Sequence[str | None], shape: Sequence[int]) -> jax.Array:
    """An input of a map whose kernel has these logical axes, inputs last: split as those are.

    Parts of the input then meet parts of the kernel where they lie, and sums travel instead of the kernel.
    """
    if axis_size("expert") * axis_size("tensor") == 1:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*[None] * (x.ndim - 1), spec(axes, shape)[-1]))


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on each device."""
    return NamedSharding(mesh, PartitionSpec())


def held(x: jax.Array, axes: Sequence[str | None], shape: Sequence[int] | None = None) -> jax.Array:
    """The same array, of which a program that is traced for a mesh may move no part: see ``spec``."""
    if axis_size("expert") * axis_size("tensor") == 1:
        return x
    return jax.lax.with_sharding_constraint(x, spec(axes, x.shape if shape is None else shape))
