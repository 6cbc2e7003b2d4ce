"""Write gemma3.npz: what transformers computes, in float32, from the Gemma 3 270M GGUF file.

As make_smollm2.py does, which see, but for a model with windows: one of the prompts is longer than a window, and fewer
columns of the vocabulary are kept. Needs the file, whose terms are for its user to accept:

    python -m tests.reference.make_gemma3 gemma-3-270m-q4_k_m.gguf
"""

import sys
from pathlib import Path

import gguf
import numpy as np
from transformers.utils import logging

from tests.reference.gguf_gemma3 import load
from tests.reference.gguf_tokenizer import Scored
from tests.reference.make_smollm2 import LONG, TEXTS, goldens

FILE = Path(__file__).parent / "gemma3.npz"
COLUMNS = 48
KEPT = ("ids", "logits", "logsumexp", "top_ids", "top_logits", "logprobs", "greedy", "gaps")
PROMPTS = {name: text for name, text in TEXTS.items() if name != "long"} | {
    "long": LONG,
    "window": "\n\n".join((LONG, TEXTS["unicode"], LONG[600:1500])),
}


def main(path: Path) -> None:
    """Write the file and print what can be compared by eye."""
    logging.set_verbosity_error()
    model = load(path)
    model.generation_config.eos_token_id = None
    tokenizer = Scored(gguf.GGUFReader(path))
    columns = np.sort(np.random.default_rng(0).choice(model.config.vocab_size, COLUMNS, replace=False)).astype(np.int32)
    arrays = {"columns": columns}
    for name, text in PROMPTS.items():
        ids = [model.config.bos_token_id, *tokenizer.encode(text)]
        found = goldens(model, ids, columns)
        arrays |= {f"{name}.{key}": found[key] for key in KEPT}
        best = found["top_logits"][-1] - found["logsumexp"][-1]
        print(f"{name}: {len(ids)} ids {ids[:8]}, next", *zip(found["top_ids"][-1], best.round(4), strict=True))
        print(f"    greedy {found['greedy'].tolist()}, gap {found['gaps'].min():.4f}")
    np.savez_compressed(FILE, **arrays)
    print(f"{FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
