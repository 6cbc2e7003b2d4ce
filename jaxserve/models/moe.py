"""A mixture of experts as a feed-forward part: the router, the experts' weights, the shared expert.

Knows how experts are chosen and how files name and lay out what they hold. How tokens meet the chosen experts is in
``experts``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxserve.errors import CheckpointError
from jaxserve.models.experts import ExpertWeights, routed
from jaxserve.models.feed_forward import MLPConfig
from jaxserve.models.hf_fields import need
from jaxserve.models.layers import GLUS, Linear, activation_from_hf, parameter, product
from jaxserve.models.passes import Pass
from jaxserve.models.quant import held
from jaxserve.models.weights import Piece, Rule, rule

Way = tuple[Piece, ...]

SOFTMAX, SOFTMAX_CHOSEN, SIGMOID = "softmax", "softmax_chosen", "sigmoid"


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """How a token chooses its experts.

    Attributes:
        kind: ``softmax`` over all experts, then the largest (Qwen3-MoE, Mixtral); ``softmax_chosen`` over the chosen
            ones only (gpt-oss); ``sigmoid`` of each by itself (DeepSeek-V3, GLM-4.5).
        renormalise: what is chosen weighs 1 together.
        scale: factor on the weights, after that.
        bias: on the scores.
        correction: a number of each expert that counts in the choice and not in the weight (Wang et al. 2024).
        groups, chosen_groups: experts stand in groups, and only those of the groups with the largest sums of their two
            best can be chosen.
        pool: the tokens of a block choose among so many experts only, those that rank highest at any of them
            (LLaDA2.2's block routing); ``None`` where each chooses among all.
        block: positions of a block; passes begin where one does.
        exact: its weights are float32 whatever the model's dtype.
        name, correction_name: in files, behind the block's name.
    """

    kind: str = SOFTMAX
    renormalise: bool = True
    scale: float = 1.0
    bias: bool = False
    correction: bool = False
    groups: int = 1
    chosen_groups: int = 1
    pool: int | None = None
    block: int = 1
    exact: bool = False
    name: str = "gate"
    correction_name: str = "gate.e_score_correction_bias"


@dataclasses.dataclass(frozen=True)
class ExpertFiles:
    """How files name a block of experts and lay out its kernels.

    One tensor for each kernel of each expert, one for all of them under ``experts.gate_up_proj`` and
    ``experts.down_proj``, or (GGUF) one for each kernel of all experts: the file decides.

    Attributes:
        block: behind ``model.layers.N.``.
        kernels: of one expert's gate, up and down.
        across: there are joined kernels only, ``[e, in, out]``, and rows of gate and up alternate in them (gpt-oss).
        shared_gate: of the gate on the shared expert.
    """

    block: str = "mlp"
    kernels: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    across: bool = False
    shared_gate: str = "shared_expert_gate"


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """Gated feed-forward experts, of which each token takes a few.

    Attributes:
        experts: how many there are.
        chosen: how many a token takes.
        ffn: inner width of each.
        activation: a key of ``layers.GLUS``.
        shared: an expert that every token takes, too; its ``name`` is its place in files.
        shared_gate: a sigmoid of the token weighs it.
        bias: on the experts' three maps.
    """

    experts: int
    chosen: int
    ffn: int
    router: RouterConfig = RouterConfig()
    activation: str = "silu"
    shared: MLPConfig | None = None
    shared_gate: bool = False
    bias: bool = False
    files: ExpertFiles = ExpertFiles()

    def __post_init__(self) -> None:
        router = self.router
        if not 1 <= self.chosen <= self.experts:
            raise CheckpointError(f"config.json: a token cannot take {self.chosen} of {self.experts} experts")
        if not 1 <= router.chosen_groups <= router.groups or self.experts % router.groups:
            raise CheckpointError(
                f"config.json: {router.chosen_groups} of {router.groups} groups of {self.experts} experts do not fit"
            )
        if self.chosen > self.experts // router.groups * router.chosen_groups:
            raise CheckpointError(f"config.json: {router.chosen_groups} groups do not have {self.chosen} experts")
        if router.pool is not None and not self.chosen <= router.pool <= self.experts:
            raise CheckpointError(f"config.json: {router.pool} experts are no pool for {self.chosen} of {self.experts}")

    @property
    def widest(self) -> int:
        """Numbers of a token's widest activation."""
        shared = 0 if self.shared is None else self.shared.widest
        return max(self.experts, 2 * self.chosen * self.ffn, shared)

    def build(self, width: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> Experts:
        """The module."""
        return Experts(self, width, dtype=dtype, rngs=rngs)

    def rules(self, width: int, to: str, of: str) -> tuple[Rule, ...]:
        """Every weight: ``to`` and ``of`` are the paths of the layer here and in files, with their dots."""
        to, block = f"{to}ffn.", f"{of}{self.files.block}."
        rules = [*self._router_rules(width, f"{to}router.", block), *self._kernel_rules(width, to, f"{block}experts.")]
        if self.bias:
            rules += self._bias_rules(width, to, f"{block}experts.")
        if self.shared is not None:
            for one in self.shared.rules(width, "", of):
                rules.append(dataclasses.replace(one, param=f"{to}shared.{one.param.removeprefix('ffn.')}"))
        if self.shared_gate:
            source = f"{block}{self.files.shared_gate}.weight"
            rules.append(rule(f"{to}shared_gate.kernel", source, (1, width), (None, "model")))
        return tuple(rules)

    def _router_rules(self, width: int, to: str, block: str) -> list[Rule]:
        router, e = self.router, self.experts
        of, dtype = f"{block}{router.name}.", "float32" if router.exact else None
        rules = [rule(f"{to}kernel", f"{of}weight", (e, width), (None, "model"), dtype=dtype)]
        if router.bias:
            rules.append(rule(f"{to}bias", f"{of}bias", (e,), (None,), dtype=dtype))
        if router.correction:
            source = f"{block}{router.correction_name}"
            rules.append(rule(f"{to}correction", source, (e,), (None,), dtype="float32"))
        return rules

    def _kernel_rules(self, width: int, to: str, of: str) -> list[Rule]:
        e, f, d = self.experts, self.ffn, width
        *inward, outward = self.files.kernels
        each_in = tuple(
            Piece(f"{of}{at}.{name}.weight", (f, d), region=((at, at + 1), (half, half + 1)))
            for at in range(e)
            for half, name in enumerate(inward)
        )
        each_out = tuple(Piece(f"{of}{at}.{outward}.weight", (d, f), region=((at, at + 1),)) for at in range(e))
        if self.files.across:
            ways_in: tuple[Way, ...] = ((Piece(f"{of}gate_up_proj", (e, d, f, 2), (0, 3, 2, 1)),),)
            ways_out: tuple[Way, ...] = ((Piece(f"{of}down_proj", (e, f, d), (0, 2, 1)),),)
        else:
            halves = (
                Piece(f"{of}{name}", (e, f, d), region=((0, e), (half, half + 1))) for half, name in enumerate(inward)
            )
            ways_in = each_in, (Piece(f"{of}gate_up_proj", (e, 2, f, d)),), tuple(halves)
            ways_out = each_out, (Piece(f"{of}down_proj", (e, d, f)),)
        return [
            Rule(f"{to}gate_up", (e, 2, f, d), ("experts", None, "ffn", "model"), ways_in),
            Rule(f"{to}down", (e, d, f), ("experts", "model", "ffn"), ways_out),
        ]

    def _bias_rules(self, width: int, to: str, of: str) -> list[Rule]:
        e, f = self.experts, self.ffn
        shape, order = ((e, f, 2), (0, 2, 1)) if self.files.across else ((e, 2, f), ())
        return [
            rule(f"{to}gate_up_bias", f"{of}gate_up_proj_bias", shape, ("experts", None, "ffn"), order=order),
            rule(f"{to}down_bias", f"{of}down_proj_bias", (e, width), ("experts", "model")),
        ]


def route(
    scores: Float[Array, "m e"],
    chosen: int,
    router: RouterConfig,
    correction: Float[Array, " e"] | None = None,
    real: Bool[Array, "b t"] | None = None,
) -> tuple[Int[Array, "m c"], Float[Array, "m c"]]:
    """Which experts each token takes, and with what weights.

    Args:
        scores: in float32, with their bias if there is one.
        chosen: how many a token takes.
        correction: see ``RouterConfig``.
        real: tokens that matter, where blocks have pools: the others have no part in them.
    """
    if router.kind == SOFTMAX_CHOSEN:
        best, experts = jax.lax.top_k(scores, chosen)
        return experts, jax.nn.softmax(best, axis=-1) * router.scale
    shares = jax.nn.sigmoid(scores) if router.kind == SIGMOID else jax.nn.softmax(scores, axis=-1)
    rank = shares if correction is None else shares + correction
    if router.groups > 1:
        rank = _in_best_groups(rank, router)
    if router.pool is not None:
        rank = _in_pools(rank, router.pool, router.block, jnp.ones((1, len(rank)), bool) if real is None else real)
    _, experts = jax.lax.top_k(rank, chosen)
    weights = jnp.take_along_axis(shares, experts, axis=-1)
    if router.renormalise:
        total = jnp.sum(weights, axis=-1, keepdims=True)
        # Sigmoids may all be as good as zero.
        weights = weights / (total + 1e-20 if router.kind == SIGMOID else total)
    return experts, weights * router.scale


def _in_best_groups(rank: Float[Array, "m e"], router: RouterConfig) -> Float[Array, "m e"]:
    """Ranks, with those outside of a token's groups at minus infinity."""
    groups = rank.reshape(len(rank), router.groups, -1)
    best, _ = jax.lax.top_k(groups, min(2, groups.shape[-1]))
    _, kept = jax.lax.top_k(jnp.sum(best, axis=-1), router.chosen_groups)
    there = jnp.any(kept[:, :, None] == jnp.arange(router.groups), axis=1)
    return jnp.where(there[:, :, None], groups, -jnp.inf).reshape(rank.shape)


def _in_pools(rank: Float[Array, "m e"], pool: int, block: int, real: Bool[Array, "b t"]) -> Float[Array, "m e"]:
    """Ranks, with those outside of a block's pool at minus infinity; of equal experts the first ones are in it."""
    (b, t), e = real.shape, rank.shape[1]
    own = jnp.where(real[..., None], rank.reshape(b, t, e), -jnp.inf)
    blocks = jnp.pad(own, ((0, 0), (0, -t % block), (0, 0)), constant_values=-jnp.inf).reshape(b, -1, block, e)
    _, best = jax.lax.top_k(jnp.max(blocks, axis=2), pool)
    there = jnp.any(best[..., None] == jnp.arange(e), axis=2)
    return jnp.where(jnp.repeat(there, block, axis=1)[:, :t].reshape(rank.shape), rank, -jnp.inf)


def experts_from_hf(hf: Mapping[str, Any], router: RouterConfig, **changes: Any) -> ExpertsConfig:
    """The experts of the common fields; ``changes`` are what a family knows better.

    Raises:
        CheckpointError: a field is missing, or numbers that do not fit together.
    """
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    count = next((hf[name] for name in names if hf.get(name) is not None), None)
    fields: dict[str, Any] = {
        "experts": need(hf, names[0]) if count is None else count,
        "chosen": need(hf, "num_experts_per_tok"),
        "ffn": changes.get("ffn") or need(hf, "moe_intermediate_size"),
        "activation": activation_from_hf(hf.get("hidden_act", "silu")),
    }
    return ExpertsConfig(**(fields | {"router": router} | changes))


def grouped_router_from_hf(hf: Mapping[str, Any], **changes: Any) -> RouterConfig:
    """Sigmoids with a correction, chosen by groups, as DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) and kin do it."""
    fields: dict[str, Any] = {
        "kind": SIGMOID,
        "renormalise": bool(hf.get("norm_topk_prob", True)),
        "scale": float(hf.get("routed_scaling_factor") or 1.0),
        "correction": True,
        "groups": hf.get("n_group") or 1,
        "chosen_groups": hf.get("topk_group") or 1,
        "exact": True,
    }
    return RouterConfig(**(fields | changes))


class Router(nnx.Module):
    """See ``RouterConfig``; scores are computed in float32."""

    def __init__(self, config: ExpertsConfig, width: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.config, self.chosen = config.router, config.chosen
        own = jnp.float32 if self.config.exact else dtype
        self.kernel = parameter(rngs, (config.experts, width), own, width)
        self.bias = nnx.Param(jnp.zeros(config.experts, own)) if self.config.bias else None
        self.correction = nnx.Param(jnp.zeros(config.experts, jnp.float32)) if self.config.correction else None

    def __call__(
        self, x: Float[Array, "m d"], real: Bool[Array, "b t"] | None = None
    ) -> tuple[Int[Array, "m c"], Float[Array, "m c"]]:
        """Experts and weights of each token; ``real`` as for ``route``."""
        kernel = self.kernel[...]
        with jax.default_matmul_precision("highest" if self.config.exact else None):
            scores = product(x.astype(kernel.dtype), kernel, jnp.float32)
        if self.bias is not None:
            scores = scores + self.bias[...].astype(jnp.float32)
        correction = None if self.correction is None else self.correction[...]
        return route(scores, self.chosen, self.config, correction, real)


class Experts(nnx.Module):
    """See ``ExpertsConfig``."""

    def __init__(self, config: ExpertsConfig, width: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        e, f = config.experts, config.ffn
        self.activation = config.activation
        self.router = Router(config, width, dtype=dtype, rngs=rngs)
        self.gate_up = parameter(rngs, (e, 2, f, width), dtype, width)
        self.down = parameter(rngs, (e, width, f), dtype, f)
        self.gate_up_bias = nnx.Param(jnp.zeros((e, 2, f), dtype)) if config.bias else None
        self.down_bias = nnx.Param(jnp.zeros((e, width), dtype)) if config.bias else None
        self.shared = None if config.shared is None else config.shared.build(width, dtype=dtype, rngs=rngs)
        self.shared_gate = Linear((width,), (1,), bias=False, dtype=dtype, rngs=rngs) if config.shared_gate else None

    @property
    def weights(self) -> ExpertWeights:
        """What the routed product reads."""
        biases = (None if bias is None else bias[...] for bias in (self.gate_up_bias, self.down_bias))
        return ExpertWeights(held(self.gate_up), held(self.down), *biases)

    def __call__(self, x: Float[Array, "b t d"], run: Pass) -> Float[Array, "b t d"]:
        """Applies the block, without the residual; tokens that do not matter go to no routed expert."""
        rows = x.reshape(-1, x.shape[-1])
        real = None if run.real is None else run.real.reshape(-1)
        routes = self.router(rows, jnp.ones(x.shape[:2], bool) if run.real is None else run.real)
        y = routed(rows, *routes, self.weights, GLUS[self.activation], real, run.routing).reshape(x.shape)
        if self.shared is None:
            return y
        shared = self.shared(x, run)
        return y + (shared if self.shared_gate is None else jax.nn.sigmoid(self.shared_gate(x)) * shared)
