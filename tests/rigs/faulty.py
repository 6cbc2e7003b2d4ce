"""The real server with a fault injector inside: ``python -m tests.rigs.faulty SOCKET serve ...``.

Everything is the product's own: command line, composition, engine, programs. The injector wraps a few of its functions
and does nothing until it is told to over the Unix socket, one JSON object a line: ``{"command": ..., arguments}``, see
the public methods of ``Injector``. A fault may be meant for marked requests only: those whose prompt holds ``MARK``
(token ids), or ``WORD`` where there are no tokens yet.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import functools
import json
import logging
import os
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARK = (11, 389, 11, 397)
WORD = "poison"
TEXT_PHASES = ("validate", "tokenise")
# Where the device's program fails: reading a prompt, decoding, or when its result is read.
DEVICE_PHASES = ("prefill", "decode", "sample")
HOST_PHASES = ("schedule", "admit", "deliver", "callback", "detokenise")
PHASES = (*TEXT_PHASES, *HOST_PHASES, *DEVICE_PHASES, "tick", "compile")
PLANT = "RIG_PLANT"  # a variable with a JSON list of commands that are obeyed before the model is loaded
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1073741824 bytes."


class Planted(RuntimeError):
    """A fault that was asked for."""


class Killed(BaseException):
    """Ends a thread through every ``except Exception``."""


class Unreadable:
    """A device array whose computation failed: it shows when it is read."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise Planted("planted in sample")


@dataclasses.dataclass(slots=True)
class Illegible:
    """A log in which some slots cannot be read."""

    log: Any
    slots: list[int]

    def of(self, slot: int, logprobs: int | None) -> Any:
        """One slot's part."""
        if slot in self.slots:
            raise Planted("planted in deliver")
        return self.log.of(slot, logprobs)


@dataclasses.dataclass(slots=True)
class Fault:
    """``how``: ``error``, ``device`` (a program that fails on the device), ``oom``, or ``nan`` (in the cache).

    ``skip`` occasions pass before it strikes, then it does ``left`` times.
    """

    phase: str
    how: str
    marked: bool
    left: float
    skip: int = 0
    fired: int = 0


