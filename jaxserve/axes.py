"""Which mesh axes split which logical axes, as arithmetic: what ``plan`` counts and ``sharding`` lays out.

Knows names and sizes only, no device and no JAX.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

Choice = tuple[str, ...]

# Both mesh axes where they divide the size, so that each device holds its share of nearly everything; else one of them.
# The tensor axis is the outer one: the query heads of a key head then lie where the key head lies, even where there are
# fewer key heads than devices.
ALL: tuple[Choice, ...] = (("tensor", "expert"), ("tensor",), ("expert",))
SPLITS: dict[str, tuple[Choice, ...]] = {
    "experts": (("expert",),),
    "heads": ALL,
    "kv_heads": ALL,
    "ffn": ALL,
    "vocab": ALL,
    "tokens": (("expert",),),  # where each is sent to the devices of its experts
}
# Inside an expert the feed-forward axis belongs to the tensor axis alone, whatever the experts themselves do: the
# routed product relies on it.
IN_EXPERTS: dict[str, tuple[Choice, ...]] = {"experts": (("expert",),), "ffn": (("tensor",),)}
# Splits what an axis above leaves over (2 key heads on 8 devices). A weight without any of them stays whole: norms,
# routers, biases of the residual stream.
REST = "model"


@dataclasses.dataclass(frozen=True, slots=True)
class MeshShape:
    """Devices along each mesh axis."""

    expert: int = 1
    tensor: int = 1

    @property
    def devices(self) -> int:
        """All of them."""
        return self.expert * self.tensor

    def size(self, choice: Choice) -> int:
        """Devices along some axes."""
        return math.prod({"expert": self.expert, "tensor": self.tensor}[name] for name in choice)

    def __str__(self) -> str:
        return f"{self.expert}x{self.tensor}"


ONE_DEVICE = MeshShape()


def split(axes: Sequence[str | None], shape: Sequence[int], mesh: MeshShape) -> tuple[Choice, ...]:
    """For each axis of an array the mesh axes that split it; ``()`` where it stays whole on each device.

    Every mesh axis splits one axis at most, and only one whose size it divides. Mesh axes of one device are left out.
    """
    found: list[Choice] = [()] * len(axes)
    free = [name for name in ("tensor", "expert") if mesh.size((name,)) > 1]
    choices = IN_EXPERTS if "experts" in axes else SPLITS
    first = [at for at, axis in enumerate(axes) if axis in choices]
    rest = [at for at, axis in enumerate(axes) if axis == REST] if first and "experts" not in axes else []
    for at in first + rest:
        options = (tuple(name for name in choice if name in free) for choice in choices.get(axes[at] or "", ALL))
        fitting = (option for option in options if shape[at] % mesh.size(option) == 0)
        found[at] = max(fitting, key=mesh.size, default=())
        free = [name for name in free if name not in found[at]]
    return tuple(found)


def parts(axes: Sequence[str | None], shape: Sequence[int], mesh: MeshShape) -> int:
    """Into how many parts an array falls; each device holds one of them."""
    return math.prod(map(mesh.size, split(axes, shape, mesh)))
