"""Every static shape and every byte, decided before a weight is read. Knows no JAX.

``shapes`` says what a model takes, ``programs`` what is compiled, ``memory`` what lies on a device, ``planning`` puts
them together, ``fitting`` refuses what does not fit and names what would, ``hardware`` knows machines by name,
``exchange`` says when tokens travel to their experts.
"""

from jaxserve.plan.fitting import best_mesh, check, fits_where, make_plan
from jaxserve.plan.hardware import Hardware, hardware
from jaxserve.plan.planning import MIN_ROWS, MODEL_STOP_TOKENS, STEPS_PER_DISPATCH, Plan, draft_plan
from jaxserve.plan.programs import Chunk, PoolPlan, Program
from jaxserve.plan.shapes import DTYPE_BYTES, CacheShape, ModelShape, WeightShape

__all__ = [
    "DTYPE_BYTES",
    "MIN_ROWS",
    "MODEL_STOP_TOKENS",
    "STEPS_PER_DISPATCH",
    "CacheShape",
    "Chunk",
    "Hardware",
    "ModelShape",
    "Plan",
    "PoolPlan",
    "Program",
    "WeightShape",
    "best_mesh",
    "check",
    "draft_plan",
    "fits_where",
    "hardware",
    "make_plan",
]
