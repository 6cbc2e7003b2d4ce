"""Toys to test with, shipped so that others can test their families: a tiny random model and an engine around it,
and a device that is a hash.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxserve.axes import ONE_DEVICE, MeshShape
from jaxserve.config import EngineConfig, Pool
from jaxserve.decode.strategies import facts, planned_strategy, strategy_of
from jaxserve.engine.device import Admission, Progress
from jaxserve.engine.engine import Engine
from jaxserve.engine.jax_device import JaxDevice
from jaxserve.engine.metrics import Metrics
from jaxserve.engine.programs import Programs
from jaxserve.engine.request import Pass, Request, TokenLogprob
from jaxserve.engine.scheduler import Policy
from jaxserve.engine.work import Emitted
from jaxserve.models.family import Family, family_of
from jaxserve.models.weights import nest, params_of
from jaxserve.plan import CacheShape, Chunk, ModelShape, Plan, WeightShape, make_plan
from jaxserve.sharding import make_mesh, sharding

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
TINY_BLOCKS: dict[str, Any] = TINY | {
    "model_type": "sdar",
    "vocab_size": 260,  # and a mask
    "head_dim": 8,
    "block_size": 8,
    "mask_token_id": 259,
    "threshold": 0.3,
    "editing_threshold": 0.4,
    "max_post_steps": 3,
    "tie_word_embeddings": False,
}


def random_leaves(family: Family, seed: int = 0, dtype: DTypeLike = jnp.float32) -> dict[str, jax.Array]:
    """A checkpoint's leaves by path, with enough spread that the next token depends on everything before it."""
    key = jax.random.key(seed)
    leaves = {}
    for index, rule in enumerate(family.rules):
        own = jax.random.fold_in(key, index)
        if rule.dtype == "uint8":  # packed: any bits are numbers; as factors, powers of two a little below one
            bits = jax.random.bits(own, rule.shape, jnp.uint8)
            leaves[rule.param] = 122 + bits % 3 if rule.param.endswith("scales") else bits
            continue
        draw = jax.random.normal(own, rule.shape, jnp.float32)
        scale = 1 + 0.1 * draw if rule.param.endswith(("scale", "scales")) else 0.25 * draw
        leaves[rule.param] = scale.astype(rule.dtype or dtype).view(rule.held(dtype))
    return leaves


def random_params(
    family: Family, seed: int = 0, dtype: DTypeLike = jnp.float32, mesh: Mesh | None = None
) -> dict[Any, Any]:
    """The same as the module's parameters, where a mesh wants them."""
    leaves = random_leaves(family, seed, dtype)
    if mesh is not None:
        for rule in family.rules:
            leaves[rule.param] = jax.device_put(leaves[rule.param], sharding(mesh, rule.axes, rule.shape))
    return params_of(nest(leaves))


def tiny_plan(
    family: Family, pools: tuple[Pool, ...] = (Pool(4, 128),), mesh: MeshShape = ONE_DEVICE, **settings: Any
) -> Plan:
    """A plan for a tiny model in float32; without drafts, which take as long again to compile, unless they are set."""
    config, devices = EngineConfig(pools=pools, **settings), mesh.devices
    plan = make_plan(
        family.shape, config, dtype="float32", dtype_bytes=4, memory_limit=2**32, mesh=mesh, devices=devices
    )
    return dataclasses.replace(
        plan,
        **facts(strategy_of(family, jnp.float32, plan.max_logprobs, drafts=settings.get("draft_tokens", ())), family),
    )


def tiny_engine(
    pools: tuple[Pool, ...] = (Pool(4, 128),),
    *,
    hf: dict[str, Any] | None = None,
    seed: int = 0,
    eos: tuple[int, ...] = (TINY_EOS,),
    policy: Policy | None = None,
    metrics: Metrics | None = None,
    mesh: MeshShape = ONE_DEVICE,
    **settings: Any,
) -> Engine:
    """A compiled engine around a tiny random model."""
    family = family_of(hf or TINY)
    plan = tiny_plan(family, pools, mesh, **settings)
    devices = None if mesh.devices == 1 else make_mesh(mesh.expert, mesh.tensor)
    params = random_params(family, seed, mesh=devices)
    graphdef: nnx.GraphDef[Any] = family.graphdef(jnp.float32)
    programs = Programs(plan, family, graphdef, params, planned_strategy(plan, family), devices)
    slots = sum(pool.slots for pool in plan.pools)
    engine = Engine(JaxDevice(programs), policy or Policy(slots, 256, 60.0, 600.0, 0.0), eos=eos, metrics=metrics)
    engine.warm_up()
    return engine


