"""What a plan needs to know of a model: its weights, what its layers keep, how wide it is; and what each takes.

Bytes are those of one device of a mesh; a mesh of one device holds all of it.
"""

from __future__ import annotations

import dataclasses
import math

from jaxserve.axes import ONE_DEVICE, MeshShape, parts

FLOAT32 = 4
INT32 = 4
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "int8": 1, "float8_e4m3fn": 1}


@dataclasses.dataclass(frozen=True, slots=True)
class WeightShape:
    """One weight; ``dtype`` is ``None`` where it follows the model's."""

    param: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: str | None = None

    @property
    def numbers(self) -> int:
        """How many there are in it."""
        return math.prod(self.shape)

    @property
    def parameters(self) -> int:
        """How many numbers of the model it stands for: a packed byte holds two, and factors of blocks are none."""
        return 0 if self.param.endswith(".scales") else self.numbers * (2 if self.dtype == "uint8" else 1)

    def parts(self, mesh: MeshShape) -> int:
        """Into how many parts a mesh splits it."""
        return parts(self.axes, self.shape, mesh)

    def bytes(self, dtype_bytes: int, mesh: MeshShape = ONE_DEVICE) -> int:
        """What a device holds of it, where the model's numbers have so many bytes."""
        own = dtype_bytes if self.dtype is None else DTYPE_BYTES[self.dtype]
        return self.numbers * own // self.parts(mesh)


@dataclasses.dataclass(frozen=True, slots=True)
class CacheShape:
    """What one layer keeps of one slot.

    Attributes:
        per_position: numbers of one position.
        most: positions that are kept at most; ``None`` keeps all.
        fixed: numbers that stand for all positions.
        fixed_float32: further ones, in float32 whatever the model's dtype.
        heads: key heads among which all of it divides.
        added: numbers that a new token has until they are kept, where they are more than those of its position.
    """

    per_position: int = 0
    most: int | None = None
    fixed: int = 0
    fixed_float32: int = 0
    heads: int = 1
    added: int = 0

    def bytes(self, positions: int, dtype_bytes: int, mesh: MeshShape = ONE_DEVICE) -> int:
        """What a device holds for a slot of so many positions."""
        kept = positions if self.most is None else min(self.most, positions)
        whole = (self.per_position * kept + self.fixed) * dtype_bytes + self.fixed_float32 * FLOAT32
        return whole // parts(("kv_heads",), (self.heads,), mesh)


@dataclasses.dataclass(frozen=True, slots=True)
class ModelShape:
    """What the plan needs to know of a model.

    Attributes:
        weights: all of them.
        cache: what each layer keeps.
        max_positions: longest sequence that the model was made for.
        widest: largest of the sizes that one token's activations take (ffn, heads x head size, width).
        heads: query heads.
        key_block: cached positions that attention reads at a time.
        width: numbers of a token between layers; matters where there are experts.
        chosen: experts that a token takes; 0 where there are none.
        block: positions that see each other and are decoded together; ``None`` where each sees those before it and is
            decoded alone.
        beyond: positions that passes read behind the last of a text: what a canvas has too many.
    """

    vocab_size: int
    weights: tuple[WeightShape, ...]
    cache: tuple[CacheShape, ...]
    max_positions: int
    widest: int
    heads: int
    key_block: int
    width: int = 0
    chosen: int = 0
    block: int | None = None
    beyond: int = 0

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(weight.parameters for weight in self.weights)

    def kind(self, weight: WeightShape) -> str:
        """What a weight is for, in a word or two: by its place in the tree and its axes."""
        path = weight.param.split(".")
        if "experts" in weight.axes:
            return "experts"
        if any("norm" in name for name in path):
            return "norms"
        for name, kind in (("router", "routers"), ("shared", "shared experts"), ("shared_gate", "shared experts")):
            if name in path:
                return kind
        if path[0] != "layers":
            return path[0]
        recurrent = self.cache[int(path[1])].fixed_float32 > 0
        return {"mixer": "recurrent" if recurrent else "attention", "ffn": "feed-forward"}.get(path[2], "rest")
