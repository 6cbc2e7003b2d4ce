"""Sampling rows for tests: neutral parameters, some of them changed."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxserve.decode.sampling import SamplingRows


def sampling_rows(count: int, **changes: Any) -> SamplingRows:
    """``count`` greedy rows without limits; ``changes`` are whole arrays or one value for every row."""
    neutral: dict[str, tuple[Any, Any]] = {
        "temperature": (0.0, np.float32),
        "top_k": (0, np.int32),
        "top_p": (1.0, np.float32),
        "min_p": (0.0, np.float32),
        "repetition_penalty": (1.0, np.float32),
        "presence_penalty": (0.0, np.float32),
        "frequency_penalty": (0.0, np.float32),
        "prompt_length": (0, np.int32),
        "min_length": (0, np.int32),
        "limit": (2**30, np.int32),
        "alternatives": (False, bool),
    }
    wide: dict[str, tuple[Any, Any]] = {
        "bias_ids": (np.full(4, -1), np.int32),
        "bias": (np.zeros(4), np.float32),
        "stop_ids": (np.full(3, -1), np.int32),
        "seed": (np.zeros(2), np.uint32),
    }
    fields = {}
    for name, (value, dtype) in {**neutral, **wide}.items():
        given = np.asarray(changes.pop(name, value), dtype)
        depth = 2 if name in wide else 1
        fields[name] = jnp.asarray(given if given.ndim == depth else np.broadcast_to(given, (count, *given.shape)))
    assert not changes, changes
    return SamplingRows(**fields)
