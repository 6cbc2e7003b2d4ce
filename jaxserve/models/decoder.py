"""The Llama-shaped decoder: Llama 3, Mistral, SmolLM2, Qwen2.5, Qwen3 dense and kin, by configuration.

One forward function serves the whole-sequence pass (no cache) and every cached pass. A family's file reads its
configuration into a ``DecoderConfig``; structure and weight rules are here.
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
from jaxserve.models.attention import Prefix, attend
from jaxserve.models.cache import KVCache
from jaxserve.models.layers import GatedMLP, Linear, RMSNorm, parameter, product
from jaxserve.models.rope import Rope, rope_from_hf, rotate
from jaxserve.models.weights import Rule


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Everything that shapes the program; frozen and hashable, so that it can be a static argument.

    Attributes:
        windows: per layer, how many positions a query sees (itself included); ``None`` sees all.
        qkv_bias, output_bias, mlp_bias: biases on q/k/v, on the attention output, in the feed-forward block.
        qk_norm: RMS norm on each head of q and k before the rotation.
        tied: logits come from the embedding table.
        key_block: positions of the cached prefix that attention reads at a time.
    """

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    norm_eps: float
    rope: Rope
    windows: tuple[int | None, ...]
    max_positions: int
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    key_block: int = 128

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads


class Attention(nnx.Module):
    """Grouped-query self-attention with rotary positions.

    One product gives all three: for each key head its group of query heads, then the key, then the value. So the
    first axis can be split over devices, and XLA:CPU starts one product instead of three.
    """

    def __init__(self, config: DecoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        size, outputs = config.head_size, (config.kv_heads, config.group + 2, config.head_size)
        self.group = config.group
        self.qkv = Linear((config.width,), outputs, bias=config.qkv_bias, dtype=dtype, rngs=rngs)
        self.o = Linear((config.heads, size), (config.width,), bias=config.output_bias, dtype=dtype, rngs=rngs)
        norm = config.qk_norm
        self.q_norm = RMSNorm(size, eps=config.norm_eps, dtype=dtype, rngs=rngs) if norm else None
        self.k_norm = RMSNorm(size, eps=config.norm_eps, dtype=dtype, rngs=rngs) if norm else None

    def project(
        self, x: Float[Array, "b t d"], rotation: tuple[Array, Array]
    ) -> tuple[Float[Array, "b t n h"], Float[Array, "b k t h"], Float[Array, "b k t h"]]:
        """Queries, and keys and values in the cache's layout."""
        both = self.qkv(x)
        q = both[:, :, :, : self.group].reshape(*x.shape[:2], -1, both.shape[-1])
        k, v = both[:, :, :, self.group], both[:, :, :, self.group + 1]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, *rotation), rotate(k, *rotation).swapaxes(1, 2), v.swapaxes(1, 2)


