"""Decode speed of jaxserve, one round at a time, so that it can take turns with another process.

The counterpart of ``peers_transformers.py``: the same protocol, the same figures, in the project's own environment.

    python -m benchmarks.worker [--input 32] [--output 128] [--dtype bfloat16]

It serves the default model from ``checkpoints/`` with one engine for each batch size, each in a pool as large as the
batch. Each line of stdin is a batch size and is answered by one JSON line.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxserve.checkpoint import silent
from jaxserve.config import Config, EngineConfig, ModelConfig, Pool
from jaxserve.engine.request import Request, SamplingParams
from jaxserve.launch import LoadedModel, load_model

BATCHES = (1, 16)


def load(batch: int, options: argparse.Namespace) -> LoadedModel:
    """The model in a pool for ``batch`` requests."""
    pool = Pool(batch, options.input + options.output)
    cache = Path.cwd() / ".cache" / "programs"
    config = Config(model=ModelConfig(dtype=options.dtype), engine=EngineConfig(pools=(pool,), compilation_cache=cache))
    return load_model(config, silent)


def measure(model: LoadedModel, batch: int, prompt_length: int, new_tokens: int) -> dict[str, Any]:
    """One round: seconds and tokens per second of ``batch`` greedy requests together."""
    random = np.random.default_rng(batch)
    vocab = model.plan.model.vocab_size
    sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    prompts = random.integers(100, vocab, (batch, prompt_length)).tolist()
    requests = [Request(f"r{index}", tuple(prompt), sampling) for index, prompt in enumerate(prompts)]
    count, first, after_first, last = 0, 0.0, 0, 0.0
    start = time.perf_counter()
    for request in requests:
        model.engine.submit(request)
    begun: set[str] = set()
    while model.engine.has_work:
        for request_id, delta in model.engine.tick():
            last = time.perf_counter()
            count += len(delta.tokens)
            begun.add(request_id)
            if len(begun) == batch and not first:
                first, after_first = last, count  # everybody decodes from here on
    if count != batch * new_tokens:
        raise SystemExit(f"{count} tokens instead of {batch * new_tokens}")
    return {
        "batch": batch,
        "input": prompt_length,
        "output": new_tokens,
        "seconds": round(last - start, 4),
        "first_token_seconds": round(first - start, 4),
        "tokens_per_second": round((count - after_first) / (last - first), 2),
    }


def main() -> None:
    """Load, warm up, answer rounds."""
    parser = argparse.ArgumentParser(description="Decode speed of jaxserve, one round at a time.")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--input", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=128, help="new tokens of each sequence")
    options = parser.parse_args()
    models = {batch: load(batch, options) for batch in BATCHES}
    for batch, model in models.items():
        measure(model, batch, options.input, 8)
    engine = f"jaxserve, jax {jax.__version__}"
    ready = {"ready": True, "engine": engine, "dtype": options.dtype, "python": platform.python_version()}
    print(json.dumps(ready), flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(models[int(line)], int(line), options.input, options.output)), flush=True)


if __name__ == "__main__":
    main()
