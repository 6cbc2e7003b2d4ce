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


def test_devices_of_a_cpu_share_its_memory(monkeypatch):
    alone = device.this_machine()
    assert (alone.name, alone.devices, alone.memory) == ("cpu", 1, device.memory_bytes())
    monkeypatch.setattr(device.jax, "local_devices", lambda: jax.devices() * 4)
    assert device.memory_bytes() == alone.memory // 4
