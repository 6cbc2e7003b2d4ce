"""A Llama-shaped GGUF file as a transformers model: the gguf package dequantises, transformers computes.

Knows GGUF's names for Llama tensors and its order of query and key rows; nothing of jaxserve's own reader, which is
tested against what this one gives.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import LlamaConfig, LlamaForCausalLM

GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def value(reader: gguf.GGUFReader, key: str) -> Any:
    """One metadata value as plain Python: str, int, float, bool, or a list of them.

    Raises:
        KeyError: the file does not say.
    """
    field = reader.fields[key]
    if field.types[-1] is gguf.GGUFValueType.STRING:  # contents() takes half a minute for a vocabulary
        texts = [bytes(field.parts[index]).decode() for index in field.data]
        return texts if field.types[0] is gguf.GGUFValueType.ARRAY else texts[0]
    return field.contents()


def configuration(reader: gguf.GGUFReader, attention: str) -> LlamaConfig:
    """The file's architecture as transformers states it, to be computed by one of its attention implementations."""
    architecture = value(reader, "general.architecture")
    if architecture != "llama":
        raise SystemExit(f"{architecture}: only the llama architecture is known here")
    names = {tensor.name for tensor in reader.tensors}
    return LlamaConfig(
        vocab_size=value(reader, "llama.vocab_size"),
        hidden_size=value(reader, "llama.embedding_length"),
        intermediate_size=value(reader, "llama.feed_forward_length"),
        num_hidden_layers=value(reader, "llama.block_count"),
        num_attention_heads=value(reader, "llama.attention.head_count"),
        num_key_value_heads=value(reader, "llama.attention.head_count_kv"),
        max_position_embeddings=value(reader, "llama.context_length"),
        rms_norm_eps=value(reader, "llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value(reader, "llama.rope.freq_base")},
        tie_word_embeddings="output.weight" not in names,
        bos_token_id=value(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=value(reader, "tokenizer.ggml.eos_token_id"),
        attn_implementation=attention,
    )


def weights(reader: gguf.GGUFReader, config: LlamaConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """(transformers' name, float32 tensor) of every weight."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()).float()
        stem = tensor.name.removesuffix(".weight")
        if not stem.startswith("blk."):
            yield f"{GLOBAL_NAMES[stem]}.weight", values
            continue
        _, layer, name = stem.split(".")
        if name in heads:  # rows lie for adjacent rotary pairs: (h, d/2, 2) back to (h, 2, d/2)
            values = values.view(heads[name], -1, 2, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        yield f"model.layers.{layer}.{LAYER_NAMES[name]}.weight", values


def load(path: Path, dtype: torch.dtype = torch.float32, attention: str = "eager") -> LlamaForCausalLM:
    """The whole model, its weights dequantised to float32 and then cast to `dtype`."""
    reader = gguf.GGUFReader(path)
    config = configuration(reader, attention)
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(dict(weights(reader, config)), strict=False)
    if set(missing) - {"lm_head.weight"} or unexpected:
        raise SystemExit(f"not the weights of this model: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model.to(dtype).eval()
