"""A tiny model as an operator has it: converted, with goldens, in a store; and a configuration that serves it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.checkpoint.convert import convert
from jaxserve.checkpoint.store import Store
from jaxserve.config import CheckpointsConfig, Config, EngineConfig, LogConfig, ModelConfig, Pool, ServerConfig
from jaxserve.launch.golden import goldens
from jaxserve.models.family import family_of
from jaxserve.testing import TINY

TOKENIZER = Path(__file__).parents[1] / "reference" / "tiny_bpe"
NAME = "tiny"


def write_source(folder: Path, seed: int = 0) -> Path:
    """A Hugging Face folder: random weights, a real tokenizer of 400 tokens, a chat template."""
    folder.mkdir()
    config = TINY | {"vocab_size": 400, "eos_token_id": 2, "architectures": ["LlamaForCausalLM"]}
    random = np.random.default_rng(seed)
    tensors = {}
    for rule in family_of(config).rules:
        draw = random.normal(size=rule.shape).astype(np.float32)
        tensors[rule.source] = 1 + 0.1 * draw if "norm" in rule.source else 0.4 * draw
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2], "temperature": 0.8, "top_k": 50}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def tiny_store(tmp_path_factory) -> Path:
    """The root of a store with one version of the tiny model."""
    root = tmp_path_factory.mktemp("launch")
    convert(write_source(root / "source"), Store(root / "store"), NAME, dtype="float32", goldens=goldens)
    return root / "store"


def configured(root: Path, **engine) -> Config:
    """A configuration that serves the tiny model from a store."""
    cache = jax.config.jax_compilation_cache_dir
    return Config(
        model=ModelConfig(id=NAME, dtype="float32"),
        checkpoints=CheckpointsConfig(root=root),
        engine=EngineConfig(
            **{"pools": (Pool(4, 128),), "compilation_cache": Path(cache).parent / "programs", **engine}
        ),
        server=ServerConfig(port=0, lame_duck_s=0.2, drain_s=5.0),
        log=LogConfig(format="json"),
    )


@pytest.fixture(scope="session")
def loaded(tiny_store):
    """The tiny model, brought to readiness."""
    from jaxserve.launch.loading import load_model

    before = jax.config.jax_compilation_cache_dir
    model = load_model(configured(tiny_store), lambda phase, done, total: None)
    jax.config.update("jax_compilation_cache_dir", before)
    return model
