"""Every family on meshes of eight devices: the unsharded numbers, an eighth of the bytes, no expert gathered.

    python -m tests.rigs.mesh --models llama,qwen3_moe --meshes 2x4

The devices are forced ones of the CPU. Numbers, bytes and collectives are read from arrays and executables, not from
what was asked for. A program that is traced without its mesh is the control: it must be found to gather experts.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import itertools
import math
import re
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve import sharding
from jaxserve.axes import MeshShape, parts
from jaxserve.config import Pool
from jaxserve.decode.autoregressive import Autoregressive
from jaxserve.decode.step import DecodeState, Verdict
from jaxserve.engine import programs as programs_module
from jaxserve.engine.programs import Programs
from jaxserve.engine.request import Request, SamplingParams
from jaxserve.engine.rows import RowTable
from jaxserve.models.family import Family, family_of
from jaxserve.plan import Program, memory
from jaxserve.testing import random_params, tiny_engine, tiny_plan
from tests.rigs import verdict
from tests.rigs.mesh_models import MODELS

MESHES = (MeshShape(1, 8), MeshShape(2, 4), MeshShape(4, 2), MeshShape(8, 1))
SMALL = 2048  # numbers: a weight of that many may be gathered, the step's own arrays are as large
NUDGES = 6
TOLERANCE = 1e-5  # of the largest number compared, and at least of 1
SLOTS, LENGTH, BUCKETS, STEPS = 4, 64, (16, 32), 3
PREFILL, RUN = Program("prefill", 0, 16), Program("run", 0)
ENGINES = ("llama", "qwen3_5_moe_text")
QUICK = (("qwen3_moe", MESHES[2]),)


@dataclasses.dataclass(frozen=True)
class Remembering(Autoregressive):
    """The autoregressive strategy; its memory is the scores of the last step."""

    vocab_size: int = 0

    def memory(self, slots: int, positions: int) -> Any:
        """No scores yet."""
        return jnp.zeros((slots, self.vocab_size))

    def accept(self, logits: Any, proposal: Any, state: Any, rows: Any) -> Verdict:
        """As it is, and the scores."""
        plain = super().accept(logits, proposal, state, rows)
        return Verdict(plain.tokens, plain.count, plain.advance, plain.scores, logits[:, 0], plain.tally)


@dataclasses.dataclass
class Sharded:
    """A model on a mesh: its programs, compiled, and its weights."""

    family: Family
    programs: Programs
    params: Any

    @classmethod
    def of(cls, hf: dict[str, Any], mesh: MeshShape, seed: int = 0) -> Sharded:
        """Compiles prefill and run of one pool."""
        family = family_of(hf)
        plan = tiny_plan(family, (Pool(SLOTS, LENGTH),), mesh, prefill_buckets=BUCKETS, steps_per_dispatch=STEPS)
        devices = None if mesh.devices == 1 else sharding.make_mesh(mesh.expert, mesh.tensor)
        params = random_params(family, seed, mesh=devices)
        strategy = Remembering(4, vocab_size=family.shape.vocab_size)
        programs = Programs(plan, family, family.graphdef(jnp.float32), params, strategy, devices)
        programs.compile(lambda *_: None)
        return cls(family, programs, params)

    def nudged(self, seed: int) -> Sharded:
        """The same with every weight moved to its next number, up or down by chance."""
        random = np.random.default_rng(seed)
        params = jax.tree.map(lambda weight: nudge(weight, random), self.params)
        programs = copy.copy(self.programs)
        programs._params = params
        return Sharded(self.family, programs, params)

    def executable(self, program: Program) -> jax.stages.Compiled:
        """One of the programs."""
        return self.programs._executables[program]

    def read(self) -> tuple[DecodeState, DecodeState]:
        """The state after two prompts in chunks, padded ones too, and after some steps behind them."""
        programs, random = self.programs, np.random.default_rng(0)
        state, control = programs.empty(0), programs.idle(0)
        table = RowTable(programs.plan, programs.plan.pools[0], programs.whole)
        for slot, chunks in ((0, ((16, 16), (16, 5))), (2, ((32, 30),))):
            start, prompt = 0, random.integers(0, 256, LENGTH).astype(np.int32)
            for bucket, count in chunks:
                chunk = np.zeros(bucket, np.int32)
                chunk[:count] = prompt[start : start + count]
                state = programs.prefill(0, bucket, state, slot, chunk, start, count)
                start += count
            request = Request(
                f"{slot}", (*prompt[: start + 1].tolist(),), SamplingParams(max_tokens=8, temperature=0.0)
            )
            table.set(slot, request, (), 0)
            control.admit[slot], control.length[slot], control.pending[slot, 0] = True, start, prompt[start]
        before = jax.device_get(state)
        state, _ = programs.run(0, state, control, table.snapshot(), STEPS)
        return before, jax.device_get(state)


def nudge(weight: jax.Array, random: np.random.Generator) -> jax.Array:
    """Each number's neighbour, up or down by chance."""
    if weight.dtype != jnp.float32:
        return weight
    up = random.random(weight.shape) < 0.5
    return jnp.asarray(np.nextafter(np.asarray(weight), np.where(up, np.inf, -np.inf).astype(np.float32)))


