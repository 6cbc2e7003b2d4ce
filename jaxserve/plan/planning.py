"""The plan: every static shape and every byte, decided before a weight is read.

Knows pools, buckets, programs and what each costs in the memory of one device. It is arithmetic on a model's shape, a
mesh and the configuration, and it refuses what cannot fit with the numbers.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from functools import cached_property
from typing import Literal

from jaxserve.axes import ONE_DEVICE, MeshShape
from jaxserve.config import EngineConfig
from jaxserve.errors import PlanError
from jaxserve.plan import memory
from jaxserve.plan.exchange import exchanged_from
from jaxserve.plan.programs import PoolPlan, Program
from jaxserve.plan.shapes import ModelShape

# Chunk lengths of a prompt. Each divides the next, and a prompt is cut largest first: a chunk then always starts at a
# multiple of its own length, and the padded last one never passes the end of its slot.
BUCKETS = (32, 128, 512)
# XLA:CPU converts the whole weight matrix at each product with a single bf16 row: a program has two rows at least.
MIN_ROWS = 2
STEPS_PER_DISPATCH = 4
# Beside what a request may name, its row holds the tokens that end any text of the model.
MODEL_STOP_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that is compiled and everything that is allocated.

    Attributes:
        dtype: of weights, activations and cache; ``dtype_bytes`` is its size.
        memory_limit: bytes that each device offers, ``memory_headroom`` of which (a share) stays free.
        mesh: devices that share the model; bytes are those of one of them.
        devices: how many there are.
        widths: tokens that a decoding pass may read in each row, ascending.
        hands: requests bring something along for the decoding strategy.
        decodes: the strategy in a word, as metrics have it.
        compiled_workspace: what the compiler says that its hungriest program needs; ``None`` before it was asked.
        expert_product, exchange: the settings ``engine.expert_product`` and ``mesh.exchange_tokens``.
        native_kernels: whether ``engine.native_kernels`` allows them.
        multiplies: what multiplies with experts on the planned device, in a word; ``None`` if nobody has said.
    """

    model: ModelShape
    pools: tuple[PoolPlan, ...]
    steps_per_dispatch: int
    max_logprobs: int
    max_logit_bias: int
    max_stop_token_ids: int
    max_input_tokens: int
    max_output_tokens: int
    dtype: str
    dtype_bytes: int
    memory_limit: int
    memory_headroom: float
    mesh: MeshShape = ONE_DEVICE
    devices: int = 1
    widths: tuple[int, ...] = (1,)
    hands: bool = False
    decodes: str = "autoregressive"
    compiled_workspace: int | None = None
    expert_product: str = "auto"
    exchange: int | Literal["auto"] | None = "auto"
    native_kernels: bool = True
    multiplies: str | None = None

    @property
    def max_length(self) -> int:
        """Tokens, prompt and output, of the longest request that can be served."""
        return max(pool.length for pool in self.pools)

    @property
    def stop_width(self) -> int:
        """Stop tokens that a row holds."""
        return self.max_stop_token_ids + MODEL_STOP_TOKENS

    def programs(self) -> tuple[Program, ...]:
        """Every program that will ever run; the engine compiles exactly these."""

        def of_pool(index: int, pool: PoolPlan) -> Iterator[Program]:
            yield from (Program("prefill", index, bucket) for bucket in pool.buckets)
            yield Program("run", index)
            if self.hands:
                yield Program("hand", index)
            if pool.slots > 1:
                yield Program("fork", index)
            yield Program("scrub", index)

        return tuple(program for index, pool in enumerate(self.pools) for program in of_pool(index, pool))

    @property
    def exchange_tokens(self) -> int | None:
        """Tokens of a pass from which on each goes to the devices of its experts only; ``None`` is never."""
        if self.exchange == "auto":
            return exchanged_from(self.model.width, self.model.chosen, self.mesh.expert)
        return self.exchange

    def pool_for(self, length: int) -> int | None:
        """Index of the smallest pool that holds ``length`` tokens; the request alone decides, never the load."""
        fitting = [(pool.length, index) for index, pool in enumerate(self.pools) if pool.length >= length]
        return min(fitting)[1] if fitting else None

    # --- bytes of one device ------------------------------------------------------------------------------------------

    @cached_property
    def weights_by_kind(self) -> dict[str, int]:
        """The weights, kind by kind, the largest first."""
        return memory.weights_by_kind(self.model, self.dtype_bytes, self.mesh)

    @property
    def weight_bytes(self) -> int:
        """All weights."""
        return sum(self.weights_by_kind.values())

    def cache_bytes(self, pool: PoolPlan) -> int:
        """What the layers keep of a pool's slots."""
        return memory.cache_bytes(self.model, pool, self.dtype_bytes, self.mesh)

    def state_bytes(self, pool: PoolPlan) -> int:
        """Token history, sampling rows and the log of a dispatch."""
        widths = 2 * self.max_logit_bias + self.stop_width + 16
        return memory.state_bytes(pool, widths, self.steps_per_dispatch * self.widths[-1] * (4 + 2 * self.max_logprobs))

    @property
    def workspace_bytes(self) -> int:
        """What the hungriest program needs beside its arguments: the compiler's figure, else an upper estimate."""
        if self.compiled_workspace is not None:
            return self.compiled_workspace
        return memory.workspace_bytes(self.model, self.pools, self.widths[-1])

    @property
    def total_bytes(self) -> int:
        """All of it."""
        pools = sum(self.cache_bytes(pool) + self.state_bytes(pool) for pool in self.pools)
        return self.weight_bytes + pools + self.workspace_bytes

    @property
    def usable_bytes(self) -> int:
        """What the plan may take."""
        return int(self.memory_limit * (1 - self.memory_headroom))

    @property
    def fits(self) -> bool:
        """Whether it may be had."""
        return self.total_bytes <= self.usable_bytes

    def describe(self) -> str:
        """The plan as a table for people."""
        mesh, model = self.mesh, self.model
        where = f", on each of {mesh.devices} devices (expert x tensor {mesh})" if mesh.devices > 1 else ""
        unsplit = memory.unsplit_by_kind(model, self.dtype_bytes, mesh)
        workspace = "workspace (estimate)" if self.compiled_workspace is None else "workspace (compiled)"
        free = self.memory_limit - self.total_bytes
        lines = [
            line("weights", self.weight_bytes, f"{model.parameters / 1e6:,.1f} M x {self.dtype}{where}"),
            *(line(f"  {kind}", count) for kind, count in self.weights_by_kind.items()),
            *([line("  of it unsplit", sum(unsplit.values()), ", ".join(unsplit))] if unsplit else []),
            *(
                line(
                    f"cache, pool {pool}",
                    self.cache_bytes(pool),
                    f"{pool.rows} rows x {pool.positions} positions, chunks of {', '.join(map(str, pool.buckets))}",
                )
                for pool in self.pools
            ),
            line("state", sum(map(self.state_bytes, self.pools))),
            line(workspace, self.workspace_bytes),
            line("total", self.total_bytes, f"of {gib(self.usable_bytes)} usable"),
            line("free", free, f"of {gib(self.memory_limit)}, {self.memory_headroom:.0%} of which stay so"),
            *self._of_experts(),
            f"programs: {len(self.programs())}",
            *(f"  {program}" for program in self.programs()),
        ]
        return "\n".join(text.rstrip() for text in lines)

    def _of_experts(self) -> list[str]:
        """What multiplies with experts, and which passes send each token to its experts' devices only."""
        if self.model.chosen == 0:
            return []
        lines = [] if self.multiplies is None else [f"experts: multiplied by {self.multiplies}"]
        if self.mesh.expert > 1:
            least = math.inf if self.exchange_tokens is None else self.exchange_tokens
            steps = {pool.rows * width for pool in self.pools for width in self.widths}
            sizes = steps.union(*(pool.buckets for pool in self.pools))
            sent = ", ".join(str(size) for size in sorted(sizes) if size >= least)
            where = "to all devices" if not sent else f"to all devices, in passes of {sent} to their experts' only"
            lines.append(f"tokens: {where}")
        return lines


