"""How the tensors of a Hugging Face checkpoint become the leaves of a parameter tree.

Knows names, shapes, axis order and logical axes; a family states each of its weights once, as a ``Rule``. Knows no
file format and no values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxserve.errors import CheckpointError


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """One weight: where it comes from and what it becomes.

    Attributes:
        param: dotted path of the leaf, e.g. ``"layers.3.attention.q.kernel"``.
        source: name of the Hugging Face tensor, e.g. ``"model.layers.3.self_attn.q_proj.weight"``.
        shape: the source tensor is reshaped to this first.
        order: the reshaped tensor's axes are then transposed into this order.
        axes: logical axis of each axis of the *leaf*; ``sharding.py`` maps them to the mesh.
    """

    param: str
    source: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    axes: tuple[str | None, ...]

    @property
    def leaf_shape(self) -> tuple[int, ...]:
        """Shape of the leaf that this rule fills."""
        return tuple(self.shape[axis] for axis in self.order)

    def apply(self, tensor: np.ndarray) -> np.ndarray:
        """Reshapes and transposes a source tensor into its leaf.

        Raises:
            CheckpointError: the tensor has another number of elements than the configuration says.
        """
        if tensor.size != math.prod(self.shape):
            raise CheckpointError(
                f"tensor {self.source} has shape {tuple(tensor.shape)}, but the model's configuration needs "
                f"{math.prod(self.shape)} elements {self.shape}"
            )
        return tensor.reshape(self.shape).transpose(self.order)


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Builds the nested tree of a mapping from dotted paths to leaves."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, name = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def abstract(rules: Iterable[Rule], dtype: DTypeLike) -> dict[str, Any]:
    """The parameter tree's shapes and dtype, with no value in memory."""
    return nest({rule.param: jax.ShapeDtypeStruct(rule.leaf_shape, dtype) for rule in rules})
