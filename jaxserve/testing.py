"""A toy to test with, shipped so that others can test their families: a tiny random model and an engine around it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxserve.config import EngineConfig, Pool
from jaxserve.decode.autoregressive import Autoregressive
from jaxserve.engine.engine import Engine
from jaxserve.engine.metrics import Metrics
from jaxserve.engine.programs import Programs
from jaxserve.engine.scheduler import Policy
from jaxserve.models.family import Family, family_of
from jaxserve.models.weights import nest
from jaxserve.plan import Plan, make_plan

TINY: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 259,  # 256 bytes and three control tokens
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
}
TINY_EOS = 257


def random_leaves(family: Family, seed: int = 0, dtype: DTypeLike = jnp.float32) -> dict[str, jax.Array]:
    """A checkpoint's leaves by path, with enough spread that the next token depends on everything before it."""
    key = jax.random.key(seed)
    leaves = {}
    for index, rule in enumerate(family.rules):
        draw = jax.random.normal(jax.random.fold_in(key, index), rule.leaf_shape, jnp.float32)
        scale = 1 + 0.1 * draw if rule.param.endswith("scale") else 0.25 * draw
        leaves[rule.param] = scale.astype(dtype)
    return leaves


def random_params(family: Family, seed: int = 0, dtype: DTypeLike = jnp.float32) -> dict[Any, Any]:
    """The same as the module's parameters."""
    return family.arrange(nest(random_leaves(family, seed, dtype)))


def tiny_plan(family: Family, pools: tuple[Pool, ...] = (Pool(4, 128),), **settings: Any) -> Plan:
    """A plan for a tiny model in float32."""
    config = EngineConfig(pools=pools, **settings)
    return make_plan(family.shape, config, dtype="float32", dtype_bytes=4, memory_limit=2**32)


def tiny_engine(
    pools: tuple[Pool, ...] = (Pool(4, 128),),
    *,
    hf: dict[str, Any] | None = None,
    seed: int = 0,
    eos: tuple[int, ...] = (TINY_EOS,),
    policy: Policy | None = None,
    metrics: Metrics | None = None,
    **settings: Any,
) -> Engine:
    """A compiled engine around a tiny random model."""
    family = family_of(hf or TINY)
    plan = tiny_plan(family, pools, **settings)
    params = random_params(family, seed)
    graphdef: nnx.GraphDef[Any] = family.graphdef(jnp.float32)
    programs = Programs(plan, family, graphdef, params, Autoregressive(plan.max_logprobs))
    slots = sum(pool.slots for pool in plan.pools)
    engine = Engine(programs, policy or Policy(slots, 256, 60.0, 600.0, 0.0), eos=eos, metrics=metrics)
    engine.warm_up()
    return engine
