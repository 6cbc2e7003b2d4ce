"""Write smollm2.npz: what transformers computes, in float32, from the SmolLM2-135M-Instruct GGUF file.

The file's weights are dequantised by the gguf package, so the figures are those of the quantised model computed
exactly. Greedy continuations do not stop at the end token. Needs the file:

    python -m tests.reference.make_smollm2 SmolLM2-135M-Instruct.Q4_1.gguf
"""

import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import LlamaForCausalLM
from transformers.utils import logging
from transformers.utils.chat_template_utils import render_jinja_template

from tests.reference.gguf_llama import load, value
from tests.reference.gguf_tokenizer import smollm2

FILE = Path(__file__).parent / "smollm2.npz"
NEW_TOKENS, BEST, COLUMNS = 32, 5, 256

LONG = """\
The lighthouse at the end of the peninsula had not been lit for eleven years when Marta came to repair it. She brought
two crates of tools, a box of tinned peaches and a notebook in which she wrote down everything that was broken: the
third stair, the door to the lamp room, the brass cogs that once turned the lens. "A machine forgets nothing," her
teacher used to say, "it only waits for somebody to ask." So she asked. On the first day she cleaned the cogs with oil
and a toothbrush. On the second day she replaced 14 of the 96 glass prisms. On the third day it rained, and she sat at
the window and counted the boats: 7 in the morning, 3 at noon, none in the evening.

The keeper's log lay in a drawer under the desk. Its last entry was short:

    1. Oil is low.
    2. The wind has turned to the north.
    3. Somebody is coming up the path.

Marta read it three times. Then she took the lamp, went down the 128 steps, and opened the door. Outside there was
nothing but the grass, the sea and a small grey dog, which looked at her as if it had been waiting for a long time and
did not mind. She gave it a peach. When the light came on that night, for the first time in eleven years, the fishermen
on the far side of the bay stopped their engines and stood up in their boats, and the dog"""

TEXTS = {
    "capital": "The capital of France is",
    "fibonacci": "def fibonacci(n):\n",
    "long": LONG,
    "unicode": "Grüße aus Zürich! 日本語のテキスト、naïve café — ½ litre of кефир costs €3. 👩‍🚀🇨🇭 مرحبا",
    "single": "The",
}
QUESTION = [{"role": "user", "content": "Name three primary colours."}]


def prompts(reader: gguf.GGUFReader) -> dict[str, list[int]]:
    """The ids of the six prompts by name."""
    tokenizer = smollm2(reader)
    template = value(reader, "tokenizer.chat_template")
    rendered, _ = render_jinja_template([QUESTION], chat_template=template, add_generation_prompt=True)
    texts = TEXTS | {"chat": rendered[0]}
    return {name: tokenizer.encode(text, add_special_tokens=False).ids for name, text in texts.items()}


@torch.no_grad()
def logits(model: LlamaForCausalLM, ids: list[int]) -> torch.Tensor:
    """Logits [t, v] of one uncached pass."""
    tokens = torch.tensor([ids])
    return model(tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits[0]


def greedy(model: LlamaForCausalLM, ids: list[int]) -> tuple[list[int], np.ndarray]:
    """The most likely continuation and, for each of its tokens, the distance of the best two logits.

    Made with the cache, then confirmed by one pass without it.
    """
    tokens = torch.tensor([ids])
    out = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=NEW_TOKENS)
    line = out[0].tolist()
    best = logits(model, line)[len(ids) - 1 : -1].topk(2)
    if best.indices[:, 0].tolist() != line[len(ids) :]:
        raise SystemExit("transformers continues differently with and without its cache")
    return line[len(ids) :], (best.values[:, 0] - best.values[:, 1]).numpy()


def goldens(model: LlamaForCausalLM, ids: list[int], columns: np.ndarray) -> dict[str, np.ndarray]:
    """Everything the file holds about one prompt."""
    values = logits(model, ids)
    total = values.double().logsumexp(-1)
    best = values.topk(BEST)
    own = values[torch.arange(len(ids) - 1), torch.tensor(ids[1:], dtype=torch.long)].double() - total[:-1]
    line, gaps = greedy(model, ids)
    return {
        "ids": np.array(ids, np.int32),
        "logits": values[:, torch.from_numpy(columns).long()].numpy(),
        "logsumexp": total.float().numpy(),
        "top_ids": best.indices.numpy().astype(np.int32),
        "top_logits": best.values.numpy(),
        "last_logits": values[-1].numpy(),
        "logprobs": own.float().numpy(),
        "greedy": np.array(line, np.int32),
        "gaps": gaps,
    }


def main(path: Path) -> None:
    """Write the file and print what can be compared by eye."""
    logging.set_verbosity_error()
    model = load(path)
    model.generation_config.eos_token_id = None
    columns = np.sort(np.random.default_rng(0).choice(model.config.vocab_size, COLUMNS, replace=False)).astype(np.int32)
    arrays = {"columns": columns}
    for name, ids in prompts(gguf.GGUFReader(path)).items():
        found = goldens(model, ids, columns)
        arrays |= {f"{name}.{key}": array for key, array in found.items()}
        best = found["top_logits"][-1] - found["logsumexp"][-1]
        print(f"{name}: {len(ids)} ids {ids[:8]}, next", *zip(found["top_ids"][-1], best.round(4), strict=True))
        print(f"    greedy {found['greedy'].tolist()}, gap {found['gaps'].min():.4f}")
    np.savez_compressed(FILE, **arrays)
    print(f"{FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
