"""The parts that Gemma 4's layers have beside the common ones: experts beside the dense block, and embeddings by layer.

Knows their configurations, modules and weights, and what DiffusionGemma adds: scales of layers that differ where a
canvas is refined, and what the pass before made of it. Does not know ``config.json`` (``gemma4_text.py`` does) nor how
a product over experts is computed (``experts.py``). Source: transformers' ``modeling_gemma4`` and
``modeling_diffusion_gemma``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxserve.models.experts import ExpertWeights, routed
from jaxserve.models.feed_forward import MLPConfig
from jaxserve.models.layers import GLUS, Linear, Norm, RMSNorm, parameter, product
from jaxserve.models.moe import RouterConfig, route
from jaxserve.models.passes import Pass
from jaxserve.models.quant import held
from jaxserve.models.self_attention import AttentionConfig
from jaxserve.models.weights import Rule, rule


@dataclasses.dataclass(frozen=True)
class ScaledExpertsConfig:
    """Experts whose router has a scale for each input and one for each expert.

    Attributes:
        chosen: experts of a token.
        ffn: inner width of each.
    """

    experts: int
    chosen: int
    ffn: int
    activation: str
    norm: Norm

    def build(self, width: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> ScaledExperts:
        """The module."""
        return ScaledExperts(self, width, dtype=dtype, rngs=rngs)

    def rules(self, width: int, to: str, of: str) -> tuple[Rule, ...]:
        """Every weight: ``to`` and ``of`` are the paths of the layer here and in files, with their dots."""
        e, f, to = self.experts, self.ffn, f"{to}experts."
        kernel = (e, 2, f, width)
        return (
            rule(f"{to}norm.scale", f"{of}pre_feedforward_layernorm_2.weight", (width,), (None,)),
            rule(f"{to}after.scale", f"{of}post_feedforward_layernorm_2.weight", (width,), (None,)),
            rule(f"{to}router.kernel", f"{of}router.proj.weight", (e, width), (None, "model")),
            rule(f"{to}router.scale", f"{of}router.scale", (width,), (None,)),
            rule(f"{to}router.expert_scale", f"{of}router.per_expert_scale", (e,), (None,)),
            rule(f"{to}gate_up", f"{of}experts.gate_up_proj", kernel, ("experts", None, "ffn", "model")),
            rule(f"{to}down", f"{of}experts.down_proj", (e, width, f), ("experts", "model", "ffn")),
        )


class ScaledRouter(nnx.Module):
    """Chooses by the softmax over all experts; what is chosen weighs 1 together, before each expert's own scale."""

    def __init__(self, config: ScaledExpertsConfig, width: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.config = config
        self.kernel = parameter(rngs, (config.experts, width), dtype, width)
        self.scale = parameter(rngs, (width,), dtype)
        self.expert_scale = parameter(rngs, (config.experts,), dtype)

    def __call__(self, x: Float[Array, "m d"]) -> tuple[Int[Array, "m c"], Float[Array, "m c"]]:
        """Which experts a token takes, and with what weights, in float32."""
        x = self.config.norm(x) * self.scale[...] * x.shape[-1] ** -0.5
        chosen, weights = route(product(x, self.kernel[...], jnp.float32), self.config.chosen, RouterConfig())
        return chosen, weights * self.expert_scale[...].astype(jnp.float32)[chosen]


class ScaledExperts(nnx.Module):
    """See ``ScaledExpertsConfig``."""

    def __init__(self, config: ScaledExpertsConfig, width: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        e, f = config.experts, config.ffn
        self.activation = config.activation
        self.norm = RMSNorm(width, config.norm, dtype=dtype)
        self.after = RMSNorm(width, config.norm, dtype=dtype)
        self.router = ScaledRouter(config, width, dtype=dtype, rngs=rngs)
        self.gate_up = parameter(rngs, (e, 2, f, width), dtype, width)
        self.down = parameter(rngs, (e, width, f), dtype, f)

    def __call__(self, x: Float[Array, "b t d"], run: Pass) -> Float[Array, "b t d"]:
        """What the experts add to the residual ``x``: they are chosen by it, and read it after a norm of their own."""
        rows = x.reshape(-1, x.shape[-1])
        weights = ExpertWeights(held(self.gate_up), held(self.down))
        real = None if run.real is None else run.real.reshape(-1)
        out = routed(self.norm(rows), *self.router(rows), weights, GLUS[self.activation], real, run.routing)
        return self.after(out.reshape(x.shape))


@dataclasses.dataclass(frozen=True)
class LayerInputsConfig:
    """Embeddings of a token for each layer, of the token itself and of its common embedding (``side``).

    Attributes:
        rows: of the table; at least as many as there are tokens.
        size: of one layer's embedding.
    """

    rows: int
    layers: int
    size: int
    norm: Norm

    def build(self, width: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> LayerInputs:
        """The module."""
        return LayerInputs(self, width, dtype=dtype, rngs=rngs)

    def rules(self, width: int, to: str, of: str) -> tuple[Rule, ...]:
        """Every weight: ``to`` and ``of`` are the paths of the module here and of the model in files."""
        columns = self.layers * self.size
        return (
            rule(f"{to}table", f"{of}embed_tokens_per_layer.weight", (self.rows, columns), ("vocab", None)),
            rule(f"{to}project.kernel", f"{of}per_layer_model_projection.weight", (columns, width), (None, "model")),
            rule(f"{to}norm.scale", f"{of}per_layer_projection_norm.weight", (self.size,), (None,)),
        )


class LayerInputs(nnx.Module):
    """See ``LayerInputsConfig``."""

    def __init__(self, config: LayerInputsConfig, width: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        columns = config.layers * config.size
        self.config = config
        self.table = parameter(rngs, (config.rows, columns), dtype, config.size)
        self.project = Linear((width,), (columns,), bias=False, dtype=dtype, rngs=rngs)
        self.norm = RMSNorm(config.size, config.norm, dtype=dtype)

    def __call__(self, tokens: Int[Array, "b t"], x: Float[Array, "b t d"]) -> Float[Array, "b t l p"]:
        """All layers' embeddings of the tokens, whose common ones are ``x``."""
        shape = (*tokens.shape, self.config.layers, self.config.size)
        own = self.table[...][tokens] * jnp.asarray(self.config.size**0.5, x.dtype)
        projected = self.norm((self.project(x) * x.shape[-1] ** -0.5).reshape(shape))
        return (projected + own.reshape(shape)) * 2**-0.5


@dataclasses.dataclass(frozen=True)
class ScaledBlockConfig:
    """A block with norms before and after each part, whose output has a learned scale.

    Attributes:
        experts: stand beside the dense block: both read the same residual, and what they give is added.
        inputs: size of the layer's own embedding of each token, added behind a gate; 0 has none.
        activation: of that gate.
        refines: rows that refine a canvas have a scale of their own (DiffusionGemma).
    """

    mixer: AttentionConfig
    ffn: MLPConfig
    norm: Norm
    experts: ScaledExpertsConfig | None
    inputs: int
    activation: str
    refines: bool = False

    @property
    def widest(self) -> int:
        """Numbers of a token's widest activation."""
        return max(
            self.mixer.widest, self.ffn.widest, self.experts.chosen * 2 * self.experts.ffn if self.experts else 0
        )

    @property
    def chosen(self) -> int:
        """Experts that a token takes; 0 where there are none."""
        return self.experts.chosen if self.experts else 0

    def build(self, width: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> ScaledBlock:
        """The module."""
        return ScaledBlock(self, width, dtype=dtype, rngs=rngs)

    def rules(self, width: int, to: str, of: str) -> tuple[Rule, ...]:
        """Every weight: ``to`` and ``of`` are the paths of the layer here and in files, with their dots."""
        names = {
            "mixer_norm": "input_layernorm",
            "mixer_after": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "ffn_after": "post_feedforward_layernorm",
        }
        if self.experts is not None:
            names["dense_after"] = "post_feedforward_layernorm_1"
        if self.inputs:
            names["inputs_after"] = "post_per_layer_input_norm"
        rules = [rule(f"{to}{own}.scale", f"{of}{name}.weight", (width,), (None,)) for own, name in names.items()]
        rules += [*self.mixer.rules(width, to, of), *self.ffn.rules(width, to, of)]
        rules.append(rule(f"{to}scale", f"{of}layer_scalar", (1,), (None,)))
        if self.refines:
            rules.append(rule(f"{to}canvas_scale", f"{of}canvas_scalar", (1,), (None,)))
        if self.experts is not None:
            rules += self.experts.rules(width, to, of)
        if self.inputs:
            p, gate, out = self.inputs, f"{of}per_layer_input_gate.weight", f"{of}per_layer_projection.weight"
            rules.append(rule(f"{to}inputs_gate.kernel", gate, (p, width), (None, "model")))
            rules.append(rule(f"{to}inputs_out.kernel", out, (width, p), ("model", None)))
        return tuple(rules)


class ScaledBlock(nnx.Module):
    """See ``ScaledBlockConfig``."""

    def __init__(self, config: ScaledBlockConfig, width: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        def norm() -> RMSNorm:
            return RMSNorm(width, config.norm, dtype=dtype)

        experts, size = config.experts, config.inputs
        self.config = config
        self.mixer_norm, self.mixer_after, self.ffn_norm, self.ffn_after = norm(), norm(), norm(), norm()
        self.mixer = config.mixer.build(width, dtype=dtype, rngs=rngs)
        self.ffn = config.ffn.build(width, dtype=dtype, rngs=rngs)
        self.scale = parameter(rngs, (1,), dtype)
        self.canvas_scale = parameter(rngs, (1,), dtype) if config.refines else None
        self.dense_after = None if experts is None else norm()
        self.experts = None if experts is None else experts.build(width, dtype=dtype, rngs=rngs)
        self.inputs_after = norm() if size else None
        self.inputs_gate = Linear((width,), (size,), bias=False, dtype=dtype, rngs=rngs) if size else None
        self.inputs_out = Linear((size,), (width,), bias=False, dtype=dtype, rngs=rngs) if size else None

    def __call__(self, x: Float[Array, "b t d"], run: Pass, layer: int) -> tuple[Float[Array, "b t d"], Any]:
        """Applies the layer; returns its output and its fresh cache entries."""
        mixed, fresh = self.mixer(self.mixer_norm(x), run, layer)
        x = x + self.mixer_after(mixed)
        out = self.ffn(self.ffn_norm(x), run)
        if self.experts is not None and self.dense_after is not None:
            out = self.dense_after(out) + self.experts(x, run)
        x = x + self.ffn_after(out)
        if self.inputs_gate is not None and self.inputs_out is not None and self.inputs_after is not None:
            gated = GLUS[self.config.activation](self.inputs_gate(x), run.side[:, :, layer])
            x = x + self.inputs_after(self.inputs_out(gated))
        scale = self.scale[...]
        if self.canvas_scale is not None and run.canvas is not None:
            scale = jnp.where(run.canvas.refined[:, None, None], self.canvas_scale[...], scale)
        return x * scale, fresh


@dataclasses.dataclass(frozen=True)
class ConditioningConfig:
    """Embeddings of a canvas together with what the pass before made of it (self-conditioning, Chen et al. 2022).

    Attributes:
        block: makes of a soft embedding what is added.
    """

    block: MLPConfig
    norm: Norm

    def build(self, width: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> Conditioning:
        """The module."""
        return Conditioning(self, width, dtype=dtype, rngs=rngs)

    def rules(self, width: int, to: str, of: str) -> tuple[Rule, ...]:
        """Every weight: ``to`` and ``of`` are the paths of the module here and of the model in files."""
        norm = rule(f"{to}norm.scale", f"{of}{self.block.name}.pre_norm.weight", (width,), (None,))
        return (norm, *self.block.rules(width, to, of))


class Conditioning(nnx.Module):
    """See ``ConditioningConfig``."""

    def __init__(self, config: ConditioningConfig, width: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.after = config.norm
        self.norm = RMSNorm(width, config.norm, dtype=dtype)
        self.ffn = config.block.build(width, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "b t d"], soft: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """What enters the first layer; the norm of the sum has no scale."""
        return self.after(x + self.ffn(self.norm(soft)))
