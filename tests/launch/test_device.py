from __future__ import annotations

from pathlib import Path

import jax

from jaxserve.config import EngineConfig
from jaxserve.launch import device


def test_the_device_has_memory():
    assert 2**28 < device.memory_bytes() < 2**50


def test_programs_are_kept_by_version_of_jax(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    try:
        device.configure_jax(EngineConfig(compilation_cache=tmp_path))
        assert Path(jax.config.jax_compilation_cache_dir) == tmp_path / f"jax-{jax.__version__}"
        device.configure_jax(EngineConfig(compilation_cache=None))
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
