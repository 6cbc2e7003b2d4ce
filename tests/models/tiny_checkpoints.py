"""The tiny checkpoints of ``tests/reference`` as models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxserve.checkpoint.safetensors import SafetensorsFolder
from jaxserve.errors import CheckpointError
from jaxserve.models.family import Family, family_of, reader_of
from jaxserve.models.weights import nest, params_of

FOLDER = Path(__file__).parents[1] / "reference" / "tiny"


def config(case: str) -> dict[str, Any]:
    return json.loads((FOLDER / case / "config.json").read_text())


def readable(case: str) -> bool:
    """Whether there is such a family here."""
    try:
        reader_of(config(case)["model_type"])
    except CheckpointError:
        return False
    return True


ALL = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
CASES = [case for case in ALL if readable(case)]


def goldens(case: str) -> dict[str, np.ndarray]:
    return dict(np.load(FOLDER / case / "goldens.npz"))


def tensors(case: str) -> dict[str, np.ndarray]:
    return dict(SafetensorsFolder(FOLDER / case).tensors())


def leaves(family: Family, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {rule.param: rule.make(weights, np.float32) for rule in family.rules}


def params(family: Family, weights: dict[str, np.ndarray]) -> dict[Any, Any]:
    return params_of(nest({path: jnp.asarray(leaf) for path, leaf in leaves(family, weights).items()}))


def load(case: str) -> tuple[Family, dict[Any, Any]]:
    family = family_of(config(case))
    return family, params(family, tensors(case))
