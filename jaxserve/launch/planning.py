"""What would be served, before a weight is read: for this machine or another one, for a model that is here or not.

Knows where a model's ``config.json`` is and how its programs are compiled without a weight in memory.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.axes import MeshShape, split
from jaxserve.checkpoint import Progress, silent
from jaxserve.checkpoint.side_files import CONFIG
from jaxserve.checkpoint.store import Store
from jaxserve.config import Config
from jaxserve.decode.strategies import facts, planned_strategy, strategy_of
from jaxserve.engine.programs import Programs
from jaxserve.errors import CheckpointError, PlanError
from jaxserve.launch.device import this_machine
from jaxserve.models.family import Family, family_of
from jaxserve.models.kernels import grouped, native
from jaxserve.models.passes import Routing
from jaxserve.models.weights import abstract, params_of
from jaxserve.plan import Hardware, Plan, check, draft_plan, fits_where, hardware
from jaxserve.sharding import make_mesh
from jaxserve.text.folder import read_json

FORCED = "--xla_force_host_platform_device_count"


def plan(
    config: Config,
    config_json: Path | None = None,
    device: str | None = None,
    *,
    compiled: bool = False,
    progress: Progress = silent,
) -> Plan:
    """The plan of a configuration.

    Args:
        config_json: a model's ``config.json`` or the folder it is in; by default that of the configured model.
        device: hardware by name, e.g. ``8xh100``; by default this machine.
        compiled: compile every program, on this machine, and count the workspace that the compiler says they need.
        progress: told "compiling" in programs.

    Raises:
        CheckpointError: no such model. ConfigError: no such hardware. PlanError: it does not fit.
    """
    there = this_machine() if device is None else hardware(device)
    family = _family(config, config_json)
    drafted = draft(config, family, there)
    if compiled:
        drafted = with_workspace(drafted, family, progress)
    check(drafted)
    return drafted


def where(config: Config, config_json: Path | None = None) -> list[tuple[str, ...]]:
    """What of a configuration fits on common hardware: a table with its head."""
    return fits_where(draft(config, _family(config, config_json), hardware("h200")))


def plan_for(config: Config, family: Family, there: Hardware) -> Plan:
    """The plan for a model and some hardware.

    Raises:
        PlanError: it does not fit.
    """
    planned = draft(config, family, there)
    check(planned)
    return planned


def draft(config: Config, family: Family, there: Hardware) -> Plan:
    """The same, whether it fits or not.

    Raises:
        ConfigError: a product of experts that is not there.
    """
    drafted = draft_plan(
        family.shape,
        config.engine,
        dtype=config.model.dtype,
        dtype_bytes=jnp.dtype(config.model.dtype).itemsize,
        memory_limit=there.memory,
        mesh=MeshShape(config.mesh.expert, config.mesh.tensor),
        devices=there.devices,
        exchange=config.mesh.exchange_tokens,
    )
    # Elsewhere than on one CPU a product's bits depend on how many rows it has.
    asked, alone = config.engine.draft_tokens, there.platform == "cpu" and drafted.mesh.devices == 1
    drafts = () if asked is None or (asked == "auto" and not alone) else asked
    strategy = strategy_of(family, drafted.dtype, drafted.max_logprobs, drafts=drafts)
    decoded = facts(strategy, family)
    return dataclasses.replace(drafted, multiplies=multiplies(drafted, there.platform), **decoded)


def multiplies(planned: Plan, platform: str) -> str | None:
    """What multiplies with experts, in a word or two; ``None`` where there are none.

    Raises:
        ConfigError: a product that is not there.
    """
    held = [weight for weight in planned.model.weights if "experts" in weight.axes]
    if any(weight.dtype is not None for weight in held):
        return "blocks, for each of which an expert is unpacked"
    if held and platform == "cpu":
        return native.describe(planned.dtype, allowed=planned.native_kernels)
    found: list[str | None] = []
    for weight in held:
        if not {"ffn", "model"} <= set(weight.axes):  # a bias
            continue
        ways = split(weight.axes, weight.shape, planned.mesh)
        own = [size // planned.mesh.size(way) for size, way in zip(weight.shape, ways, strict=True)]
        kernels = own[0], math.prod(own[1:-1]), own[-1]
        found.append(grouped.choice(platform, kernels, (planned.dtype, planned.dtype), planned.expert_product))
    return " and ".join(sorted({name for name in found if name is not None})) or None


def is_native(planned: Plan) -> bool:
    """Whether native kernels compute a part of the model."""
    return planned.multiplies is not None and planned.multiplies.startswith(native.NAME)


def routing_of(planned: Plan) -> Routing:
    """How the plan has tokens meet their experts."""
    return Routing(planned.expert_product, planned.exchange_tokens, planned.native_kernels)


def mesh_of(planned: Plan) -> Mesh | None:
    """The plan's mesh, of this machine's devices; ``None`` if it is one device."""
    return None if planned.mesh.devices == 1 else make_mesh(planned.mesh.expert, planned.mesh.tensor)


def abstract_programs(planned: Plan, family: Family) -> Programs:
    """The plan's programs, not compiled, without a weight in memory.

    Raises:
        PlanError: the mesh has more devices than there are here.
    """
    needed, there = planned.mesh.devices, len(jax.devices())
    if needed > there:
        raise PlanError(
            f"programs for a mesh of {needed} devices are compiled where there are so many, not {there}: on a CPU "
            f"XLA_FLAGS={FORCED}={needed} makes them",
            param="mesh",
        )
    mesh = mesh_of(planned)
    dtype = jnp.dtype(planned.dtype)
    params = params_of(abstract(family.rules, dtype, mesh))
    graphdef = family.graphdef(dtype, routing_of(planned))
    return Programs(planned, family, graphdef, params, planned_strategy(planned, family), mesh)


def with_workspace(planned: Plan, family: Family, progress: Progress = silent) -> Plan:
    """The plan with the compiler's own account of what its programs need beside their arguments."""
    programs = abstract_programs(planned, family)
    programs.compile(progress)
    return dataclasses.replace(planned, compiled_workspace=max(programs.workspace_bytes().values(), default=None))


def version_folder(config: Config) -> Path:
    """Where the configured model's version lies."""
    version = None if config.model.version == "current" else config.model.version
    return Store(config.checkpoints.root).path(config.model.id, version)


def read_config(folder: Path) -> dict[str, Any]:
    """A version's ``config.json``.

    Raises:
        CheckpointError: absent, or no JSON object.
    """
    path = folder / CONFIG
    if not path.exists():
        raise CheckpointError(f"{path} is missing")
    return read_json(path)


def _family(config: Config, config_json: Path | None) -> Family:
    if config_json is None:
        return family_of(read_config(version_folder(config)))
    if config_json.is_dir():
        return family_of(read_config(config_json))
    if not config_json.exists():
        raise CheckpointError(f"{config_json} is missing")
    return family_of(read_json(config_json))
