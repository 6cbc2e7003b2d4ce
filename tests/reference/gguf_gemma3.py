"""A Gemma 3 GGUF file as a transformers model: the gguf package dequantises, transformers computes.

Knows GGUF's names for these tensors and that it stores norms one higher; nothing of jaxserve's own reader, which is
tested against what this one gives. What a file leaves unsaid (the local base of the rotation, five windows to a full
layer) is the class's default.
"""

from collections.abc import Iterator
from pathlib import Path

import gguf
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from tests.reference.gguf_llama import GLOBAL_NAMES, value
from tests.reference.gguf_llama import LAYER_NAMES as LLAMA_NAMES

LAYER_NAMES = LLAMA_NAMES | {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def configuration(reader: gguf.GGUFReader, attention: str) -> Gemma3TextConfig:
    """The file's architecture as transformers states it."""
    architecture = value(reader, "general.architecture")
    if architecture != "gemma3":
        raise SystemExit(f"{architecture}: only the gemma3 architecture is known here")
    shapes = {tensor.name: tensor.shape for tensor in reader.tensors}
    return Gemma3TextConfig(
        vocab_size=int(shapes["token_embd.weight"][1]),
        hidden_size=value(reader, "gemma3.embedding_length"),
        intermediate_size=value(reader, "gemma3.feed_forward_length"),
        num_hidden_layers=value(reader, "gemma3.block_count"),
        num_attention_heads=value(reader, "gemma3.attention.head_count"),
        num_key_value_heads=value(reader, "gemma3.attention.head_count_kv"),
        head_dim=value(reader, "gemma3.attention.key_length"),
        max_position_embeddings=value(reader, "gemma3.context_length"),
        rms_norm_eps=value(reader, "gemma3.attention.layer_norm_rms_epsilon"),
        sliding_window=value(reader, "gemma3.attention.sliding_window"),
        query_pre_attn_scalar=value(reader, "gemma3.attention.key_length"),
        bos_token_id=value(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=value(reader, "tokenizer.ggml.eos_token_id"),
        attn_implementation=attention,
    )


def weights(reader: gguf.GGUFReader) -> Iterator[tuple[str, torch.Tensor]]:
    """(transformers' name, float32 tensor) of every weight."""
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()).float()
        stem = tensor.name.removesuffix(".weight")
        values = values - 1 if stem.endswith("norm") else values
        if not stem.startswith("blk."):
            yield f"{GLOBAL_NAMES[stem]}.weight", values
            continue
        _, layer, name = stem.split(".")
        yield f"model.layers.{layer}.{LAYER_NAMES[name]}.weight", values


def load(path: Path, attention: str = "eager") -> Gemma3ForCausalLM:
    """The whole model, its weights dequantised to float32."""
    reader = gguf.GGUFReader(path)
    model = Gemma3ForCausalLM(configuration(reader, attention))
    missing, unexpected = model.load_state_dict(dict(weights(reader)), strict=False)
    if set(missing) - {"lm_head.weight"} or unexpected:
        raise SystemExit(f"not the weights of this model: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model.float().eval()
