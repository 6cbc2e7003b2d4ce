"""What all tests share: where compiled programs are kept, and that a property's first run may be slow."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import jax

ROOT = Path(__file__).resolve().parent.parent

# The suite compiles the same small programs again and again: keep them, however quickly they compile.
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

hypothesis.settings.register_profile("house", deadline=None, print_blob=True)
hypothesis.settings.load_profile("house")
