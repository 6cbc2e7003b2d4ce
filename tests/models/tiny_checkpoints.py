"""The tiny checkpoints of ``tests/reference`` as models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from jaxserve.models.family import Family, family_of
from jaxserve.models.weights import nest, params_of

FOLDER = Path(__file__).parents[1] / "reference" / "tiny"
CASES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())


def config(case: str) -> dict[str, Any]:
    return json.loads((FOLDER / case / "config.json").read_text())


def goldens(case: str) -> dict[str, np.ndarray]:
    return dict(np.load(FOLDER / case / "goldens.npz"))


def tensors(case: str) -> dict[str, np.ndarray]:
    files = sorted((FOLDER / case).glob("*.safetensors"))
    return {name: np.asarray(leaf, np.float32) for file in files for name, leaf in load_file(file).items()}


def params(family: Family, weights: dict[str, np.ndarray]) -> dict[Any, Any]:
    return params_of(nest({rule.param: jnp.asarray(rule.make(weights, np.float32)) for rule in family.rules}))


def load(case: str) -> tuple[Family, dict[Any, Any]]:
    family = family_of(config(case))
    return family, params(family, tensors(case))
