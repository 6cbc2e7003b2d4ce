"""A frozen dataclass that JAX sees as a pytree.

It knows dataclasses and ``jax.tree_util``; nothing about models or decoding.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar, dataclass_transform

import jax

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def pytree(cls: type[T]) -> type[T]:
    """Makes ``cls`` a frozen dataclass whose fields are the children of a pytree node.

    JAX rebuilds nodes with things that are no arrays (``None``, shapes, shardings) as their leaves, so the node is
    rebuilt without ``__init__``: a run-time type checker that watches ``__init__`` never sees those.
    """
    data = dataclasses.dataclass(frozen=True)(cls)
    names = tuple(field.name for field in dataclasses.fields(data))  # type: ignore[arg-type]

    def flatten_with_keys(node: T) -> tuple[list[tuple[jax.tree_util.GetAttrKey, object]], None]:
        return [(jax.tree_util.GetAttrKey(name), getattr(node, name)) for name in names], None

    def flatten(node: T) -> tuple[list[object], None]:
        return [getattr(node, name) for name in names], None

    def unflatten(_: None, children: object) -> T:
        node = object.__new__(data)
        for name, child in zip(names, children, strict=True):  # type: ignore[call-overload]
            object.__setattr__(node, name, child)
        return node

    jax.tree_util.register_pytree_with_keys(data, flatten_with_keys, unflatten, flatten)
    return data
