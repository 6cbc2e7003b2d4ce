"""The flagship at full size, without a weight: compiled for eight devices, lowered for GPUs and TPUs.

    python -m tests.rigs.flagship --layers 4 --meshes 4x2

What each device would hold is read from the executables (their arguments' sizes) and must be what the plan says. What
is lowered is traced for devices that are not here, and must hold the kernel that multiplies with experts there.
"""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.export
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding

from jaxserve.axes import MeshShape
from jaxserve.config import Config, EngineConfig, MeshConfig, Pool
from jaxserve.engine.programs import Programs
from jaxserve.launch.planning import abstract_programs, draft
from jaxserve.models.family import family_of
from jaxserve.plan import Hardware, Program, hardware
from tests.rigs import verdict
from tests.rigs.mesh import gathered_weights, parts_of

CONFIG = Path(__file__).parents[2] / "configs" / "qwen3.6-35b-a3b.json"
MESHES = (MeshShape(8, 1), MeshShape(4, 2))
DEVICES = {"cuda": AbstractDevice("NVIDIA H100", 132, "gpu"), "tpu": AbstractDevice("TPU v5 lite", 1, "tpu")}
KERNELS = {"cuda": "__gpu$xla.gpu.triton", "tpu": "tpu_custom_call"}
PREFILL, RUN = Program("prefill", 0, 256), Program("run", 0)
SLOTS, LENGTH = 32, 8192
NEAR = 0.02


def config_of(layers: int | None) -> dict[str, Any]:
    """The flagship's ``config.json``, with fewer layers if so asked; one in four is of full attention."""
    hf: dict[str, Any] = copy.deepcopy(json.loads(CONFIG.read_text()))
    if layers is not None:
        hf["text_config"] |= {"num_hidden_layers": layers, "full_attention_interval": min(4, layers)}
    return hf


def programs_of(hf: dict[str, Any], mesh: MeshShape, there: Hardware | None = None) -> Programs:
    """Its programs in bfloat16, not compiled, without a weight."""
    config = Config(
        engine=EngineConfig(pools=(Pool(SLOTS, LENGTH),), prefill_buckets=(PREFILL.bucket,)),
        # Chunks of prompts take the one way, steps the other.
        mesh=MeshConfig(expert=mesh.expert, tensor=mesh.tensor, exchange_tokens=PREFILL.bucket),
    )
    family = family_of(hf)
    return abstract_programs(draft(config, family, there or hardware("8xh100")), family)


def wrong_bytes(programs: Programs, program: Program, executable: jax.stages.Compiled) -> list[str]:
    """Where an executable takes something else than was planned for a device."""
    plan = programs.plan
    (pool,) = plan.pools
    planned = plan.weight_bytes + plan.cache_bytes(pool) + plan.state_bytes(pool)
    analysis = executable.memory_analysis()
    read, unread = parts_of(programs, program, executable)
    given = analysis.argument_size_in_bytes
    print(
        f"{program} on {plan.mesh}: {planned / 2**30:.3f} GiB planned, it takes {given / 2**30:.3f} and leaves "
        f"{unread / 2**30:.3f} unread; workspace {analysis.temp_size_in_bytes / 2**20:.0f} MiB, "
        f"estimated {plan.workspace_bytes / 2**20:.0f}",
        flush=True,
    )
    wrong = []
    if abs(given - read) > NEAR * read:
        wrong.append(f"{program} on {plan.mesh} takes {given} bytes, its arguments' parts have {read}")
    if abs(given + unread - planned) > NEAR * planned:
        wrong.append(f"{program} on {plan.mesh}: {given} + {unread} bytes, planned are {planned}")
    if analysis.alias_size_in_bytes < plan.cache_bytes(pool):
        wrong.append(f"{program} on {plan.mesh} does not write its cache in place")
    return wrong


def wrong_compiled(hf: dict[str, Any], mesh: MeshShape) -> list[str]:
    """What is wrong with the programs that a mesh of forced devices would run."""
    programs, wrong = programs_of(hf, mesh), []
    for program in (PREFILL, RUN):
        executable = programs._trace(program).lower().compile()
        wrong += wrong_bytes(programs, program, executable)
        gathered = gathered_weights(executable, programs._family, mesh)
        lines = [f"{program} on {mesh} gathers weights: {line[:100]}" for line in gathered]
        print("\n".join(lines), end="\n" * bool(lines), flush=True)
        wrong += lines
    return wrong


def wrong_lowered(hf: dict[str, Any], mesh: MeshShape) -> list[str]:
    """Which programs do not lower for hardware that is not here, through ``jax.export``, and why."""
    programs, wrong = programs_of(hf, mesh, Hardware("any", mesh.devices, 2**40)), []
    for program in (PREFILL, RUN):
        for platform, kernel in KERNELS.items():
            function, arguments, static = programs._call(program)
            there = elsewhere(programs, platform)
            arguments = jax.tree.map(functools.partial(placed, there), arguments)
            safe = [jax.export.DisabledSafetyCheck.custom_call(kernel)]
            try:
                with jax.sharding.use_abstract_mesh(there):
                    exported = jax.export.export(function, platforms=(platform,), disabled_checks=safe)
                    text = exported(*arguments, **static).mlir_module()
            except Exception as error:  # noqa: BLE001 - whatever keeps it from being lowered is the finding
                wrong.append(f"{program} on {mesh} for {platform}: {type(error).__name__}: {str(error)[:300]}")
                continue
            print(f"{program} on {mesh} for {platform}: {len(text):,} characters", flush=True)
            if f"@{kernel}" not in text or "chlo.ragged_dot" in text:
                wrong.append(f"{program} on {mesh} for {platform} does not multiply with experts by {kernel}")
    return wrong


def elsewhere(programs: Programs, platform: str) -> AbstractMesh:
    """The programs' mesh, or none, of devices that are not here."""
    if programs._mesh is None:
        return AbstractMesh((), (), abstract_device=DEVICES[platform])
    return programs._mesh.abstract_mesh.update(abstract_device=DEVICES[platform])


def placed(mesh: AbstractMesh, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The same argument, split over these devices as it was over those that are here."""
    if mesh.empty:
        return shape
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, shape.sharding.spec))


def main() -> None:
    """Runs the rig."""
    flags = verdict.arguments(
        __doc__,
        layers={"type": int, "default": None, "help": "fewer than it has"},
        meshes={"default": "", "help": "some of them, with commas"},
    )
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    meshes = [mesh for mesh in MESHES if not flags.meshes or str(mesh) in flags.meshes.split(",")]
    layers = flags.layers or (2 if flags.quick else None)
    hf = config_of(layers)
    wrong = [line for mesh in meshes for line in wrong_compiled(hf, mesh)]
    wrong += [line for mesh in (MeshShape(), meshes[-1]) for line in wrong_lowered(hf, mesh)]
    count = hf["text_config"]["num_hidden_layers"]
    figure = (
        f"{count} layers on {' and '.join(map(str, meshes))}: bytes within {NEAR:.0%} of the plan, no weight gathered"
    )
    figure += f"; lowered for {' and '.join(KERNELS)} with kernels of their own"
    if wrong:
        figure = f"{len(wrong)} things are wrong, first: {wrong[0]}"
    verdict.report("flagship", figure=figure, held=not wrong, details={"wrong": wrong}, save=flags.save)


if __name__ == "__main__":
    main()
