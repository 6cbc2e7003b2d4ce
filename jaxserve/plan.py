"""Every static shape and every byte, decided before a weight is read.

Knows pools, buckets, programs and what each costs in memory. Knows no JAX: it is arithmetic on a model's shape and
the configuration, and it refuses what cannot fit with the numbers.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Literal

from jaxserve.config import EngineConfig
from jaxserve.errors import PlanError

# Chunk lengths of a prompt. Each divides the next, and a prompt is cut largest first: a chunk then always starts at a
# multiple of its own length, and the padded last one never passes the end of its slot.
BUCKETS = (32, 128, 512)
# XLA:CPU converts the whole weight matrix at each product with a single bf16 row: a program has two rows at least.
MIN_ROWS = 2
STEPS_PER_DISPATCH = 4
# Beside what a request may name, its row holds the tokens that end any text of the model.
MODEL_STOP_TOKENS = 16
FLOAT32 = 4
INT32 = 4


DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "int8": 1, "float8_e4m3fn": 1}


@dataclasses.dataclass(frozen=True, slots=True)
class WeightShape:
    """One weight; ``dtype`` is ``None`` where it follows the model's."""

    param: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: str | None = None

    @property
    def numbers(self) -> int:
        """How many there are in it."""
        return math.prod(self.shape)

    def bytes(self, dtype_bytes: int) -> int:
        """Its size, where the model's numbers have so many bytes."""
        return self.numbers * (dtype_bytes if self.dtype is None else DTYPE_BYTES[self.dtype])


@dataclasses.dataclass(frozen=True, slots=True)
class CacheShape:
    """What one layer keeps of one slot.

    Attributes:
        per_position: numbers of one position.
        most: positions that are kept at most; ``None`` keeps all.
        fixed: numbers that stand for all positions.
        fixed_float32: further ones, in float32 whatever the model's dtype.
        heads: key heads among which all of it divides.
    """

    per_position: int = 0
    most: int | None = None
    fixed: int = 0
    fixed_float32: int = 0
    heads: int = 1

    def bytes(self, positions: int, dtype_bytes: int) -> int:
        """Size for a slot of so many positions."""
        kept = positions if self.most is None else min(self.most, positions)
        return (self.per_position * kept + self.fixed) * dtype_bytes + self.fixed_float32 * FLOAT32


