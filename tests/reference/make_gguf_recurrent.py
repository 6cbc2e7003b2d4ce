"""Write tiny_gguf/: random GGUF files of models with a memory, and what llama.cpp computes from them.

Knows GGUF's names and layouts of these architectures and nothing of jaxserve, nor of the Hugging Face form: that both
readers find the same model in a file is what the reference is for. Two environments:

    python tests/reference/make_gguf_recurrent.py write      # needs gguf and numpy
    python tests/reference/make_gguf_recurrent.py ask        # needs xllamacpp
"""

import json
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "tiny_gguf"
ARCHITECTURES = ("qwen35", "qwen35moe")
VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS, HEAD = 300, 32, 4, 4, 2, 32
KEY_HEADS, GROUP, SIZE, KERNEL, FFN, EXPERTS, EXPERT, SHARED = 2, 3, 32, 4, 48, 8, 16, 24
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 17, 31, 63, 64, 65, 66, 80, 90)


def vocabulary(writer: Any) -> None:
    """One token a byte, one merge, and control tokens."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(code) for code in [*own, *range(256, 512 - len(own))]]
    extra = [f"<|{index}|>" for index in range(VOCAB - 257)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list([*letters, "ab", *extra])
    writer.add_token_types([1] * 257 + [3] * len(extra))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_add_bos_token(False)


def metadata(writer: Any, architecture: str) -> None:
    """What such files say of their shapes."""
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(HEAD // 2)
    writer.add_array(f"{architecture}.rope.dimension_sections", [3, 3, 2, 0])
    numbers = {
        "full_attention_interval": 4,
        "ssm.conv_kernel": KERNEL,
        "ssm.state_size": SIZE,
        "ssm.group_count": KEY_HEADS,
        "ssm.time_step_rank": KEY_HEADS * GROUP,
        "ssm.inner_size": KEY_HEADS * GROUP * SIZE,
    }
    if architecture == "qwen35":
        numbers["feed_forward_length"] = FFN
    else:
        numbers |= {"expert_count": EXPERTS, "expert_used_count": 3}
        numbers |= {"expert_feed_forward_length": EXPERT, "expert_shared_feed_forward_length": SHARED}
    for name, number in numbers.items():
        writer.add_uint32(f"{architecture}.{name}", number)


def mixer(add: Callable[..., None], at: str, full: bool) -> None:
    """The tensors of one layer's mixer."""
    if full:
        add(f"{at}attn_q.weight", 2 * HEADS * HEAD, WIDTH)
        add(f"{at}attn_k.weight", KV_HEADS * HEAD, WIDTH)
        add(f"{at}attn_v.weight", KV_HEADS * HEAD, WIDTH)
        add(f"{at}attn_output.weight", WIDTH, HEADS * HEAD)
        add(f"{at}attn_q_norm.weight", HEAD, spread=0.3, middle=1)
        add(f"{at}attn_k_norm.weight", HEAD, spread=0.3, middle=1)
        return
    values = KEY_HEADS * GROUP
    channels = 2 * KEY_HEADS * SIZE + values * SIZE
    add(f"{at}attn_qkv.weight", channels, WIDTH)
    add(f"{at}attn_gate.weight", values * SIZE, WIDTH)
    add(f"{at}ssm_alpha.weight", values, WIDTH)
    add(f"{at}ssm_beta.weight", values, WIDTH)
    add(f"{at}ssm_a", values, rate=True)
    add(f"{at}ssm_dt.bias", values, spread=0.5)
    add(f"{at}ssm_conv1d.weight", channels, KERNEL)
    add(f"{at}ssm_norm.weight", SIZE, spread=0.3, middle=1)
    add(f"{at}ssm_out.weight", WIDTH, values * SIZE)


def feed_forward(add: Callable[..., None], at: str, experts: bool) -> None:
    """The tensors of one layer's feed-forward part."""
    for name in ("gate", "up", "down"):
        for ending, many, width in (
            (("exps", (EXPERTS,), EXPERT), ("shexp", (), SHARED)) if experts else (("", (), FFN),)
        ):
            shape = (WIDTH, width) if name == "down" else (width, WIDTH)
            add(f"{at}ffn_{name}{'_' * bool(ending)}{ending}.weight", *many, *shape)
    if experts:
        add(f"{at}ffn_gate_inp.weight", EXPERTS, WIDTH)
        add(f"{at}ffn_gate_inp_shexp.weight", WIDTH, spread=0.2)


def write(architecture: str) -> None:
    """Write one file and the text that it is asked about."""
    import gguf
    import numpy as np

    random = np.random.default_rng(5)
    writer = gguf.GGUFWriter(FOLDER / f"{architecture}.gguf", architecture)
    metadata(writer, architecture)
    vocabulary(writer)

    def add(name: str, *shape: int, spread: float | None = None, middle: float = 0, rate: bool = False) -> None:
        draw = random.normal(size=shape)
        draw = -np.exp(draw - 1.5) if rate else (1.3 * shape[-1] ** -0.5 if spread is None else spread) * draw + middle
        writer.add_tensor(name, draw.astype(np.float32))

    add("token_embd.weight", VOCAB, WIDTH, spread=1)
    add("output_norm.weight", WIDTH, spread=0.3, middle=1)
    add("output.weight", VOCAB, WIDTH)
    for layer in range(LAYERS):
        at = f"blk.{layer}."
        for norm in ("attn_norm", "post_attention_norm"):
            add(f"{at}{norm}.weight", WIDTH, spread=0.3, middle=1)
        mixer(add, at, full=layer % 4 == 3)
        feed_forward(add, at, experts=architecture == "qwen35moe")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    text = {"ids": random.integers(0, 256, max(LENGTHS)).tolist(), "next": {}}
    (FOLDER / f"{architecture}.json").write_text(json.dumps(text) + "\n")


def ask(architecture: str) -> None:
    """Add llama.cpp's ten best log-probabilities behind each length; it does not tell where a byte is no character."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(FOLDER / f"{architecture}.gguf")
    params.n_ctx, params.n_parallel, params.port = 256, 1, 0
    server = xllamacpp.Server(params)
    path = FOLDER / f"{architecture}.json"
    text = json.loads(path.read_text())
    for length in LENGTHS:
        body = {"prompt": text["ids"][:length], "n_predict": 1, "n_probs": 10, "temperature": 0, "ignore_eos": True}
        data = json.dumps(body | {"cache_prompt": False}).encode()
        request = urllib.request.Request(
            f"{server.listening_address}/completion", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            found = json.load(answer).get("completion_probabilities")
        if found:
            best = found[0]["top_logprobs"]
            text["next"][str(length)] = [[one["id"], round(one["logprob"], 6)] for one in best]
    path.write_text(json.dumps(text) + "\n")


if __name__ == "__main__":
    for name in ARCHITECTURES:
        {"write": write, "ask": ask}[sys.argv[1]](name)