def distances(one: Sharded, other: Sharded) -> dict[str, float]:
    """How far they are apart, leaf by leaf of the states behind a prefill and behind a step."""
    found = {}
    for phase, left, right in zip(("prefill", "step"), one.read(), other.read(), strict=True):
        pairs = zip(jax.tree.leaves_with_path(left), jax.tree.leaves(right), strict=True)
        for (path, a), b in pairs:
            whole = a.dtype.kind in "iub"
            far = float(np.any(a != b)) if whole else float(np.abs(a - b).max()) / max(1.0, float(np.abs(a).max()))
            found[f"{phase}{jax.tree_util.keystr(path)}"] = far
    return found


def rounding(alone: Sharded) -> dict[str, float]:
    """How far the last bits of the weights move one device's numbers, leaf by leaf: the farthest of some tries."""
    tries = [distances(alone, alone.nudged(seed)) for seed in range(NUDGES)]
    return {name: max(one[name] for one in tries) for name in tries[0]}


def wrong_numbers(alone: Sharded, mesh: Sharded, noise: dict[str, float]) -> list[str]:
    """Where the two differ: scores by more than the tolerance, a cache also by more than rounding moves it.

    A memory's output is normalised however small it is: in a toy that takes a thousandfold what its weights' last bits
    do. So ``noise`` is measured, see ``rounding``.
    """
    return [
        f"{name} differs by {far:.2g}"
        for name, far in distances(alone, mesh).items()
        if far > (max(TOLERANCE, 2 * noise.get(name, 0.0)) if ".cache" in name else TOLERANCE)
    ]


def parts_of(programs: Programs, program: Program, executable: jax.stages.Compiled) -> tuple[int, int]:
    """Bytes of a device's part of a program's arguments: of those that it reads, and of those that it does not.

    Where the former lie is the executable's own word. A prefill computes no scores: it reads no head.
    """
    _, arguments, _ = programs._call(program)
    arguments = arguments[isinstance(arguments[0], nnx.GraphDef) :]
    leaves, places = (
        jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None) for tree in (arguments, executable.input_shardings[0])
    )
    read = unread = 0
    for leaf, place in zip(leaves, places, strict=True):
        if leaf is not None:
            size = math.prod((place or leaf.sharding).shard_shape(leaf.shape)) * leaf.dtype.itemsize
            read, unread = (read, unread + size) if place is None else (read + size, unread)
    return read, unread