@dataclasses.dataclass(frozen=True, slots=True)
class ModelShape:
    """What the plan needs to know of a model.

    Attributes:
        weights: all of them.
        cache: what each layer keeps.
        max_positions: longest sequence that the model was made for.
        widest: largest of the sizes that one token's activations take (ffn, heads x head size, width).
        heads: query heads.
        key_block: cached positions that attention reads at a time.
    """

    vocab_size: int
    weights: tuple[WeightShape, ...]
    cache: tuple[CacheShape, ...]
    max_positions: int
    widest: int
    heads: int
    key_block: int

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(weight.numbers for weight in self.weights)


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a prompt: ``count`` tokens from ``start`` on, padded to ``bucket``."""

    start: int
    count: int
    bucket: int


@dataclasses.dataclass(frozen=True, slots=True)
class PoolPlan:
    """One pool's static shapes.

    Attributes:
        slots: requests side by side.
        length: tokens, prompt and output, that a request of this pool may have.
        rows: rows of the compiled programs; more than ``slots`` only where a single row would be slow.
        positions: cache positions of a row; ``length`` rounded up to whole chunks and key blocks.
        buckets: chunk lengths, ascending.
    """

    slots: int
    length: int
    rows: int
    positions: int
    buckets: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.slots}x{self.length}"

    def chunks(self, count: int) -> tuple[Chunk, ...]:
        """How ``count`` prompt tokens are read; depends on nothing else, so a request's numbers don't either.

        A chunk is padded at most to twice its tokens, unless it is the smallest.
        """
        chunks, start = [], 0
        while (left := count - start) > 0:
            fitting = [bucket for bucket in self.buckets if bucket >= left]
            if not fitting or (fitting[0] > 2 * left and fitting[0] != self.buckets[0]):
                bucket = max(bucket for bucket in self.buckets if bucket <= left)
            else:
                bucket = fitting[0]
            chunks.append(Chunk(start, min(bucket, left), bucket))
            start += bucket
        return tuple(chunks)

    def chunks_again(self, prompt: int, known: int) -> tuple[Chunk, ...]:
        """How a request whose cache is lost is read again: ``known`` tokens, ``prompt`` of them its prompt.

        The chunks of the prompt come last and are those of the first time, so that its entries are the same numbers.
        What was generated is read before only to put the tokens there; decode steps then read it once more, one by
        one, as they did at first.
        """
        own = self.chunks(prompt - 1)
        if known == prompt:
            return own
        covered = own[-1].start + own[-1].bucket if own else 0
        return tuple(chunk for chunk in self.chunks(known) if chunk.start + chunk.count > covered) + own


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """One executable of one pool.

    ``prefill`` reads a chunk of one length, ``run`` does several decode steps, ``scrub`` empties a slot.
    """

    kind: Literal["prefill", "run", "scrub"]
    pool: int
    bucket: int = 0

    def __str__(self) -> str:
        return f"{self.kind} pool {self.pool}" + (f" bucket {self.bucket}" if self.bucket else "")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that is compiled and everything that is allocated.

    Attributes:
        dtype: of weights, activations and cache; ``dtype_bytes`` is its size.
        memory_limit: bytes that the device offers, ``memory_headroom`` of which (a share) stays free.
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
            yield Program("scrub", index)

        return tuple(program for index, pool in enumerate(self.pools) for program in of_pool(index, pool))

    def pool_for(self, length: int) -> int | None:
        """Index of the smallest pool that holds ``length`` tokens; the request alone decides, never the load."""
        fitting = [(pool.length, index) for index, pool in enumerate(self.pools) if pool.length >= length]
        return min(fitting)[1] if fitting else None

    # --- bytes --------------------------------------------------------------------------------------------------------

    @property
    def weight_bytes(self) -> int:
        """All weights, once."""
        return sum(weight.bytes(self.dtype_bytes) for weight in self.model.weights)

    def cache_bytes(self, pool: PoolPlan) -> int:
        """What the layers keep of a pool's slots."""
        return pool.rows * sum(layer.bytes(pool.positions, self.dtype_bytes) for layer in self.model.cache)

    def state_bytes(self, pool: PoolPlan) -> int:
        """Token history, sampling rows and the log of a dispatch."""
        widths = 2 * self.max_logit_bias + self.stop_width + 16
        log = self.steps_per_dispatch * (4 + 2 * self.max_logprobs)
        return pool.rows * (pool.positions + widths + log) * INT32

    @property
    def workspace_bytes(self) -> int:
        """An upper estimate of what the hungriest program needs beside its arguments.

        One layer's activations and attention scores of a pass, in float32 and twice over; for a run also a few copies
        of the logits. The compiler's own figure is known only after compilation.
        """
        model = self.model

        def activations(rows: int, tokens: int, positions: int) -> int:
            scores = model.heads * max(tokens, min(model.key_block, positions))
            return 2 * rows * tokens * (4 * model.widest + 2 * scores) * FLOAT32

        needs = [activations(1, bucket, pool.positions) for pool in self.pools for bucket in pool.buckets]
        needs += [
            activations(pool.rows, 1, pool.positions) + 6 * pool.rows * model.vocab_size * FLOAT32
            for pool in self.pools
        ]
        return max(needs)

    @property
    def total_bytes(self) -> int:
        """All of it."""
        pools = sum(self.cache_bytes(pool) + self.state_bytes(pool) for pool in self.pools)
        return self.weight_bytes + pools + self.workspace_bytes

    @property
    def usable_bytes(self) -> int:
        """What the plan may take."""
        return int(self.memory_limit * (1 - self.memory_headroom))

    def check(self) -> None:
        """Refuses a plan that does not fit.

        Raises:
            PlanError: with the numbers, and what would fit.
        """
        over = self.total_bytes - self.usable_bytes
        if over <= 0:
            return
        per_slot = max(self.cache_bytes(pool) // pool.rows for pool in self.pools)
        spare = sum(pool.slots - 1 for pool in self.pools)
        fewer = math.ceil(over / per_slot)
        hint = f"{fewer} slots fewer would fit" if fewer <= spare else "no number of slots fits"
        raise PlanError(
            f"the plan needs {_gib(self.total_bytes)} (weights {_gib(self.weight_bytes)}, "
            f"cache {_gib(sum(map(self.cache_bytes, self.pools)))}, workspace {_gib(self.workspace_bytes)}), "
            f"but {_gib(self.memory_limit)} less {self.memory_headroom:.0%} headroom leaves "
            f"{_gib(self.usable_bytes)}: {hint}",
            param="engine.pools",
        )

    def describe(self) -> str:
        """The plan as a table for people."""
        lines = [
            f"{'weights':<28}{_gib(self.weight_bytes):>12}  {self.model.parameters / 1e6:,.1f} M x {self.dtype}",
            *(
                f"{f'cache, pool {pool}':<28}{_gib(self.cache_bytes(pool)):>12}  "
                f"{pool.rows} rows x {pool.positions} positions, chunks of {', '.join(map(str, pool.buckets))}"
                for pool in self.pools
            ),
            f"{'state':<28}{_gib(sum(map(self.state_bytes, self.pools))):>12}",
            f"{'workspace (estimate)':<28}{_gib(self.workspace_bytes):>12}",
            f"{'total':<28}{_gib(self.total_bytes):>12}  of {_gib(self.usable_bytes)} usable",
            f"programs: {len(self.programs())}",
            *(f"  {program}" for program in self.programs()),
        ]
        return "\n".join(lines)


def make_plan(model: ModelShape, engine: EngineConfig, *, dtype: str, dtype_bytes: int, memory_limit: int) -> Plan:
    """Plans for a model, a configuration and a device with ``memory_limit`` bytes.

    Raises:
        PlanError: a pool or bucket that cannot be, or more bytes than there are.
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
    pools = tuple(_plan_pool(pool.slots, pool.length, buckets, model) for pool in engine.pools)
    longest = max(pool.length for pool in pools)
    plan = Plan(
        model=model,
        pools=pools,
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
    )
    plan.check()
    return plan


def _plan_pool(slots: int, length: int, buckets: tuple[int, ...], model: ModelShape) -> PoolPlan:
    if length > model.max_positions:
        raise PlanError(
            f"engine.pools: pool {slots}x{length} is longer than the {model.max_positions} positions of the model",
            param="engine.pools",
        )
    fitting = tuple(bucket for bucket in buckets if bucket <= length) or buckets[:1]
    unit = math.lcm(fitting[-1], model.key_block) if length > model.key_block else fitting[-1]
    positions = -(-length // unit) * unit
    return PoolPlan(slots, length, max(slots, MIN_ROWS), positions, fitting)


def _gib(count: int) -> str:
    return f"{count / 2**30:,.3f} GiB"
