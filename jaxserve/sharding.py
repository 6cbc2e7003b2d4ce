"""From logical axes to a mesh of devices: the only place that writes partition specs."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Logical axes that are split, and the mesh axis that splits them; every other axis is whole on each device.
RULES = {"heads": "tensor", "kv_heads": "tensor", "ffn": "tensor", "vocab": "tensor", "experts": "expert"}


def make_mesh(expert: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of ``expert x tensor`` devices, the first ones there are."""
    devices = jax.devices() if devices is None else devices
    chosen = np.asarray(devices[: expert * tensor]).reshape(expert, tensor)
    return Mesh(chosen, ("expert", "tensor"))


def axis_size(name: str) -> int:
    """Devices along a mesh axis, of the mesh under which a program is being traced; 1 outside of any.

    Programs for a mesh are traced under ``jax.set_mesh(mesh)``.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else dict(mesh.shape).get(name, 1)


def sharding(mesh: Mesh, axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
    """Where an array with these logical axes lies; an axis that the mesh does not divide stays whole."""

    def mesh_axis(axis: str | None, size: int) -> str | None:
        name = RULES.get(axis or "")
        return name if name is not None and size % mesh.shape[name] == 0 else None

    return NamedSharding(mesh, PartitionSpec(*map(mesh_axis, axes, shape)))