# --- a device that is a hash ------------------------------------------------------------------------------------------


MARKS = 4


def hash_plan(*pools: Pool, vocab_size: int = 200, **settings: Any) -> Plan:
    """A plan for a device that is a hash; ``settings`` are those of the section ``engine``."""
    shape = ModelShape(
        vocab_size,
        weights=(WeightShape("all", (1000,), (None,)),),
        cache=(CacheShape(per_position=8),),
        max_positions=4096,
        widest=8,
        heads=2,
        key_block=16,
    )
    config = EngineConfig(**{"pools": pools or (Pool(2, 64),), "prefill_buckets": (16, 32), **settings})
    return make_plan(shape, config, dtype="float32", dtype_bytes=4, memory_limit=2**40)


def hash_entry(before: int, token: int) -> int:
    """The cache entry of a token behind an entry: it stands for everything up to there."""
    return ((before ^ token) * 0x100000001B3 + 1) & (2**64 - 1)


def hash_token(entry: int, seed: int, vocab_size: int) -> int:
    """The token that follows; the first ``MARKS`` ids never do, so that a test can mark prompts with them."""
    return MARKS + (entry ^ seed * 0x9E3779B97F4A7C15) % 1_000_003 % (vocab_size - MARKS)


def hash_tokens(request: Request, seed: int, vocab_size: int, stop_ids: Sequence[int]) -> Iterator[int]:
    """What a request must be answered, by no device at all."""
    entry = 0
    for token in request.prompt:
        entry = hash_entry(entry, token)
    for _ in range(request.sampling.max_tokens):
        token = hash_token(entry, seed, vocab_size)
        yield token
        if token in stop_ids:
            return
        entry = hash_entry(entry, token)


@dataclasses.dataclass(slots=True)
class HashSlot:
    """What stands in a slot.

    Attributes:
        entries: of every position, as attention keeps them.
        state: that of the last position alone, as a recurrent layer keeps it.
        dirty: a non-finite number, until it is scrubbed.
    """

    tokens: list[int]
    entries: list[int]
    state: int = 0
    length: int = 0
    known: int = 0
    active: bool = False
    dirty: bool = False
    seed: int = 0
    limit: int = 0
    stop_ids: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class HashFlight:
    """A dispatch under way, and its log."""

    emitted: dict[int, Emitted]
    fault: Exception | None

    def read(self) -> HashFlight:
        """Raises what went wrong since the last reset."""
        if self.fault is not None:
            raise self.fault
        return self

    def of(self, slot: int, logprobs: int | None) -> Emitted:
        """One slot's part."""
        given = self.emitted[slot]
        return given if logprobs is not None else dataclasses.replace(given, logprobs=())

    def passes(self, slot: int) -> tuple[Pass, ...]:  # noqa: ARG002
        """It tells nothing of them."""
        return ()


