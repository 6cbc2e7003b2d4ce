"""Shapes to plan with."""

from __future__ import annotations

from jaxserve.axes import ONE_DEVICE, MeshShape
from jaxserve.config import EngineConfig, Pool
from jaxserve.plan import CacheShape, ModelShape, Plan, WeightShape, make_plan

SHAPE = ModelShape(
    1000, (WeightShape("all", (1000, 1000), (None, None)),), (CacheShape(per_position=64),), 1 << 20, 64, 4, 128
)
MIXED = ModelShape(
    vocab_size=1000,
    weights=(
        WeightShape("embedding", (1000, 64), ("vocab", "model")),
        WeightShape("norm.scale", (64,), (None,)),
        WeightShape("head", (1000, 64), ("vocab", "model")),
        WeightShape("side.table", (1000, 8), (None, None)),
        WeightShape("layers.0.mixer_norm.scale", (64,), (None,)),
        WeightShape("layers.0.mixer.qkv.kernel", (2, 4, 16, 64), ("kv_heads", None, None, "model")),
        WeightShape("layers.0.mixer.q_norm.scale", (16,), (None,)),
        WeightShape("layers.0.ffn.gate_up.kernel", (2, 128, 64), (None, "ffn", "model")),
        WeightShape("layers.1.mixer.in.kernel", (4, 8, 64), ("kv_heads", None, "model")),
        WeightShape("layers.1.mixer.decay", (4,), ("kv_heads",), "float32"),
        WeightShape("layers.1.ffn.gate_up", (8, 2, 32, 64), ("experts", None, "ffn", "model")),
        WeightShape("layers.1.ffn.down", (8, 64, 32), ("experts", "model", "ffn")),
        WeightShape("layers.1.ffn.router.kernel", (8, 64), (None, "model"), "float32"),
        WeightShape("layers.1.ffn.shared.down.kernel", (64, 32), ("model", "ffn")),
        WeightShape("layers.1.ffn.shared_gate.kernel", (1, 64), (None, "model")),
    ),
    cache=(CacheShape(per_position=64, heads=2), CacheShape(fixed=96, fixed_float32=512, heads=4)),
    max_positions=1 << 20,
    widest=256,
    heads=4,
    key_block=128,
)


def planned(
    *pools: Pool,
    shape: ModelShape = SHAPE,
    memory: int = 2**34,
    mesh: MeshShape = ONE_DEVICE,
    devices: int = 1,
    **settings,
) -> Plan:
    """A plan in bfloat16; ``settings`` are those of the section ``engine``."""
    config = EngineConfig(pools=pools or (Pool(2, 2048),), **settings)
    return make_plan(shape, config, dtype="bfloat16", dtype_bytes=2, memory_limit=memory, mesh=mesh, devices=devices)
