"""What all tests share: where compiled programs are kept between runs."""

from __future__ import annotations

from pathlib import Path

import jax

ROOT = Path(__file__).resolve().parent.parent

# The suite compiles the same small programs again and again: keep them, however quickly they compile.
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
