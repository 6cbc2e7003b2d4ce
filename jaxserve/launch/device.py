"""What the device offers, and what JAX is told before it is used."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import jax

from jaxserve.config import EngineConfig
from jaxserve.plan import Hardware


def this_machine() -> Hardware:
    """The devices that are there."""
    return Hardware(jax.devices()[0].platform, len(jax.devices()), memory_bytes())


def memory_bytes() -> int:
    """Bytes that one device can hold: what it reports, or on CPU the machine's memory or its cgroup's limit.

    Devices of a CPU (a test forces several) share it.
    """
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(path).read_text(encoding="ascii")))
        except (OSError, ValueError):  # no such cgroup version, or "max"
            continue
    return min(limits) // len(jax.local_devices())


def configure_jax(config: EngineConfig) -> None:
    """Turns the persistent compilation cache on, for programs of every size; call before the first array is made."""
    logging.getLogger("jax").setLevel(logging.WARNING)  # it tells of every backend that this machine lacks
    if config.compilation_cache is not None:
        folder = config.compilation_cache.expanduser() / f"jax-{jax.__version__}"
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
