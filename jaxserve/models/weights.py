"""How the tensors of a Hugging Face checkpoint become the leaves of a parameter tree.

Knows names, shapes, axis order and logical axes; a family states each of its weights once, as a ``Rule``. Knows no
file format.

A leaf is what a module holds, so it may be made of several tensors: products of the same input are joined, the
experts of a layer are stacked. And files of the same family may hold it in different ways (one tensor an expert, or
all of them in one): a rule names each way, the file decides.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxserve.errors import CheckpointError
from jaxserve.sharding import sharding

Region = tuple[tuple[int, int], ...]
# Numbers that mean something only times the factor of their block. XLA:CPU knows no slice of them: it would convert all
# experts to float16 at each call to read a few, so they are bits wherever they lie.
NARROW = "float8_e4m3fn"


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A tensor, or some of its rows, and the part of a leaf that it fills.

    Attributes:
        source: name of the Hugging Face tensor, e.g. ``"model.layers.3.self_attn.q_proj.weight"``.
        shape: the tensor (or those rows) is reshaped to this.
        order: the axes are then transposed into this order; ``()`` leaves them.
        region: from and to, on the leading axes of the leaf; ``()`` is all of it. The part is reshaped to fit.
        rows: from and to, on the tensor's first axis; ``None`` is all of them.
        spread: each number of the tensor, a matrix, stands for so many rows and columns (the scale of a block), the
            last ones of which may not be there. It is repeated for each before anything else is done; the last axis
            of ``shape`` then counts columns, the others rows.
    """

    source: str
    shape: tuple[int, ...]
    order: tuple[int, ...] = ()
    region: Region = ()
    rows: tuple[int, int] | None = None
    spread: tuple[int, int] | None = None

    def part(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shape of what it takes of a tensor, before it is reshaped; ``None`` of a tensor that lacks it."""
        if self.spread is None and self.rows is None:
            return shape
        first, last = self.rows or (0, math.prod(self.shape[:-1]))
        if self.spread is None:
            return (last - first, *shape[1:]) if shape and last <= shape[0] else None
        needed = -(-last // self.spread[0]), -(-self.shape[-1] // self.spread[1])
        fits = len(shape) == 2 and shape[1] == needed[1] and (shape[0] >= needed[0] if self.rows else shape == needed)
        return (last - first, self.shape[-1]) if fits else None

    def cut(self, tensor: np.ndarray) -> np.ndarray:
        """The numbers of this piece, with its axes in the leaf's order.

        Raises:
            CheckpointError: the tensor has another number of elements than the configuration says.
        """
        part = tensor if self.rows is None else tensor[slice(*self.rows)]
        if self.spread is not None:
            (down, across), (first, last) = self.spread, self.rows or (0, math.prod(self.shape[:-1]))
            # Not more blocks than it takes are repeated: a piece may be one head of many.
            block = first // down
            part = tensor[block : -(-last // down)].repeat(down, 0)[first - block * down : last - block * down]
            part = part.repeat(across, 1)[:, : self.shape[-1]]
        if part.size != math.prod(self.shape):
            raise CheckpointError(
                f"tensor {self.source} has shape {tuple(tensor.shape)}, but the model's configuration needs "
                f"{math.prod(self.shape)} elements {self.shape}"
            )
        part = part.reshape(self.shape)
        return part.transpose(self.order) if self.order else part

    def place(self, tensor: np.ndarray, leaf: np.ndarray) -> None:
        """Fills its part of a leaf."""
        part = leaf[tuple(slice(*bounds) for bounds in self.region)]
        part[...] = self.cut(tensor).reshape(part.shape)


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """One leaf: what it is made of and what it becomes.

    Attributes:
        param: dotted path of the leaf, e.g. ``"layers.3.mixer.qkv.kernel"``.
        shape: of the leaf.
        axes: logical axis of each of its axes; ``sharding.py`` maps them to the mesh.
        ways: the ways in which files hold it, each a tuple of pieces that cover the leaf.
        dtype: where it does not follow the model's: ``"float32"`` for what must be exact, ``"uint8"`` for packed bits,
            ``"float8_e4m3fn"`` for numbers that need a factor, which are held as bits, too.
    """

    param: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    ways: tuple[tuple[Piece, ...], ...]
    dtype: str | None = None

    def also_named(self, *others: Callable[[str], str]) -> Rule:
        """The same leaf of files that may also name every tensor otherwise."""
        renamed = (
            tuple(dataclasses.replace(piece, source=other(piece.source)) for piece in way)
            for other in others
            for way in self.ways
        )
        return dataclasses.replace(self, ways=(*self.ways, *renamed))

    def translated(self, translate: Callable[[Piece], Piece]) -> Rule:
        """The same leaf of files that name or join every tensor otherwise."""
        return dataclasses.replace(self, ways=tuple(tuple(map(translate, way)) for way in self.ways))

    def pieces(self, names: Container[str]) -> tuple[Piece, ...]:
        """The way in which a file with these tensors holds it; the first one if it lacks something of each."""
        complete = (way for way in self.ways if all(piece.source in names for piece in way))
        return next(complete, self.ways[0])

    def held(self, dtype: DTypeLike) -> Any:
        """Its dtype in memory, where the model's is ``dtype``."""
        return np.dtype(np.uint8) if self.dtype == NARROW else self.dtype or dtype

    def make(self, tensors: Mapping[str, np.ndarray], dtype: DTypeLike) -> np.ndarray:
        """The leaf, of tensors that are in memory.

        Raises:
            CheckpointError: a tensor is missing or has another number of elements than the configuration says.
        """
        leaf = np.empty(self.shape, self.held(dtype))
        for piece in self.pieces(tensors):
            if piece.source not in tensors:
                raise CheckpointError(f"tensor {piece.source} is missing")
            piece.place(as_held(tensors[piece.source], leaf.dtype), leaf)
        return leaf


def as_held(tensor: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """A file's tensor as a leaf of this dtype takes it: narrow numbers as bits where the leaf holds bits."""
    return tensor.view(np.uint8) if tensor.dtype.name == NARROW and dtype == np.uint8 else tensor


def rule(
    param: str,
    source: str,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    *,
    order: tuple[int, ...] = (),
    dtype: str | None = None,
) -> Rule:
    """A leaf that is one tensor: reshaped to ``shape``, then transposed into ``order``."""
    leaf = tuple(shape[axis] for axis in order) if order else shape
    return Rule(param, leaf, axes, ((Piece(source, shape, order),),), dtype)


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Builds the nested tree of a mapping from dotted paths to leaves, as checkpoints hold it."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, name = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def params_of(tree: Mapping[str, Any]) -> dict[Any, Any]:
    """A checkpoint's tree as the module's parameters: a number in a path is an index."""
    return {
        int(name) if name.isdecimal() else name: params_of(node) if isinstance(node, Mapping) else node
        for name, node in tree.items()
    }


def abstract(rules: Iterable[Rule], dtype: DTypeLike, mesh: Mesh | None = None) -> dict[str, Any]:
    """A checkpoint's tree in shapes and dtypes, and where on a mesh each leaf lies, with no value in memory."""

    def leaf(rule: Rule) -> jax.ShapeDtypeStruct:
        place = None if mesh is None else sharding(mesh, rule.axes, rule.shape)
        return jax.ShapeDtypeStruct(rule.shape, rule.held(dtype), sharding=place)

    return nest({rule.param: leaf(rule) for rule in rules})
