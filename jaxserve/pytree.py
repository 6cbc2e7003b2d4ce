"""A frozen dataclass that JAX sees as a pytree.

It knows dataclasses and ``jax.tree_util``; nothing about models or decoding.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax

T = TypeVar("T")


def static(*, default: Any = dataclasses.MISSING) -> Any:
    """A field that is no child but part of the structure: hashable, and another value compiles another program."""
    return dataclasses.field(default=default, metadata={"static": True})


@dataclass_transform(frozen_default=True, field_specifiers=(static, dataclasses.field))
def pytree(cls: type[T]) -> type[T]:
    """Makes ``cls`` a frozen dataclass whose fields are the children of a pytree node.

    JAX rebuilds nodes with things that are no arrays (``None``, shapes, shardings) as their leaves, so the node is
    rebuilt without ``__init__``: a run-time type checker that watches ``__init__`` never sees those.
    """
    data = dataclasses.dataclass(frozen=True)(cls)
    fields = dataclasses.fields(data)  # type: ignore[arg-type]
    names = tuple(field.name for field in fields if not field.metadata.get("static"))
    fixed = tuple(field.name for field in fields if field.metadata.get("static"))

    def structure(node: T) -> tuple[Any, ...]:
        return tuple(getattr(node, name) for name in fixed)

    def flatten_with_keys(node: T) -> tuple[list[tuple[jax.tree_util.GetAttrKey, object]], tuple[Any, ...]]:
        return [(jax.tree_util.GetAttrKey(name), getattr(node, name)) for name in names], structure(node)

    def flatten(node: T) -> tuple[list[object], tuple[Any, ...]]:
        return [getattr(node, name) for name in names], structure(node)

    def unflatten(kept: tuple[Any, ...], children: object) -> T:
        node = object.__new__(data)
        for name, child in zip(names, children, strict=True):  # type: ignore[call-overload]
            object.__setattr__(node, name, child)
        for name, value in zip(fixed, kept, strict=True):
            object.__setattr__(node, name, value)
        return node

    jax.tree_util.register_pytree_with_keys(data, flatten_with_keys, unflatten, flatten)
    return data
