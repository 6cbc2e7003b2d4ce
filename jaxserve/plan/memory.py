"""Every byte of one device: weights by kind, cache, state, workspace. Arithmetic on shapes; knows no settings."""

from __future__ import annotations

from collections.abc import Iterable

from jaxserve.axes import MeshShape
from jaxserve.plan.programs import PoolPlan
from jaxserve.plan.shapes import FLOAT32, INT32, ModelShape


def weights_by_kind(model: ModelShape, dtype_bytes: int, mesh: MeshShape) -> dict[str, int]:
    """What a device holds of the weights of each kind, the largest first."""
    found: dict[str, int] = {}
    for weight in model.weights:
        kind = model.kind(weight)
        found[kind] = found.get(kind, 0) + weight.bytes(dtype_bytes, mesh)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def unsplit_by_kind(model: ModelShape, dtype_bytes: int, mesh: MeshShape) -> dict[str, int]:
    """The part of that which would be on other devices if everything were split evenly: what is held again and again.

    Empty for a mesh of one device, and where every weight falls into as many parts as there are devices.
    """
    found: dict[str, int] = {}
    for weight in model.weights:
        extra = weight.bytes(dtype_bytes, mesh) - weight.bytes(dtype_bytes) // mesh.devices
        if weight.parts(mesh) < mesh.devices:
            found[model.kind(weight)] = found.get(model.kind(weight), 0) + extra
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def cache_bytes(model: ModelShape, pool: PoolPlan, dtype_bytes: int, mesh: MeshShape) -> int:
    """What the layers keep of a pool's slots."""
    return pool.rows * sum(layer.bytes(pool.positions, dtype_bytes, mesh) for layer in model.cache)


def state_bytes(pool: PoolPlan, widths: int, log: int) -> int:
    """Token history, sampling rows of ``widths`` numbers and ``log`` numbers of a dispatch; whole on each device."""
    return pool.rows * (pool.positions + widths + log) * INT32


def workspace_bytes(model: ModelShape, pools: Iterable[PoolPlan], width: int = 1) -> int:
    """An upper estimate of what the hungriest program needs beside its arguments.

    One layer's activations and attention scores of a pass, in float32 and twice over, and what its tokens add to all
    layers' caches, which is written at its end; for a run, which reads ``width`` tokens in each row, also a few copies
    of their logits. A mesh is not counted on: it splits some of it. The compiler's own figure is known only after
    compilation.
    """

    def activations(rows: int, tokens: int, positions: int) -> int:
        scores = model.heads * max(tokens, min(model.key_block, positions))
        added = sum(max(layer.added, layer.per_position) for layer in model.cache)
        return rows * tokens * (2 * (4 * model.widest + 2 * scores) + added) * FLOAT32

    needs = [0]
    for pool in pools:
        needs += [activations(1, bucket, pool.positions) for bucket in pool.buckets]
        logits = 6 * pool.rows * width * model.vocab_size * FLOAT32
        needs.append(activations(pool.rows, width, pool.positions) + logits)
    return max(needs)