class Injector:
    """What is planted, and what was seen. Public methods are the commands."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._held = {"device": threading.Event(), "host": threading.Event()}
        self.release()
        self._pause = 0.0
        self._busy_until = 0.0
        self._leaks: Counter[str] = Counter()
        self._kept: list[Any] = []
        self._ballast = b""
        self._culprit: Any = None
        self._runs = 0
        self._encoded = 0
        self._trace: deque[tuple[str, int]] = deque(maxlen=10_000)
        self._cancelled_at: dict[str, int] = {}
        self._freed_after: Counter[int] = Counter()
        self._never_seated = 0
        self.loop: asyncio.AbstractEventLoop | None = None
        self.engine: Any = None
        self.scheduler: Any = None
        self.programs: Any = None

    # --- commands -----------------------------------------------------------------------------------------------------

    def fail(
        self, phase: str, marked: bool = True, times: float | None = None, how: str = "error", skip: int = 0
    ) -> None:
        """From now on ``phase`` fails ``times`` times (without end by default), for marked requests or for any."""
        if phase not in PHASES:
            raise ValueError(phase)
        with self._lock:
            self._faults.append(Fault(phase, how, marked, times or float("inf"), skip))

    def clear(self) -> dict[str, int]:
        """Takes every fault and leak back; how often each phase failed."""
        fired: Counter[str] = Counter()
        with self._lock:
            for fault in self._faults:
                fired[fault.phase] += fault.fired
            self._faults.clear()
        self._leaks.clear()
        self._pause = 0.0
        self.release()
        return fired

    def spoil_weights(self) -> None:
        """Every weight becomes NaN, in the device's memory."""
        import jax
        import numpy as np

        def spoilt(leaf: Any) -> Any:
            return jax.device_put(np.full(leaf.shape, np.nan, leaf.dtype), leaf.sharding)

        self.programs._params = jax.tree.map(spoilt, self.programs._params)

    def hang_engine(self) -> None:
        """The next program does not come back until ``release``."""
        self._held["device"].clear()

    def stop_engine(self) -> None:
        """The engine's thread stands still before its next tick until ``release``."""
        self._held["host"].clear()

    def kill_engine(self) -> None:
        """The engine's thread dies, of something that nobody catches."""
        thread = next(thread for thread in threading.enumerate() if thread.name == "engine")
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Killed))
        with self.engine._wake:  # it may be asleep
            self.engine._wake.notify_all()

    def release(self) -> None:
        """What hangs goes on."""
        for held in self._held.values():
            held.set()

    def slow(self, seconds: float) -> None:
        """Every run takes this much longer on the device; the host goes on meanwhile, as it would."""
        self._pause = seconds

    def block_loop(self, seconds: float) -> None:
        """The event loop does nothing else for a while."""
        assert self.loop
        self.loop.call_soon_threadsafe(time.sleep, seconds)

    def lie(self) -> None:
        """The probes say that all is well, whatever is so: what a rig must notice."""
        from jaxserve.server.vitals import Vitals

        Vitals.ready = lambda self: True  # type: ignore[method-assign]

    def jump(self, seconds: float) -> None:
        """The wall clock is wrong from now on; the monotonic one goes on as it must."""
        seconds_then, ns_then = time.time, time.time_ns
        time.time = lambda: seconds_then() + seconds
        time.time_ns = lambda: ns_then() + int(seconds * 1e9)

    def leak(self, what: str, size: int = 1) -> None:
        """From now on each request leaves ``size`` of something: ``bytes``, ``descriptor``, ``task``, ``slot``."""
        self._leaks[what] += size

    def ballast(self, size: int) -> None:
        """Takes so many bytes of memory, and gives back what it took before."""
        self._ballast = b""
        self._ballast = os.urandom(size)

    def trace(self) -> list[tuple[str, int]]:
        """What was dispatched since the last time: ``prefill`` and its bucket, ``run`` and its steps."""
        trace = list(self._trace)
        self._trace.clear()
        return trace

    def blame_last(self, wrongly: bool = True) -> None:
        """After a failed step the wrong request is blamed: what a rig must notice."""
        from jaxserve.engine.recovery import Recovery
        from jaxserve.errors import EngineError

        self._culprit = self._culprit or Recovery.culprit
        Recovery.culprit = (
            (lambda recovery, suspects: (suspects[-1], EngineError("planted"))) if wrongly else self._culprit
        )

    def compile(self) -> None:
        """Compiles a program that is not in the plan."""
        import jax

        jax.jit(lambda x: x + self._runs)(1)

    def log(self, lines: int, size: int) -> None:
        """Writes log lines as the server does."""
        for number in range(lines):
            logging.getLogger("jaxserve.rig").info("filling", extra={"fields": {"n": number, "text": "x" * size}})

    def facts(self) -> dict[str, Any]:
        """Counts of what must not leak, and after how many runs the slots of cancelled requests were free."""
        assert self.loop
        tasks = asyncio.run_coroutine_threadsafe(_tasks(), self.loop).result(30)
        pools = self.scheduler._pools
        return {
            "tasks": tasks,
            "threads": sorted(thread.name for thread in threading.enumerate()),
            "taken": sum(pool.slots for pool in self.engine._engine.plan.pools) - sum(len(pool.free) for pool in pools),
            "streams": self.engine._crossing.streams,
            "here": self.scheduler.arrivals,
            "freed_after": {str(count): times for count, times in sorted(self._freed_after.items())},
            "never_seated": self._never_seated,
            "runs": self._runs,
            "encoded": self._encoded,
        }

    # --- what the wrapped functions ask -------------------------------------------------------------------------------

    def due(self, phase: str, marked: Callable[[], bool]) -> Fault | None:
        """The fault that strikes here and now."""
        with self._lock:
            for fault in self._faults:
                if fault.phase == phase and fault.left > 0 and (not fault.marked or marked()):
                    if fault.skip > 0:
                        fault.skip -= 1
                        continue
                    fault.left -= 1
                    fault.fired += 1
                    return fault
        return None

    def strike(self, phase: str, marked: Callable[[], bool]) -> None:
        """Raises if a fault is due."""
        if self.due(phase, marked) is not None:
            raise Planted(f"planted in {phase}")

    def pass_by(self, where: str) -> None:
        """Waits here while something is held."""
        self._held[where].wait()

    def dispatched(self, kind: str, size: int) -> None:
        """A program has been started."""
        self._trace.append((kind, size))
        if kind == "run":
            self._runs += 1
            self._busy_until = max(time.monotonic(), self._busy_until) + self._pause

    def busy_until(self) -> float:
        """When the device is done with what has been dispatched, if it was slow."""
        return self._busy_until

    def encoding(self) -> None:
        """A text is about to become tokens."""
        self._encoded += 1

    def arrived(self) -> None:
        """A request has come: leaves behind what shall be left."""
        for what, size in tuple(self._leaks.items()):
            if what == "bytes":
                self._kept.append(bytearray(os.urandom(size)))
            for _ in range(size if what == "descriptor" else 0):
                self._kept.append(os.open(os.devnull, os.O_RDONLY))
            if what == "task" and self.loop:
                self._kept.append(asyncio.run_coroutine_threadsafe(asyncio.Event().wait(), self.loop))

    def cancelled(self, request_id: str) -> None:
        """The reader of a request has left."""
        self._cancelled_at[request_id] = self._runs

    def removed(self, scheduler: Any, running: Any, slot: int) -> None:
        """The scheduler has let a request go; it held ``slot``, or none (-1)."""
        at = self._cancelled_at.pop(running.request.id, None)
        self._never_seated += slot < 0
        if at is not None and slot >= 0:
            self._freed_after[self._runs - at] += 1
        if slot >= 0 and self._leaks["slot"]:
            self._leaks["slot"] -= 1
            scheduler._pools[running.pool].free.remove(slot)