def draft_plan(
    model: ModelShape,
    engine: EngineConfig,
    *,
    dtype: str,
    dtype_bytes: int,
    memory_limit: int,
    mesh: MeshShape = ONE_DEVICE,
    devices: int = 1,
    exchange: int | Literal["auto"] | None = "auto",
) -> Plan:
    """A plan that may be too large for ``devices`` devices of ``memory_limit`` bytes each; ``fitting`` checks it.

    Raises:
        PlanError: a pool or bucket that cannot be.
    """
    longest = max(pool.length for pool in engine.pools)
    return Plan(
        model=model,
        pools=plan_pools(engine, model),
        steps_per_dispatch=STEPS_PER_DISPATCH if engine.steps_per_dispatch == "auto" else engine.steps_per_dispatch,
        max_logprobs=min(engine.max_logprobs, model.vocab_size),
        max_logit_bias=engine.max_logit_bias,
        max_stop_token_ids=engine.max_stop_token_ids,
        max_input_tokens=longest - 1 if engine.max_input_tokens == "auto" else engine.max_input_tokens,
        max_output_tokens=longest - 1 if engine.max_output_tokens == "auto" else engine.max_output_tokens,
        dtype=dtype,
        dtype_bytes=dtype_bytes,
        memory_limit=engine.memory_limit_bytes if engine.memory_limit_bytes != "auto" else memory_limit,
        memory_headroom=engine.memory_headroom,
        mesh=mesh,
        devices=devices,
        expert_product=engine.expert_product,
        native_kernels=engine.native_kernels == "auto",
        exchange=exchange,
    )


def plan_pools(engine: EngineConfig, model: ModelShape) -> tuple[PoolPlan, ...]:
    """The static shapes of the configured pools.

    Raises:
        PlanError: a pool or bucket that cannot be.
    """
    buckets = BUCKETS if engine.prefill_buckets == "auto" else tuple(sorted(engine.prefill_buckets))
    if not buckets:
        raise PlanError("engine.prefill_buckets: at least one is needed", param="engine.prefill_buckets")
    for small, large in itertools.pairwise(buckets):
        if large % small or large == small:
            raise PlanError(
                f"engine.prefill_buckets: each must divide the next, {small} and {large} don't",
                param="engine.prefill_buckets",
            )
    return tuple(plan_pool(pool.slots, pool.length, buckets, model) for pool in engine.pools)


def plan_pool(slots: int, length: int, buckets: tuple[int, ...], model: ModelShape) -> PoolPlan:
    """The static shapes of one pool."""
    if length > model.max_positions:
        raise PlanError(
            f"engine.pools: pool {slots}x{length} is longer than the {model.max_positions} positions of the model",
            param="engine.pools",
        )
    fitting = tuple(bucket for bucket in buckets if bucket <= length) or buckets[:1]
    needed = length + model.beyond
    unit = math.lcm(fitting[-1], model.key_block) if needed > model.key_block else fitting[-1]
    positions = -(-needed // unit) * unit
    return PoolPlan(slots, length, max(slots, MIN_ROWS), positions, fitting, model.block)


def line(what: str, count: int, remark: str = "") -> str:
    """A row of the table."""
    return f"{what:<28}{gib(count):>12}  {remark}"


def gib(count: int) -> str:
    """Bytes in words."""
    return f"{count / 2**30:,.3f} GiB"
