"""The executables: exactly those of the plan, compiled before the engine is ready, and nothing afterwards.

Knows how a ``Program`` of the plan is lowered, compiled and called, and watches that no other compilation happens.
Knows no request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxserve.decode import jitted
from jaxserve.decode.sampling import SamplingRows
from jaxserve.decode.step import Control, DecodeState, Emission, Hint, Strategy, empty_state
from jaxserve.engine.device import Progress
from jaxserve.engine.rows import RowTable
from jaxserve.errors import DeviceFault
from jaxserve.models.cache import entry_split, heads_of
from jaxserve.models.family import Family
from jaxserve.plan import Plan, Program
from jaxserve.sharding import replicated, sharding, under

COMPILED = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass(frozen=True, slots=True)
class HostControl:
    """``decode.step.Control`` while the host fills it in."""

    keep: np.ndarray
    admit: np.ndarray
    length: np.ndarray
    pending: np.ndarray
    pending_count: np.ndarray

    def on_device(self, sharding: jax.sharding.Sharding | None = None) -> Control:
        """The control as a program takes it; the host's arrays must not change afterwards."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return Control(**jax.device_put(fields, sharding))


class CompileWatch:
    """Counts compilations in this process from the moment it is armed."""

    def __init__(self) -> None:
        self.count = 0
        self._on_compile: Callable[[], None] | None = None
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def arm(self, on_compile: Callable[[], None]) -> None:
        """From now on a compilation is a fault; ``on_compile`` is called for each."""
        self._on_compile = on_compile

    def close(self) -> None:
        """Stops counting. JAX offers no way to take a listener back, so it stays, deaf."""
        self._on_compile = None

    def _heard(self, event: str, duration_secs: float, **_: str | int) -> None:  # noqa: ARG002 - JAX's signature
        if self._on_compile is not None and event == COMPILED:
            self.count += 1
            self._on_compile()


