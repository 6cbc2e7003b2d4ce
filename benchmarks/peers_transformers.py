"""Decode speed of transformers on the CPU, one round at a time, so that it can take turns with another process.

Knows torch, transformers and (for a GGUF file) the reader of tests/reference; nothing of jaxserve. Run it from the root
of the repository in an environment that has them:

    python -m benchmarks.peers_transformers MODEL [--threads 2] [--input 32] [--output 128] [--rounds N]

MODEL is a Hugging Face folder or a Llama-shaped GGUF file. A first line on stdout says that the model is warm. Without
--rounds each line read from stdin ("1" or "16", any batch size) is one round and is answered by one JSON line; with it,
batches 1 and 16 take turns N times. A round is one greedy `generate` of a batch of equally long prompts; the end token
does not stop it. Speeds are of the tokens after the first, so without prefill; `seconds` is the whole round.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from tests.reference.gguf_llama import load

WARM_UP = (1, 16)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class TokenTimes(StoppingCriteria):
    """Notes when each token was there; never stops."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def model_at(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a folder or a GGUF file, computed with torch's fused attention."""
    if path.is_dir():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa").eval()
    else:
        model = load(path, dtype, "sdpa")
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def measure(model: PreTrainedModel, batch: int, prompt_length: int, new_tokens: int) -> dict[str, Any]:
    """One round: seconds and tokens per second of `batch` sequences together."""
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(100, model.config.vocab_size, (batch, prompt_length), generator=generator)
    clock = TokenTimes()
    start = time.perf_counter()
    out = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        max_new_tokens=new_tokens,
        stopping_criteria=StoppingCriteriaList([clock]),
    )
    end = time.perf_counter()
    if out.shape != (batch, prompt_length + new_tokens):
        raise SystemExit(f"generated {tuple(out.shape)}")
    decode = clock.times[-1] - clock.times[0]
    return {
        "batch": batch,
        "input": prompt_length,
        "output": new_tokens,
        "seconds": round(end - start, 4),
        "first_token_seconds": round(clock.times[0] - start, 4),
        "tokens_per_second": round(batch * (new_tokens - 1) / decode, 2),
    }


def batches(rounds: int | None) -> Iterable[int]:
    """The batch size of each round: from stdin until it ends, or 1 and 16 in turn."""
    if rounds is not None:
        return [batch for _ in range(rounds) for batch in WARM_UP]
    return (int(line) for line in iter(sys.stdin.readline, "") if line.strip())


def main() -> None:
    """Load, warm up, answer rounds."""
    parser = argparse.ArgumentParser(description="Decode speed of transformers on the CPU, one round at a time.")
    parser.add_argument("model", type=Path, help="a Hugging Face folder or a GGUF file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--input", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=128, help="new tokens of each sequence")
    parser.add_argument("--rounds", type=int, help="run by itself instead of reading stdin")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_num_interop_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = model_at(options.model, DTYPES[options.dtype])
    for batch in WARM_UP:
        measure(model, batch, options.input, 8)
    ready = {
        "ready": True,
        "engine": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "dtype": options.dtype,
        "threads": options.threads,
        "python": platform.python_version(),
    }
    print(json.dumps(ready), flush=True)
    for batch in batches(options.rounds):
        print(json.dumps(measure(model, batch, options.input, options.output)), flush=True)


if __name__ == "__main__":
    main()
