"""Sampling parameters of a pool's slots as arrays: the host's copy, and the one that a program gets.

Knows how a request's parameters become a row. Host arrays handed to JAX are never changed afterwards: each snapshot
is a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from jaxserve.decode.sampling import SamplingRows
from jaxserve.engine.request import Request
from jaxserve.plan import Plan, PoolPlan


class RowTable:
    """One row a slot; ``snapshot`` is rebuilt only after a row changed, and lies where ``sharding`` says."""

    def __init__(self, plan: Plan, pool: PoolPlan, sharding: jax.sharding.Sharding | None = None) -> None:
        rows = pool.rows
        self._sharding = sharding
        self._rows: dict[str, np.ndarray] = {
            "temperature": np.zeros(rows, np.float32),
            "top_k": np.zeros(rows, np.int32),
            "top_p": np.ones(rows, np.float32),
            "min_p": np.zeros(rows, np.float32),
            "repetition_penalty": np.ones(rows, np.float32),
            "presence_penalty": np.zeros(rows, np.float32),
            "frequency_penalty": np.zeros(rows, np.float32),
            "bias_ids": np.full((rows, plan.max_logit_bias), -1, np.int32),
            "bias": np.zeros((rows, plan.max_logit_bias), np.float32),
            "stop_ids": np.full((rows, plan.stop_width), -1, np.int32),
            "seed": np.zeros((rows, 2), np.uint32),
            "prompt_length": np.zeros(rows, np.int32),
            "min_length": np.zeros(rows, np.int32),
            "limit": np.zeros(rows, np.int32),
            "alternatives": np.zeros(rows, bool),
        }
        self._blank = {name: rows[0].copy() for name, rows in self._rows.items()}
        self._snapshot: SamplingRows | None = None

    def set(self, slot: int, request: Request, stop_ids: Sequence[int], seed: int) -> None:
        """Fills a slot's row."""
        sampling, length = request.sampling, len(request.prompt)
        self.clear(slot)
        rows = self._rows
        rows["temperature"][slot] = sampling.temperature
        rows["top_k"][slot] = sampling.top_k
        rows["top_p"][slot] = sampling.top_p
        rows["min_p"][slot] = sampling.min_p
        rows["repetition_penalty"][slot] = sampling.repetition_penalty
        rows["presence_penalty"][slot] = sampling.presence_penalty
        rows["frequency_penalty"][slot] = sampling.frequency_penalty
        for index, (token, value) in enumerate(sampling.logit_bias):
            rows["bias_ids"][slot, index], rows["bias"][slot, index] = token, value
        rows["stop_ids"][slot, : len(stop_ids)] = stop_ids
        rows["seed"][slot] = seed >> 32, seed & 0xFFFFFFFF
        rows["prompt_length"][slot] = length - request.written
        rows["min_length"][slot] = length + sampling.min_tokens
        rows["limit"][slot] = length + sampling.max_tokens
        rows["alternatives"][slot] = bool(sampling.logprobs)

    def clear(self, slot: int) -> None:
        """Empties a row, so that what it asked for costs nothing any more."""
        self._snapshot = None
        for name, rows in self._rows.items():
            rows[slot] = self._blank[name]

    def snapshot(self) -> SamplingRows:
        """The rows as they are now, on the device."""
        if self._snapshot is None:
            copies = {name: rows.copy() for name, rows in self._rows.items()}
            self._snapshot = SamplingRows(**jax.device_put(copies, self._sharding))
        return self._snapshot