class Programs:
    """The compiled programs of one model under one plan.

    Args:
        graphdef: the module's structure.
        params: its weights, as ``nnx`` keys them, in place on the devices.
        mesh: the devices that share them; ``None`` is one device.

    Attributes:
        whole: where what is small lies: on each device of the mesh; ``None`` without one.
    """

    def __init__(
        self,
        plan: Plan,
        family: Family,
        graphdef: nnx.GraphDef[Any],
        params: dict[Any, Any],
        strategy: Strategy,
        mesh: Mesh | None = None,
    ) -> None:
        self.plan = plan
        self.strategy = strategy
        self.whole = None if mesh is None else replicated(mesh)
        self._mesh = mesh
        self._family = family
        self._graphdef = graphdef
        self._params = params
        self._dtype = jnp.dtype(plan.dtype)
        self._executables: dict[Program, jax.stages.Compiled] = {}
        self._makers: dict[int, jax.stages.Compiled] = {}

    def empty(self, pool: int) -> DecodeState:
        """A pool's state with nothing in it."""
        if pool not in self._makers:  # before the warm-up; no device of a mesh ever holds the whole of it
            places = None if self._mesh is None else self._places(pool)
            self._makers[pool] = jax.jit(lambda: self._empty(pool), out_shardings=places).lower().compile()
        state: DecodeState = self._makers[pool]()
        return state

    def compile(self, progress: Progress) -> None:
        """Traces, lowers and compiles every program of the plan, one after the other.

        Raises:
            DeviceFault: naming the program that cannot be compiled.
        """
        programs = self.plan.programs()
        for done, program in enumerate(programs):
            progress("compiling", done, len(programs))
            try:
                self._executables[program] = self._trace(program).lower().compile()
            except Exception as fault:
                reason = str(fault).partition("\n")[0]
                raise DeviceFault(f"the program `{program}` cannot be compiled: {reason}") from fault
        progress("compiling", len(programs), len(programs))

    def workspace_bytes(self) -> dict[Program, int]:
        """What each executable needs beside its arguments and results, by the compiler's own account."""
        return {
            program: analysis.temp_size_in_bytes
            for program, executable in self._executables.items()
            if (analysis := executable.memory_analysis()) is not None
        }

    def prefill(
        self, pool: int, bucket: int, state: DecodeState, slot: int, tokens: np.ndarray, start: int, count: int
    ) -> DecodeState:
        """Reads one padded chunk of a prompt; ``state`` is donated."""
        executable = self._executables[Program("prefill", pool, bucket)]
        scalars = (np.int32(slot), tokens, np.int32(start), np.int32(count))
        after: DecodeState = executable(self._params, state, *scalars)
        return after

    def run(
        self, pool: int, state: DecodeState, control: HostControl, rows: SamplingRows, steps: int
    ) -> tuple[DecodeState, Emission]:
        """Decodes; ``state`` is donated."""
        executable = self._executables[Program("run", pool)]
        after: tuple[DecodeState, Emission] = executable(
            self._params, state, control.on_device(self.whole), rows, np.int32(steps)
        )
        return after

    def hand(self, pool: int, state: DecodeState, slot: int, hint: Hint) -> DecodeState:
        """Gives the strategy what a request brings along; ``state`` is donated."""
        after: DecodeState = self._executables[Program("hand", pool)](state, np.int32(slot), hint)
        return after

    def hint(self, pool: int, draft: Sequence[int] = (), settings: Mapping[str, float] | None = None) -> Hint:
        """What a request brings along, in the shapes of the compiled programs."""
        tokens = np.zeros(self.plan.pools[pool].positions, np.int32)
        tokens[: len(draft)] = draft[: len(tokens)]
        given = settings or {}
        values = np.asarray([given.get(name, np.nan) for name in self.strategy.settings], np.float32)
        fields = {"draft": tokens, "drafted": np.int32(min(len(draft), len(tokens))), "settings": values}
        return Hint(**jax.device_put(fields, self.whole))

    def fork(self, pool: int, state: DecodeState, source: int, target: int) -> DecodeState:
        """Copies a slot into another one; ``state`` is donated."""
        after: DecodeState = self._executables[Program("fork", pool)](state, np.int32(source), np.int32(target))
        return after

    def scrub(self, pool: int, state: DecodeState, slot: int) -> DecodeState:
        """Zeroes a slot; ``state`` is donated."""
        after: DecodeState = self._executables[Program("scrub", pool)](state, np.int32(slot))
        return after

    def idle(self, pool: int) -> HostControl:
        """A control that stops every row and admits none, to be filled in."""
        rows, width = self.plan.pools[pool].rows, self.strategy.widths[-1]
        return HostControl(
            keep=np.zeros(rows, bool),
            admit=np.zeros(rows, bool),
            length=np.zeros(rows, np.int32),
            pending=np.zeros((rows, width), np.int32),
            pending_count=np.ones(rows, np.int32),
        )

    def _empty(self, pool: int) -> DecodeState:
        shape = self.plan.pools[pool]
        return empty_state(self._family.empty_cache(shape.rows, shape.positions, self._dtype), self.strategy)

    def _places(self, pool: int) -> Any:
        """Where each leaf of a pool's state lies: the cache split by heads, the rest whole on each device."""
        assert self._mesh is not None
        mesh = self._mesh
        state = jax.eval_shape(lambda: self._empty(pool))
        heads = heads_of(state.cache.layers)
        split = [
            sharding(mesh, *entry_split(leaf, count))
            for layer, count in zip(state.cache.layers, heads, strict=True)
            for leaf in jax.tree.leaves(layer)
        ]
        places, whole = iter(split), replicated(mesh)
        return jax.tree.map_with_path(lambda path, _: next(places) if path[0].name == "cache" else whole, state)

    def _trace(self, program: Program) -> jax.stages.Traced:
        function, arguments, static = self._call(program)
        with under(self._mesh):
            traced: jax.stages.Traced = function.trace(*arguments, **static)
        return traced

    def _call(self, program: Program) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The jitted function that a program is made of, its arguments without their numbers, and its static ones."""
        functions, pool = jitted.ON_ONE_DEVICE, self.plan.pools[program.pool]
        state = jax.eval_shape(lambda: self._empty(program.pool))
        if self._mesh is not None:
            places = self._places(program.pool)
            functions = jitted.over_mesh(places, self.whole)
            state = jax.tree.map(
                lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), state, places
            )
        scalar = jax.ShapeDtypeStruct((), jnp.int32, sharding=self.whole)
        if program.kind == "scrub":
            return functions.scrub, (state, scalar), {}
        if program.kind == "fork":
            return functions.fork, (state, scalar, scalar), {}
        if program.kind == "hand":
            return functions.hand, (state, scalar, self.hint(program.pool)), {"strategy": self.strategy}
        model = (self._graphdef, self._params)
        if program.kind == "prefill":
            tokens = jax.ShapeDtypeStruct((program.bucket,), jnp.int32, sharding=self.whole)
            arguments = (*model, state, scalar, tokens, scalar, scalar)
            return functions.prefill, arguments, {"block": self.strategy.block}
        control = self.idle(program.pool).on_device(self.whole)
        rows = RowTable(self.plan, pool, self.whole).snapshot()
        static = {"strategy": self.strategy, "max_steps": self.plan.steps_per_dispatch}
        return functions.run, (*model, state, control, rows, scalar), static