async def _tasks() -> int:
    return len(asyncio.all_tasks())


def holds(tokens: Any) -> bool:
    """Whether token ids hold the mark."""
    ids = tuple(map(int, tokens))
    return any(ids[at : at + len(MARK)] == MARK for at in range(len(ids) - len(MARK) + 1))


def wrap(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Puts the decorated function, which gets the original first, in the place of ``owner.name``."""

    def put(around: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        setattr(owner, name, wrapped)

    return put


# --- the wrapped functions --------------------------------------------------------------------------------------------


def wrap_server(injector: Injector) -> None:
    """Parsing, tokenising, detokenising and the event loop."""
    from jaxserve.server import params
    from jaxserve.server.generation import Choice
    from jaxserve.server.serve import Server
    from jaxserve.text.tokenizer import Tokenizer

    @wrap(Server, "on_tick")
    async def on_tick(original: Any, self: Any, counter: int) -> Any:
        injector.loop = asyncio.get_running_loop()
        return await original(self, counter)

    @wrap(params, "sampling_params")
    def sampling_params(original: Any, wanted: Any, *args: Any) -> Any:
        injector.strike("validate", lambda: WORD in str(wanted))
        return original(wanted, *args)

    @wrap(Tokenizer, "encode")
    def encode(original: Any, self: Any, text: str, *args: Any, **kwargs: Any) -> Any:
        injector.strike("tokenise", lambda: WORD in text)
        injector.encoding()
        return original(self, text, *args, **kwargs)

    @wrap(Choice, "take")
    def take(original: Any, self: Any, delta: Any) -> Any:
        injector.strike("detokenise", lambda: holds(self.stream.request.prompt))
        return original(self, delta)


def wrap_engine(injector: Injector) -> None:
    """The crossing of threads, the scheduler and what is delivered."""
    from jaxserve.engine.async_engine import AsyncEngine
    from jaxserve.engine.crossing import Stream
    from jaxserve.engine.jax_device import JaxDevice
    from jaxserve.engine.scheduler import Scheduler

    @wrap(AsyncEngine, "__init__")
    def init(original: Any, self: Any, engine: Any) -> None:
        injector.engine, injector.scheduler = self, engine._scheduler
        original(self, engine)

    @wrap(Stream, "put")
    def put(original: Any, self: Any, delta: Any) -> None:
        injector.strike("callback", lambda: holds(self.request.prompt))
        original(self, delta)

    @wrap(Stream, "cancel")
    def cancel(original: Any, self: Any, *args: Any) -> None:
        if not self._done:
            injector.cancelled(self.request.id)
        original(self, *args)

    @wrap(Scheduler, "submit")
    def submit(original: Any, self: Any, request: Any, **kwargs: Any) -> Any:
        injector.strike("schedule", lambda: holds(request.prompt))
        injector.arrived()
        return original(self, request, **kwargs)

    @wrap(Scheduler, "schedule")
    def schedule(original: Any, self: Any, now: float) -> Any:
        injector.pass_by("host")
        injector.strike("tick", lambda: any(holds(one.request.prompt) for one in self._by_id.values()))
        return original(self, now)

    @wrap(JaxDevice, "admit")
    def admit(original: Any, self: Any, pool: int, slot: int, admission: Any) -> None:
        injector.strike("admit", lambda: holds(admission.request.prompt))
        original(self, pool, slot, admission)

    @wrap(Scheduler, "_remove")
    def remove(original: Any, self: Any, running: Any) -> None:
        slot = running.slot
        original(self, running)
        injector.removed(self, running, slot)


def wrap_programs(injector: Injector) -> None:
    """What runs on the device. A failure takes the donated state with it, as a real one does."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxserve.engine.jax_device import JaxFlight
    from jaxserve.engine.programs import Programs

    fresh: dict[tuple[int, int], bool] = {}  # slots read since they last started, and whether they are marked
    marked: set[tuple[int, int]] = set()
    executables: dict[Any, Any] = {}
    illegible: dict[int, list[int]] = {}  # an emission and the slots that cannot be taken out of it
    ready_at: dict[int, float] = {}  # an emission and when it is there

    def spoil(cache: Any, rows: Any) -> Any:
        def put(leaf: Any) -> Any:
            bad = leaf.dtype.type(0x7FC0) if leaf.dtype == jnp.uint16 else jnp.asarray(jnp.nan, leaf.dtype)
            return jnp.where(rows[:, None, None, None], bad, leaf)

        return jax.tree.map(put, cache)

    def refuse(length: Any) -> Any:
        if refuse.armed:  # type: ignore[attr-defined]
            raise Planted("planted on the device")
        return np.asarray(length)

    refuse.armed = False  # type: ignore[attr-defined]

    @wrap(Programs, "_trace")
    def trace(original: Any, self: Any, program: Any) -> Any:
        injector.strike("compile", lambda: program.bucket > min(self.plan.pools[program.pool].buckets))
        return original(self, program)

    @wrap(Programs, "compile")
    def compile_more(original: Any, self: Any, progress: Any) -> None:
        injector.programs = self
        original(self, progress)
        for pool in range(len(self.plan.pools)):
            state = jax.eval_shape(functools.partial(self.empty, pool))
            rows = jax.ShapeDtypeStruct((state.length.shape[0],), bool)
            executables["nan", pool] = jax.jit(spoil, donate_argnums=0).lower(state.cache, rows).compile()
            through = jax.jit(lambda length: jax.pure_callback(refuse, jax.typeof(length), length))
            executables["device", pool] = through.lower(state.length).compile()

    def break_on_device(fault: Fault, pool: int, state: Any) -> None:
        try:
            if fault.how == "device":
                refuse.armed = True  # type: ignore[attr-defined]
                jax.block_until_ready(executables["device", pool](state.length))
            if fault.how == "oom":
                raise jax.errors.JaxRuntimeError(OUT_OF_MEMORY)
            raise Planted(f"planted in {fault.phase}")
        finally:
            refuse.armed = False  # type: ignore[attr-defined]
            for leaf in jax.tree.leaves(state):
                leaf.delete()

    @wrap(Programs, "prefill")
    def prefill(
        original: Any, self: Any, pool: int, bucket: int, state: Any, slot: int, tokens: Any, start: int, count: int
    ) -> Any:
        injector.pass_by("device")
        injector.dispatched("prefill", bucket)
        if start == 0:
            fresh[pool, slot] = holds(tokens)
        fault = injector.due("prefill", lambda: holds(tokens))
        if fault is not None:
            break_on_device(fault, pool, state)
        return original(self, pool, bucket, state, slot, tokens, start, count)

    @wrap(Programs, "run")
    def run(original: Any, self: Any, pool: int, state: Any, control: Any, rows: Any, steps: int) -> Any:
        injector.pass_by("device")
        injector.dispatched("run", steps)
        for slot in map(int, np.flatnonzero(control.admit)):
            marked.discard((pool, slot))
            if fresh.pop((pool, slot), False):
                marked.add((pool, slot))
        kept = [int(slot) for slot in np.flatnonzero(control.keep | control.admit)]
        here = [slot for slot in kept if (pool, slot) in marked]
        fault = injector.due("decode", lambda: bool(here)) if kept else None
        if fault is not None and fault.how != "nan":
            break_on_device(fault, pool, state)
        state, emission = original(self, pool, state, control, rows, steps)
        if fault is not None:
            spoilt = np.isin(np.arange(len(control.keep)), here if fault.marked else kept)
            state = dataclasses.replace(state, cache=executables["nan", pool](state.cache, spoilt))
        if kept and injector.due("sample", lambda: bool(here)) is not None:
            emission = jax.tree.map(lambda _: Unreadable(), emission)
        if kept and injector.due("deliver", lambda: bool(here)) is not None:
            illegible[id(emission)] = here
        ready_at[id(emission)] = injector.busy_until()
        return state, emission

    @wrap(JaxFlight, "read")
    def read(original: Any, self: Any) -> Any:
        time.sleep(max(0.0, ready_at.pop(id(self.emission), 0.0) - time.monotonic()))
        log, slots = original(self), illegible.pop(id(self.emission), [])
        return Illegible(log, slots) if slots else log


# --- the process ------------------------------------------------------------------------------------------------------


def obey(injector: Injector, asked: dict[str, Any]) -> Any:
    """Does what a command says."""
    return getattr(injector, asked.pop("command"))(**asked)


def listen(path: Path, injector: Injector) -> None:
    """Answers commands, one connection after the other."""
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        while True:
            line, _ = listener.accept()
            with line, line.makefile("rw") as words:
                try:
                    answer = {"value": obey(injector, json.loads(words.readline()))}
                except Exception as error:  # noqa: BLE001 - whoever asked is told
                    answer = {"error": f"{type(error).__name__}: {error}"}
                words.write(json.dumps(answer) + "\n")


def main() -> None:
    """``python -m tests.rigs.faulty SOCKET`` and then the arguments of ``jaxserve``."""
    from jaxserve import cli
    from jaxserve.cli import running

    path, arguments = Path(sys.argv[1]), sys.argv[2:]

    @wrap(running, "_relaunch_tuned")
    def relaunch(original: Any, config: Any) -> None:
        original(config)  # may start this process anew, with the same arguments
        injector = Injector()
        wrap_server(injector)
        wrap_engine(injector)
        wrap_programs(injector)
        for command in json.loads(os.environ.get(PLANT, "[]")):
            obey(injector, command)
        threading.Thread(target=listen, args=(path, injector), name="injector", daemon=True).start()

    sys.exit(cli.run(arguments))


if __name__ == "__main__":
    main()
