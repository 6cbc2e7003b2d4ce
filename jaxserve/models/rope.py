"""Rotary position embeddings: inverse frequencies of every kind, and the rotation itself.

Knows the fields ``rope_parameters`` (new), ``rope_theta`` + ``rope_scaling`` (old) of Hugging Face configurations.
Formulas after the papers named at each function and transformers' ``modeling_rope_utils``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class Rope:
    """A rotation by position, hashable so that it can be part of a static configuration.

    Attributes:
        frequencies: radians per position of each rotated pair; ``2 * len(frequencies)`` leading dimensions of a head
            are rotated (first half against second half), the others pass through.
        scale: factor on cosine and sine (YaRN's and LongRoPE's attention factor).
        threshold: up to this many positions ``frequencies`` hold, beyond it ``long_frequencies`` (LongRoPE only).
            A static-shape server decides by the length of the cache, never in the middle of a request.
        long_frequencies: see ``threshold``.
    """

    frequencies: tuple[float, ...]
    scale: float = 1.0
    threshold: int | None = None
    long_frequencies: tuple[float, ...] = ()

    def table(
        self, positions: Int[Array, "b t"], length: int, dtype: jnp.dtype
    ) -> tuple[Float[Array, "b t r"], Float[Array, "b t r"]]:
        """Cosine and sine for ``positions`` in a cache (or sequence) of ``length`` positions, computed in float32."""
        long = self.threshold is not None and length > self.threshold
        frequencies = jnp.asarray(self.long_frequencies if long else self.frequencies, jnp.float32)
        angles = positions[..., None].astype(jnp.float32) * frequencies
        return (jnp.cos(angles) * self.scale).astype(dtype), (jnp.sin(angles) * self.scale).astype(dtype)


def rotate(
    x: Float[Array, "b t n h"], cosine: Float[Array, "b t r"], sine: Float[Array, "b t r"]
) -> Float[Array, "b t n h"]:
    """Rotates the pairs (i, i + r) of the first ``2 r`` dimensions of each head."""
    r = cosine.shape[-1]
    cosine, sine = cosine[:, :, None], sine[:, :, None]
    first, second, rest = x[..., :r], x[..., r : 2 * r], x[..., 2 * r :]
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine, rest], axis=-1)


def rope_from_hf(hf: Mapping[str, Any], head_size: int, default_theta: float = 10_000.0) -> Rope:
    """Reads a configuration's rope fields, new or old.

    Raises:
        CheckpointError: an unknown kind, or a kind whose parameters are missing.
    """
    fields = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    kind = str(fields.get("rope_type", fields.get("type", "default")))
    theta = float(_first(fields.get("rope_theta"), hf.get("rope_theta"), default_theta))
    partial = float(_first(fields.get("partial_rotary_factor"), hf.get("partial_rotary_factor"), 1.0))
    if not 0 < partial <= 1:
        raise CheckpointError("config.json: partial_rotary_factor is not above 0 and at most 1", param="rope_scaling")
    original = hf.get("original_max_position_embeddings", fields.get("original_max_position_embeddings"))
    fields["original"] = int(_first(original, hf.get("max_position_embeddings"), 0))
    fields["maximum"] = int(hf.get("max_position_embeddings", 0))
    reader = {
        "default": _default,
        "mrope": _default,  # three equal position rows for text: a plain rotation
        "linear": _linear,
        "llama3": _llama3,
        "yarn": _yarn,
        "longrope": _longrope,
        "su": _longrope,
        "proportional": _proportional,
    }.get(kind)
    if reader is None:
        raise CheckpointError(f"config.json: rope type {kind!r} is not supported", param="rope_scaling")
    dims = head_size if kind == "proportional" else int(head_size * partial)
    base = theta ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)
    fields["partial"], fields["theta"] = partial, theta
    try:
        return reader(base, fields)
    except KeyError as missing:
        raise CheckpointError(f"config.json: rope type {kind!r} lacks {missing}", param="rope_scaling") from None


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _rope(frequencies: np.ndarray, scale: float = 1.0) -> Rope:
    if not (np.isfinite(np.asarray(frequencies, np.float32)).all() and math.isfinite(scale)):
        raise CheckpointError("config.json: the rotation's parameters give no finite angles", param="rope_scaling")
    return Rope(tuple(float(f) for f in np.asarray(frequencies, np.float32)), float(scale))


def _default(base: np.ndarray, _: Mapping[str, Any]) -> Rope:
    """Su et al. 2021, RoFormer (arXiv 2104.09864)."""
    return _rope(base)


def _linear(base: np.ndarray, fields: Mapping[str, Any]) -> Rope:
    """Position interpolation, Chen et al. 2023 (arXiv 2306.15595)."""
    return _rope(base / float(fields["factor"]))


def _llama3(base: np.ndarray, fields: Mapping[str, Any]) -> Rope:
    """Llama 3.1 model card: long waves are stretched, short ones kept, the band between is blended."""
    factor, original = float(fields["factor"]), fields["original"]
    low, high = float(fields["low_freq_factor"]), float(fields["high_freq_factor"])
    wavelength = 2 * math.pi / base
    smooth = (original / wavelength - low) / (high - low)
    blended = base * ((1 - smooth) / factor + smooth)
    stretched = np.where(wavelength > original / low, base / factor, blended)
    return _rope(np.where(wavelength < original / high, base, stretched))


def _yarn(base: np.ndarray, fields: Mapping[str, Any]) -> Rope:
    """YaRN, Peng et al. 2023 (arXiv 2309.00071)."""
    dims, theta, original = 2 * len(base), fields["theta"], fields["original"]
    factor = float(fields.get("factor") or fields["maximum"] / original)

    def dimension(rotations: float) -> float:
        return dims * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(float(fields.get("beta_fast") or 32)), dimension(float(fields.get("beta_slow") or 1))
    if fields.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    ramp = np.clip((np.arange(len(base)) - low) / ((high - low) or 0.001), 0, 1)
    return _rope(base / factor * ramp + base * (1 - ramp), _yarn_scale(factor, fields))


def _yarn_scale(factor: float, fields: Mapping[str, Any]) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    given, weight, all_dims = (fields.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None:
        return float(given)
    return mscale(float(weight)) / mscale(float(all_dims)) if weight and all_dims else mscale(1.0)


def _longrope(base: np.ndarray, fields: Mapping[str, Any]) -> Rope:
    """LongRoPE, Ding et al. 2024 (arXiv 2402.13753): one list of factors up to the original length, one beyond."""
    original = fields["original"]
    factor = float(fields.get("factor") or fields["maximum"] / original)
    scale = fields.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    short, long = (_rope(base / np.asarray(fields[name], np.float64)) for name in ("short_factor", "long_factor"))
    return Rope(short.frequencies, float(scale), original, long.frequencies)


def _proportional(base: np.ndarray, fields: Mapping[str, Any]) -> Rope:
    """Only the first share of the pairs turns, the others stand still; pairs still span the whole head."""
    turning = int(fields["partial"] * len(base))
    return _rope(np.where(np.arange(len(base)) < turning, base / float(fields.get("factor") or 1.0), 0.0))
