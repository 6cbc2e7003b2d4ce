"""``jaxserve bench``: how fast the engine in this process writes. Timings for people; nothing here is a test."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

import numpy as np

from jaxserve.engine.request import Request, SamplingParams
from jaxserve.launch.loading import LoadedModel


def bench(model: LoadedModel, *, streams: int, prompt_tokens: int, output_tokens: int) -> Mapping[str, float]:
    """One run of ``streams`` greedy requests at once; figures by name."""
    random = np.random.default_rng(0)
    low, high = min(1000, model.plan.model.vocab_size // 2), model.plan.model.vocab_size
    sampling = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    requests = [
        Request(f"bench-{index}", tuple(random.integers(low, high, prompt_tokens).tolist()), sampling)
        for index in range(streams)
    ]
    first: dict[str, float] = {}
    gaps: list[float] = []
    last: dict[str, float] = {}
    count = 0
    began = time.perf_counter()
    for request in requests:
        model.engine.submit(request)
    while model.engine.has_work:
        for request_id, delta in model.engine.tick():
            now = time.perf_counter()
            if request_id in last:
                gaps += [(now - last[request_id]) / max(1, len(delta.tokens))] * len(delta.tokens)
            first.setdefault(request_id, now - began)
            last[request_id] = now
            count += len(delta.tokens)
    seconds = time.perf_counter() - began
    return {
        "streams": streams,
        "tokens/s": count / seconds,
        "ttft p50 ms": 1000 * statistics.median(first.values()),
        "itl p50 ms": 1000 * statistics.median(gaps or [0.0]),
        "seconds": seconds,
    }