def wrong_bytes(mesh: Sharded) -> list[str]:
    """Where arrays or executables take something else than the plan says, or more than an eighth and what is named."""
    plan, wrong = mesh.programs.plan, []
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(mesh.params))
    held: dict[Any, int] = {}
    for leaf in jax.tree.leaves(mesh.params):
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    unsplit = sum(memory.unsplit_by_kind(plan.model, plan.dtype_bytes, plan.mesh).values())
    if set(held.values()) != {plan.weight_bytes} or len(held) != plan.mesh.devices:
        wrong.append(f"devices hold {sorted(set(held.values()))} bytes of weights, planned are {plan.weight_bytes}")
    if abs(plan.weight_bytes - whole // plan.mesh.devices - unsplit) > len(plan.model.weights):  # eighths are rounded
        wrong.append(f"{plan.weight_bytes} is not {whole} / {plan.mesh.devices} + {unsplit}")
    state = jax.tree.leaves(mesh.programs.empty(0))
    cache = jax.tree.leaves(mesh.programs.empty(0).cache)
    mine = sum(leaf.addressable_shards[-1].data.nbytes for leaf in cache)
    if mine != plan.cache_bytes(plan.pools[0]):
        wrong.append(f"a device holds {mine} bytes of cache, planned are {plan.cache_bytes(plan.pools[0])}")
    for program in (PREFILL, RUN):
        executable = mesh.executable(program)
        given = executable.memory_analysis().argument_size_in_bytes
        read, unread = parts_of(mesh.programs, program, executable)
        if read != given:
            wrong.append(f"{program} takes {given} bytes, its arguments' parts have {read}")
        spare = read + unread - plan.weight_bytes - sum(leaf.addressable_shards[0].data.nbytes for leaf in state)
        if not 0 <= spare <= plan.state_bytes(plan.pools[0]):
            wrong.append(f"{program} takes {given} bytes, {spare} more than weights and state")
        if executable.memory_analysis().alias_size_in_bytes < mine:
            wrong.append(f"{program} does not write its cache in place")
    return wrong


def gathered_weights(executable: jax.stages.Compiled, family: Family, mesh: MeshShape) -> list[str]:
    """The collectives of a program that give as many numbers as a split weight, or several parts of an expert one.

    ``all-gather`` and what may stand for one: ``all-to-all`` and ``collective-permute``. The widths and rows of these
    models are such that nothing else is as large.
    """
    whole, experts = set(), set()
    for rule in family.rules:
        size = math.prod(rule.shape)
        if parts(rule.axes, rule.shape, mesh) > 1 and size > SMALL:
            whole.add(size)
            if "experts" in rule.axes and len(rule.shape) > 2:
                experts |= {size // count for count in (1, 2, 4, 8) if count <= mesh.devices}
    found = []
    for line in executable.as_text().splitlines():
        match = re.search(r" = (.*?) (all-gather|all-to-all|collective-permute)(?:-start)?\(", line)
        given = re.findall(r"\w+\[([\d,]*)\]", match[1]) if match else []
        # Tokens travel by all-to-all, too.
        sizes = whole | experts if match and match[2] == "all-gather" else experts
        if any(math.prod(int(size) for size in shape.split(",") if size) in sizes for shape in given):
            found.append(line.strip())
    return found


def control_gathers(hf: dict[str, Any], mesh: MeshShape) -> bool:
    """Whether a program that does not know of its mesh is found to gather experts."""
    with mock.patch.object(programs_module, "under", return_value=contextlib.nullcontext()):
        lost = Sharded.of(hf, mesh)
    return bool(gathered_weights(lost.executable(RUN), lost.family, mesh))


def answers(hf: dict[str, Any], mesh: MeshShape) -> tuple[list[tuple[int, ...]], int]:
    """What an engine writes, some of it drawn, again after everything was lost; and what was compiled meanwhile."""
    engine = tiny_engine((Pool(SLOTS, LENGTH),), hf=hf, mesh=mesh, prefill_buckets=BUCKETS, eos=())
    random = np.random.default_rng(1)
    requests = [
        Request(
            str(index),
            tuple(random.integers(0, 256, 3 + 7 * index).tolist()),
            SamplingParams(max_tokens=8, temperature=0.0 if index % 2 else 1.0, seed=index),
        )
        for index in range(6)
    ]
    first = [one.tokens for one in engine.generate(requests)]
    engine.device.reset()
    again = [one.tokens for one in engine.generate(requests)]
    assert first == again, (first, again)
    return first, engine.recompiles


def look(name: str, meshes: tuple[MeshShape, ...], *, engine: bool, control: bool) -> list[str]:
    """What is wrong with a model on these meshes."""
    hf, wrong = MODELS[name], []
    alone = Sharded.of(hf, MeshShape())
    noise = rounding(alone)
    said = answers(hf, MeshShape())[0] if engine else None
    for shape in meshes:
        mesh = Sharded.of(hf, shape)
        here = wrong_numbers(alone, mesh, noise) + wrong_bytes(mesh)
        gathered = itertools.chain(
            *(gathered_weights(mesh.executable(at), mesh.family, shape) for at in (PREFILL, RUN))
        )
        here += [f"weights are gathered: {line[:120]}" for line in gathered]
        if said is not None:
            tokens, compiled = answers(hf, shape)
            here += ["the engine writes something else"] * (tokens != said) + ["it compiles"] * (compiled > 0)
        if control and shape.expert > 1 and not control_gathers(hf, shape):
            here.append("a program without its mesh is not found to gather experts")
        wrong += [f"{name} on {shape}: {what}" for what in here]
        del mesh
        jax.clear_caches()  # a program takes memory maps, of which a process may have 65,530
        gc.collect()
        print(f"{name} on {shape}: {'as alone' if not here else '; '.join(here)}", flush=True)
    other = wrong_numbers(alone, Sharded.of(hf, MeshShape(), seed=1), noise) if control else [""]
    return wrong + ([] if other else [f"{name}: other weights give the same numbers"])


def main() -> None:
    """Runs the rig."""
    text = {"default": "", "help": "some of them, with commas"}
    plainly = {"action": "store_true", "help": "programs only, no engine around them"}
    flags = verdict.arguments(__doc__, models=text, meshes=text, without_engine=plainly)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    names = [name for name in flags.models.split(",") if name] or list(MODELS)
    meshes = tuple(mesh for mesh in MESHES if not flags.meshes or str(mesh) in flags.meshes.split(","))
    if flags.quick:
        wrong = [line for name, mesh in QUICK for line in look(name, (mesh,), engine=False, control=False)]
        names, meshes = [name for name, _ in QUICK], tuple(mesh for _, mesh in QUICK)
    else:
        wrong = [
            line for name in names for line in look(name, meshes, engine=name in ENGINES, control=name == "qwen3_moe")
        ]
    said = f"{len(names)} families on {len(meshes)} meshes of 8: within {TOLERANCE:g}, an eighth of the bytes each"
    details = {"models": names, "meshes": list(map(str, meshes)), "wrong": wrong}
    figure = said if not wrong else f"{len(wrong)} things are wrong, first: {wrong[0]}"
    verdict.report("test_mesh", figure=figure, held=not wrong, details=details, save=flags.save)


if __name__ == "__main__":
    main()
