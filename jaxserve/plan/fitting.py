"""What fits: a plan for a configuration, or a refusal that names the nearest one that would; and the same for hardware.

Near is what changes least: fewer slots, then shorter ones, then more devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from jaxserve.axes import ONE_DEVICE, MeshShape
from jaxserve.config import EngineConfig
from jaxserve.errors import PlanError
from jaxserve.plan.hardware import COMMON, GIGABYTE, hardware
from jaxserve.plan.planning import Plan, draft_plan, gib, plan_pool
from jaxserve.plan.programs import PoolPlan
from jaxserve.plan.shapes import ModelShape

# Devices that a larger mesh may have where so many are not known to be there: beyond that it is another kind of job.
MOST_DEVICES = 64
LENGTH_STEP = 32


def make_plan(
    model: ModelShape,
    engine: EngineConfig,
    *,
    dtype: str,
    dtype_bytes: int,
    memory_limit: int,
    mesh: MeshShape = ONE_DEVICE,
    devices: int = 1,
) -> Plan:
    """Plans for a model, a configuration and ``devices`` devices of ``memory_limit`` bytes each.

    Raises:
        PlanError: a pool, bucket or mesh that cannot be, or more bytes than there are.
    """
    plan = draft_plan(
        model, engine, dtype=dtype, dtype_bytes=dtype_bytes, memory_limit=memory_limit, mesh=mesh, devices=devices
    )
    check(plan)
    return plan


def check(plan: Plan) -> None:
    """Refuses a plan that cannot be.

    Raises:
        PlanError: with the numbers, and what would fit.
    """
    if plan.mesh.devices > plan.devices:
        there = "there is 1" if plan.devices == 1 else f"there are {plan.devices}"
        raise PlanError(
            f"a mesh of expert x tensor {plan.mesh} takes {plan.mesh.devices} devices, {there}", param="mesh"
        )
    if plan.fits:
        return
    found = list(nearest(plan))
    hint = "nearest that fits: " + ", or ".join(found) if found else "no number of slots, length or mesh fits"
    each = " on each device" if plan.mesh.devices > 1 else ""
    raise PlanError(
        f"the plan needs {gib(plan.total_bytes)}{each} (weights {gib(plan.weight_bytes)}, "
        f"cache {gib(sum(map(plan.cache_bytes, plan.pools)))}, workspace {gib(plan.workspace_bytes)}), "
        f"but {gib(plan.memory_limit)} less {plan.memory_headroom:.0%} headroom leaves "
        f"{gib(plan.usable_bytes)}: {hint}",
        param="engine.pools",
    )


def nearest(plan: Plan) -> Iterator[str]:
    """Each way to fit that changes one thing, in words."""
    slots = max(pool.slots for pool in plan.pools)
    fewer = _largest(lambda n: _with(plan, lambda pool: (max(1, pool.slots * n // slots), pool.length)), slots - 1)
    if fewer is not None:
        yield f"{_pools(fewer)} (fewer slots)"
    length = max(pool.length for pool in plan.pools)
    steps = length // LENGTH_STEP

    def shortened(n: int) -> Plan:
        return _with(plan, lambda pool: (pool.slots, max(2, pool.length * n // steps // LENGTH_STEP * LENGTH_STEP)))

    shorter = _largest(shortened, steps - 1)
    if shorter is not None:
        yield f"{_pools(shorter)} (shorter)"
    for mesh in _meshes(max(plan.devices, MOST_DEVICES)):
        larger = dataclasses.replace(plan, mesh=mesh)
        if mesh.devices > plan.mesh.devices and larger.fits:
            more = f", of {mesh.devices} devices" if mesh.devices > plan.devices else ""
            yield f"a mesh of expert x tensor {mesh}{more}"
            return


def best_mesh(plan: Plan) -> MeshShape:
    """The mesh of all devices that leaves most memory on each; among equals the one that splits experts most."""
    meshes = [mesh for mesh in _meshes(plan.devices) if mesh.devices == plan.devices]
    return min(meshes, key=lambda mesh: dataclasses.replace(plan, mesh=mesh).total_bytes)


def fits_where(plan: Plan) -> list[tuple[str, ...]]:
    """What of a plan fits on common hardware: a table with its head, each row for all of a machine's devices."""
    head = ("HARDWARE", "DEVICES", "EACH HAS", "MESH", "WEIGHTS", "CACHE A SLOT", "SLOTS", "FITS")
    rows: list[tuple[str, ...]] = [head]
    for name in COMMON:
        there = hardware(name)
        here = dataclasses.replace(plan, memory_limit=there.memory, devices=there.devices)
        here = dataclasses.replace(here, mesh=best_mesh(here))
        longest = max(here.pools, key=lambda pool: pool.length)
        each = here.cache_bytes(longest) // longest.rows
        room = here.usable_bytes - here.weight_bytes - here.workspace_bytes
        slots = max(0, room // (each + here.state_bytes(longest) // longest.rows))
        usable = f"{there.memory / GIGABYTE:.4g} GB"
        sizes = (str(here.mesh), gib(here.weight_bytes), gib(each), f"{slots:,} x {longest.length}")
        rows.append((name, str(there.devices), usable, *sizes, "yes" if here.fits else "no"))
    return rows


def _meshes(most: int) -> list[MeshShape]:
    """Meshes of up to so many devices, a power of two along each axis: small ones first, experts before tensors."""
    powers = [1 << n for n in range(most.bit_length()) if 1 << n <= most]
    found = [MeshShape(expert, tensor) for expert in powers for tensor in powers if expert * tensor <= most]
    return sorted(found, key=lambda mesh: (mesh.devices, -mesh.expert))


def _largest(of: Callable[[int], Plan], most: int) -> Plan | None:
    """The plan of the largest number from 1 to ``most`` that fits; a larger number needs no less."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if of(middle).fits else (low, middle - 1)
    return of(low) if low > 0 else None


def _with(plan: Plan, sizes: Callable[[PoolPlan], tuple[int, int]]) -> Plan:
    """The same with other pools."""
    pools = tuple(plan_pool(*sizes(pool), pool.buckets, plan.model) for pool in plan.pools)
    changed = dataclasses.replace(plan, pools=pools)
    changed.__dict__["weights_by_kind"] = plan.weights_by_kind  # do not depend on the pools
    return changed


def _pools(plan: Plan) -> str:
    return f"pools {','.join(map(str, plan.pools))}"