class HashDevice:
    """``engine.device.Device`` whose next token is a hash of what stands in the slot.

    A leaked, lost or swapped token, an entry that was not written, a slot that was not scrubbed: each changes what
    comes out. It shares nothing with a real device but the promise.

    Args:
        fault: given ``prefill``, ``fork`` or ``run`` and the texts in it, may return what the device throws.
        finite: given a text, whether its numbers are.

    Attributes:
        lost: what went wrong since the last reset.
    """

    def __init__(
        self,
        plan: Plan,
        fault: Callable[[str, Sequence[Sequence[int]]], Exception | None] = lambda kind, texts: None,  # noqa: ARG005
        finite: Callable[[Sequence[int]], bool] = lambda text: True,  # noqa: ARG005
    ) -> None:
        self.plan = plan
        self._fault = fault
        self._finite = finite
        self.lost: Exception | None = None
        self.reset()

    def warm_up(self, progress: Progress, on_compile: Callable[[], None]) -> float:  # noqa: ARG002
        """Nothing to compile."""
        return 0.0

    def reset(self) -> None:
        """Every pool empty."""
        self.lost = None
        self.pools = [
            [HashSlot([0] * pool.positions, [0] * pool.positions) for _ in range(pool.slots)]
            for pool in self.plan.pools
        ]

    def prefill(self, pool: int, slot: int, chunk: Chunk, tokens: Sequence[int]) -> None:
        """Writes a chunk's tokens, its padding's too, and the entries of its tokens."""
        held = self.pools[pool][slot]
        padded = [*tokens[chunk.start : chunk.start + chunk.bucket]]
        padded += [0] * (chunk.bucket - len(padded))
        held.tokens[chunk.start : chunk.start + chunk.bucket] = padded
        for at in range(chunk.start, chunk.start + chunk.bucket):
            held.entries[at] = hash_entry(held.entries[at - 1] if at else 0, held.tokens[at])
        for at in range(chunk.start, chunk.start + chunk.count):
            held.state = hash_entry(held.state if at else 0, held.tokens[at])
        held.length = held.known = chunk.start + chunk.count
        held.active = False
        self._happen("prefill", [held.tokens[: held.known]])

    def fork(self, pool: int, source: int, target: int) -> None:
        """Copies a slot as it stands."""
        held = self.pools[pool][source]
        tokens, entries = list(held.tokens), list(held.entries)
        self.pools[pool][target] = dataclasses.replace(held, tokens=tokens, entries=entries, active=False)
        self._happen("fork", [tokens[: held.known]])

    def admit(self, pool: int, slot: int, admission: Admission) -> None:
        """Only one pending token is handed over; what else is known must stand there."""
        held, request = self.pools[pool][slot], admission.request
        held.length, held.known, held.active = admission.length, len(admission.tokens), True
        held.tokens[held.length] = admission.tokens[held.length]
        held.seed, held.stop_ids = admission.seed, frozenset(admission.stop_ids)
        held.limit = len(request.prompt) + request.sampling.max_tokens

    def run(self, pool: int, slots: Iterable[int], steps: int) -> HashFlight:
        """Steps, one slot after the other."""
        keep = set(slots)
        for index, held in enumerate(self.pools[pool]):
            held.active = held.active and index in keep
        texts = [held.tokens[: held.known] for held in self.pools[pool] if held.active]
        emitted = {slot: self._steps(self.pools[pool][slot], steps) for slot in sorted(keep)}
        self._happen("run", texts)
        return HashFlight(emitted, self.lost)

    def clear(self, pool: int, slot: int) -> None:
        """Nothing but rows."""

    def scrub(self, pool: int, slot: int) -> None:
        """The slot is as new."""
        held = self.pools[pool][slot]
        self.pools[pool][slot] = HashSlot([0] * len(held.tokens), [0] * len(held.entries))

    def wait(self, pools: Iterable[int]) -> None:  # noqa: ARG002
        """Raises what went wrong."""
        if self.lost is not None:
            raise self.lost

    def _happen(self, kind: str, texts: Sequence[Sequence[int]]) -> None:
        self.lost = self.lost or self._fault(kind, texts)

    def _steps(self, held: HashSlot, steps: int) -> Emitted:
        new: list[int] = []
        for _ in range(steps):
            if not held.active:
                break
            if held.dirty or not self._finite(held.tokens[: held.known]):
                held.dirty, held.active = True, False
                return Emitted(tuple(new), (), finite=False)
            at = held.length
            held.entries[at] = hash_entry(held.entries[at - 1] if at else 0, held.tokens[at])
            held.state = hash_entry(held.state if at else 0, held.tokens[at])
            held.length += 1
            if held.known > held.length:
                continue
            entry = held.entries[at]
            token = hash_token(entry if entry == held.state else ~entry, held.seed, self.plan.model.vocab_size)
            new.append(token)
            if held.known < held.limit - 1 and token not in held.stop_ids:
                held.tokens[held.known] = token
            else:
                held.active = False
            held.known += 1
        scores = tuple(TokenLogprob(token, -token / 1000) for token in new)
        return Emitted(tuple(new), scores, finite=True)