class Block(nnx.Module):
    """Pre-norm attention and feed-forward, each with a residual."""

    def __init__(self, config: DecoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.attention_norm = RMSNorm(config.width, eps=config.norm_eps, dtype=dtype, rngs=rngs)
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(config.width, eps=config.norm_eps, dtype=dtype, rngs=rngs)
        self.mlp = GatedMLP(config.width, config.ffn, bias=config.mlp_bias, dtype=dtype, rngs=rngs)


class Decoder(nnx.Module):
    """A stack of blocks between a token embedding and a vocabulary projection."""

    def __init__(self, config: DecoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embedding = parameter(rngs, (config.vocab_size, config.width), dtype, config.width)
        self.layers = nnx.List([Block(config, dtype=dtype, rngs=rngs) for _ in range(config.layers)])
        self.norm = RMSNorm(config.width, eps=config.norm_eps, dtype=dtype, rngs=rngs)
        self.head = None if config.tied else parameter(rngs, (config.vocab_size, config.width), dtype, config.width)

    def __call__(
        self,
        tokens: Int[Array, "b t"],
        start: Int[Array, " b"],
        mask: Bool[Array, "b t t"],
        cache: KVCache | None = None,
        row: Int[Array, ""] | int = 0,
        span: Int[Array, ""] | None = None,
    ) -> tuple[Float[Array, "b t d"], KVCache]:
        """Runs ``tokens`` at positions ``start .. start+t-1`` over the cached prefix below ``start``.

        Args:
            tokens: ids in ``[0, vocab_size)``; JAX clamps others silently, so the host checks them.
            start: positions that stand before each row; zeros where there is no cache.
            mask: what each position of the block sees of the block.
            cache: entries of the prefix, or ``None`` for the whole-sequence pass.
            row: cache row of the first token row.
            span: longest ``start`` that matters, by default the longest of all; rows beyond it compute garbage.

        Returns:
            Final hidden states (after the last norm), and the block's own cache entries ``[b, k, t, h]`` a layer:
            ``cache.write`` puts them in place, or nobody does.
        """
        t, config = tokens.shape[1], self.config
        length = t if cache is None else cache.length
        x = self.embedding[...][tokens]
        rotation = config.rope.table(start[:, None] + jnp.arange(t), length, x.dtype)
        span = jnp.max(start) if span is None else span
        keys, values = [], []
        for index, block in enumerate(self.layers):
            with jax.named_scope(f"layer_{index}"):
                q, k, v = block.attention.project(block.attention_norm(x), rotation)
                prefix = None if cache is None else Prefix(cache.k[index], cache.v[index], row, start, span)
                mixed = attend(
                    q,
                    k,
                    v,
                    mask,
                    prefix,
                    scale=config.head_size**-0.5,
                    window=config.windows[index],
                    key_block=min(config.key_block, length),
                )
                x = x + block.attention.o(mixed)
                x = x + block.mlp(block.mlp_norm(x))
            keys.append(k)
            values.append(v)
        return self.norm(x), KVCache(tuple(keys), tuple(values))

    def logits(self, hidden: Float[Array, "... d"]) -> Float[Array, "... v"]:
        """Scores of every token, in float32."""
        table = self.embedding if self.head is None else self.head
        rows = product(hidden.reshape(-1, hidden.shape[-1]), table[...], jnp.float32)
        return rows.reshape(*hidden.shape[:-1], -1)


def read_config(hf: Mapping[str, Any], **family: Any) -> DecoderConfig:
    """Reads the fields that the Llama-shaped families share; ``family`` holds what one of them knows better.

    Raises:
        CheckpointError: a field is missing or asks for something these families don't have.
    """
    if (activation := hf.get("hidden_act", "silu")) != "silu":
        raise CheckpointError(f"config.json: hidden_act {activation!r} is not supported", param="hidden_act")
    try:
        heads, layers, width = hf["num_attention_heads"], hf["num_hidden_layers"], hf["hidden_size"]
        head_size = hf.get("head_dim") or width // heads
        fields = {
            "vocab_size": hf["vocab_size"],
            "width": width,
            "layers": layers,
            "heads": heads,
            "kv_heads": hf.get("num_key_value_heads") or heads,
            "head_size": head_size,
            "ffn": hf["intermediate_size"],
            "norm_eps": float(hf.get("rms_norm_eps", 1e-6)),
            "rope": rope_from_hf(hf, head_size),
            "windows": (None,) * layers,
            "max_positions": hf["max_position_embeddings"],
            "tied": bool(hf.get("tie_word_embeddings", False)),
        }
    except KeyError as missing:
        raise CheckpointError(f"config.json lacks {missing}", param=str(missing.args[0])) from None
    config = DecoderConfig(**(fields | family))
    if config.heads % config.kv_heads:
        raise CheckpointError(f"config.json: {config.heads} heads do not divide among {config.kv_heads} key heads")
    if len(config.windows) != config.layers:
        raise CheckpointError(f"config.json: layer_types has {len(config.windows)} entries for {config.layers} layers")
    if config.head_size < 1:
        raise CheckpointError(f"config.json: {config.heads} heads do not fit into a width of {config.width}")
    return config


def decoder_rules(config: DecoderConfig) -> tuple[Rule, ...]:
    """Each weight once, under the names of ``LlamaForCausalLM`` and kin."""
    d, v = config.width, config.vocab_size
    rules = [
        Rule("embedding", "model.embed_tokens.weight", (v, d), (0, 1), ("vocab", "model")),
        Rule("norm.scale", "model.norm.weight", (d,), (0,), (None,)),
    ]
    if not config.tied:
        rules.append(Rule("head", "lm_head.weight", (v, d), (0, 1), ("vocab", "model")))
    for layer in range(config.layers):
        rules += _attention_rules(config, layer) + _mlp_rules(config, layer)
    return tuple(rules)


def _attention_rules(config: DecoderConfig, layer: int) -> list[Rule]:
    d, n, kv, h = config.width, config.heads, config.kv_heads, config.head_size
    to, of = f"layers.{layer}.", f"model.layers.{layer}."
    rules = [
        Rule(to + "attention_norm.scale", of + "input_layernorm.weight", (d,), (0,), (None,)),
        Rule(to + "attention.o.kernel", of + "self_attn.o_proj.weight", (d, n, h), (0, 1, 2), ("model", "heads", None)),
    ]
    for name, heads, axis in (("q", n, "heads"), ("k", kv, "kv_heads"), ("v", kv, "kv_heads")):
        leaf, source = to + f"attention.{name}.", of + f"self_attn.{name}_proj."
        rules.append(Rule(leaf + "kernel", source + "weight", (heads, h, d), (0, 1, 2), (axis, None, "model")))
        if config.qkv_bias:
            rules.append(Rule(leaf + "bias", source + "bias", (heads, h), (0, 1), (axis, None)))
    if config.output_bias:
        rules.append(Rule(to + "attention.o.bias", of + "self_attn.o_proj.bias", (d,), (0,), (None,)))
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            rules.append(Rule(to + f"attention.{name}.scale", of + f"self_attn.{name}.weight", (h,), (0,), (None,)))
    return rules


def _mlp_rules(config: DecoderConfig, layer: int) -> list[Rule]:
    d, f = config.width, config.ffn
    to, of = f"layers.{layer}.", f"model.layers.{layer}."
    rules = [Rule(to + "mlp_norm.scale", of + "post_attention_layernorm.weight", (d,), (0,), (None,))]
    shapes = (("gate", f, d, "ffn", "model"), ("up", f, d, "ffn", "model"), ("down", d, f, "model", "ffn"))
    for name, outputs, inputs, out_axis, in_axis in shapes:
        leaf, source = to + f"mlp.{name}.", of + f"mlp.{name}_proj."
        rules.append(Rule(leaf + "kernel", source + "weight", (outputs, inputs), (0, 1), (out_axis, in_axis)))
        if config.mlp_bias:
            axis = out_axis if out_axis == "ffn" else None
            rules.append(Rule(leaf + "bias", source + "bias", (outputs,), (0,), (axis,)))
    return rules


def arrange(config: DecoderConfig, tree: dict[str, Any]) -> dict[Any, Any]:
    """A checkpoint's tree (one leaf a rule) as the module's parameters: products of the same input joined.

    Layer by layer, and ``tree`` is emptied on the way, so that at most one layer is there twice.
    """
    layers, source = {}, tree["layers"]
    for name in list(source):
        layer = source.pop(name)
        attention, mlp = layer["attention"], layer["mlp"]
        parts = [attention.pop(part) for part in ("q", "k", "v")]
        attention["qkv"] = {leaf: _join_heads(config, *(part[leaf] for part in parts)) for leaf in parts[0]}
        gate, up = mlp.pop("gate"), mlp.pop("up")
        mlp["gate_up"] = {leaf: jnp.stack([gate[leaf], up[leaf]]) for leaf in gate}
        layers[int(name)] = {**layer, "attention": attention, "mlp": mlp}
    return {**tree, "layers": layers}


def _join_heads(config: DecoderConfig, q: Array, k: Array, v: Array) -> Array:
    queries = q.reshape(config.kv_heads, config.group, *q.shape[1:])
    return jnp.concatenate([queries, k[:, None], v[:, None]], axis=1)
