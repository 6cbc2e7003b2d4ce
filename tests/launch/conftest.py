"""A tiny model as an operator has it: converted, with goldens, in a store; and a configuration that serves it."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest
from msgspec import structs

from jaxserve.config import CheckpointsConfig, Config, EngineConfig, LogConfig, ModelConfig, Pool, ServerConfig
from tests.rigs import tiny
from tests.rigs.tiny import NAME


@pytest.fixture(scope="session")
def tiny_store() -> Path:
    """The root of a store with one version of the tiny model; copy it before you change it."""
    return tiny.tiny_store()


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
    return _loaded(configured(tiny_store))


@pytest.fixture(scope="session")
def blocks():
    """One that fills in blocks, brought to readiness."""
    config = configured(tiny.tiny_store(tiny.BLOCKS))
    return _loaded(structs.replace(config, model=structs.replace(config.model, id=tiny.BLOCKS)))


def _loaded(config: Config):
    from jaxserve.launch.loading import load_model

    before = jax.config.jax_compilation_cache_dir
    model = load_model(config, lambda phase, done, total: None)
    jax.config.update("jax_compilation_cache_dir", before)
    return model
