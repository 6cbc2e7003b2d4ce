"""A tiny model with a memory, and that memory's arithmetic once more: in float64, token by token, as files name it."""

from __future__ import annotations

from typing import Any

import numpy as np

HF: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [1, 1, 0],
    },
    "tie_word_embeddings": True,
}


def recurrence(q, k, v, decay, beta, state):
    """Of one row: q, k ``[k, t, h]``, v ``[k, m, t, g]``, the gates ``[k, m, t]``, state ``[n, h, g]``.

    Returns what each token reads, what it adds, and the memory behind it ``[t, n, h, g]``.
    """
    q, k, v, decay, beta = (np.asarray(array, np.float64) for array in (q, k, v, decay, beta))
    heads, m, t, size = v.shape
    memory = np.array(state, np.float64).reshape(heads, m, q.shape[-1], size)
    out, added, states = np.zeros_like(v), np.zeros_like(v), []
    for i in range(t):
        for head in range(heads):
            for own in range(m):
                s = np.exp(decay[head, own, i]) * memory[head, own]
                u = beta[head, own, i] * (v[head, own, i] - s.T @ k[head, i])
                memory[head, own] = s + np.outer(k[head, i], u)
                out[head, own, i], added[head, own, i] = memory[head, own].T @ q[head, i], u
        states.append(memory.reshape(heads * m, *memory.shape[2:]).copy())
    return out, added, np.stack(states)


def layer(tensors: dict[str, np.ndarray], prefix: str, x: np.ndarray, hf: dict[str, Any]) -> np.ndarray:
    """A whole layer on one row ``[t, d]``, in the words and layouts of the file."""
    own = {name.removeprefix(prefix): np.asarray(tensor, np.float64) for name, tensor in tensors.items()}
    heads, all_values = hf["linear_num_key_heads"], hf["linear_num_value_heads"]
    h, g, t = hf["linear_key_head_dim"], hf["linear_value_head_dim"], len(x)
    mixed = x @ own["in_proj_qkv.weight"].T
    taps = own["conv1d.weight"][:, 0]
    padded = np.concatenate([np.zeros((taps.shape[1] - 1, mixed.shape[1])), mixed])
    mixed = np.stack([np.einsum("kc,ck->c", padded[i : i + taps.shape[1]], taps) for i in range(t)])
    mixed = mixed / (1 + np.exp(-mixed))
    q, k = (mixed[:, at * heads * h : (at + 1) * heads * h].reshape(t, heads, h).swapaxes(0, 1) for at in (0, 1))
    v = mixed[:, 2 * heads * h :].reshape(t, heads, all_values // heads, g).transpose(1, 2, 0, 3)
    q, k = (one / np.sqrt((one**2).sum(-1, keepdims=True) + 1e-6) for one in (q, k))
    beta = 1 / (1 + np.exp(-x @ own["in_proj_b.weight"].T))
    decay = -np.exp(own["A_log"]) * np.log1p(np.exp(x @ own["in_proj_a.weight"].T + own["dt_bias"]))
    gates = (gate.T.reshape(heads, -1, t) for gate in (decay, beta))
    out, _, _ = recurrence(q / np.sqrt(h), k, v, *gates, np.zeros((all_values, h, g)))
    out = out.transpose(2, 0, 1, 3).reshape(t, all_values, g)
    out = out / np.sqrt((out**2).mean(-1, keepdims=True) + hf["rms_norm_eps"]) * own["norm.weight"]
    z = x @ own["in_proj_z.weight"].T
    return (out.reshape(t, -1) * z / (1 + np.exp(-z))) @ own["out_proj.weight"].T
