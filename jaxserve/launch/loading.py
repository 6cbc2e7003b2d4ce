"""From a folder to a model that has passed its self-test: verify, restore, plan, compile, test.

Knows the order of the steps and reports each. The server listens meanwhile and tells its probes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxserve.checkpoint import Progress, manifest
from jaxserve.checkpoint.manifest import Manifest
from jaxserve.checkpoint.restore import restore
from jaxserve.checkpoint.side_files import GENERATION_CONFIG
from jaxserve.config import Config
from jaxserve.decode.step import Strategy
from jaxserve.decode.strategies import planned_strategy
from jaxserve.engine.engine import Engine
from jaxserve.engine.jax_device import JaxDevice
from jaxserve.engine.programs import Programs
from jaxserve.engine.request import SamplingParams
from jaxserve.engine.scheduler import Policy
from jaxserve.errors import ConfigError
from jaxserve.launch.device import configure_jax, this_machine
from jaxserve.launch.golden import self_test
from jaxserve.launch.planning import mesh_of, plan_for, read_config, routing_of, version_folder
from jaxserve.models.family import Family, family_of
from jaxserve.models.weights import abstract, params_of
from jaxserve.plan import Plan
from jaxserve.sharding import make_mesh
from jaxserve.text.chat import ChatTemplate
from jaxserve.text.folder import read_json
from jaxserve.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model ready to be asked.

    Attributes:
        id: the name it is served under.
        folder: its version's folder.
        family, graphdef, params: what the jitted functions of ``decode.jitted`` take.
        strategy: how it is decoded.
        mesh: the devices that share the model, under which such a function is called; ``None`` is one device.
        eos: tokens that end an answer.
        defaults: sampling parameters of a request that names none, from ``generation_config.json``.
    """

    id: str
    folder: Path
    manifest: Manifest
    family: Family
    graphdef: nnx.GraphDef[Any]
    params: dict[Any, Any]
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    plan: Plan
    strategy: Strategy
    engine: Engine
    eos: tuple[int, ...]
    defaults: SamplingParams
    mesh: Mesh | None = None


def load_model(config: Config, progress: Progress) -> LoadedModel:
    """Brings the configured model to readiness.

    Args:
        progress: told "verifying" and "loading" in bytes, "compiling" in programs, "selftest" in prompts.

    Raises:
        CheckpointError: a damaged or unsupported checkpoint. SelfTestFailed: it computes something else than it did.
        PlanError: it does not fit.
    """
    configure_jax(config.engine)
    folder = version_folder(config)
    stored = manifest.verify(folder, lambda _, done, total: progress("verifying", done, total))
    hf = read_config(folder)
    family = family_of(hf)
    planned = plan_for(config, family, this_machine())
    mesh = mesh_of(planned)
    restoring: Progress = lambda _, done, total: progress("loading", done, total)  # noqa: E731
    params = restore_params(folder, family, planned.dtype, mesh, restoring)
    tokenizer = Tokenizer.load(folder / "tokenizer")
    generation = read_json(folder / GENERATION_CONFIG)
    eos = end_tokens(tokenizer.eos_ids, generation, hf)
    graphdef = family.graphdef(jnp.dtype(planned.dtype), routing_of(planned))
    strategy = planned_strategy(planned, family, generation)
    programs = Programs(planned, family, graphdef, params, strategy, mesh)
    engine = Engine(JaxDevice(programs), _policy(config, planned), eos=eos)
    engine.warm_up(progress)
    self_test(engine, folder, progress)
    return LoadedModel(
        id=config.model.id,
        folder=folder,
        manifest=stored,
        family=family,
        graphdef=graphdef,
        params=params,
        tokenizer=tokenizer,
        chat_template=ChatTemplate.load(folder),
        plan=planned,
        strategy=strategy,
        engine=engine,
        eos=eos,
        defaults=_defaults(generation),
        mesh=mesh,
    )


def restore_params(folder: Path, family: Family, dtype: str, mesh: Mesh | None, progress: Progress) -> dict[Any, Any]:
    """The weights, straight into their sharding: each device reads its part only."""
    wanted = abstract(family.rules, jnp.dtype(dtype), make_mesh() if mesh is None else mesh)
    return params_of(restore(folder, wanted, progress))


def _policy(config: Config, planned: Plan) -> Policy:
    engine, slots = config.engine, sum(pool.slots for pool in planned.pools)
    at_once = slots if engine.max_concurrency == "auto" else min(slots, engine.max_concurrency)
    return Policy(
        max_concurrency=at_once,
        # A longer queue serves nobody sooner: see the decision on short queues.
        max_waiting=at_once if engine.max_waiting == "auto" else engine.max_waiting,
        queue_timeout=engine.queue_timeout_s,
        request_timeout=engine.request_timeout_s,
        batch_window=engine.batch_window_ms / 1000,
        max_tenant_share=engine.max_tenant_share,
        quarantine=engine.quarantine_s,
    )


def end_tokens(known: Iterable[int], *configs: dict[str, Any]) -> tuple[int, ...]:
    """Files disagree on what ends an answer: all that any of them names does, a nested model's too."""
    ends = set(known)
    nested = (config["text_config"] for config in configs if isinstance(config.get("text_config"), dict))
    for config in (*configs, *nested):
        named = config.get("eos_token_id")
        ends.update(named if isinstance(named, list) else [] if named is None else [named])
    return tuple(sorted(ends))


def _defaults(generation: dict[str, Any]) -> SamplingParams:
    fields = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    given = {name: generation[name] for name in fields if generation.get(name) is not None}
    try:
        return SamplingParams(**{name: type(getattr(SamplingParams(), name))(value) for name, value in given.items()})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"generation_config.json: {error}") from error
