"""What all tests share: shape checks, where compiled programs are kept, the tiny engine and the real model."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import hypothesis
import jax
import pytest
from jaxtyping import install_import_hook

# Shapes and dtypes in signatures are checked in tests only; before the first import of what is checked.
install_import_hook(["jaxserve.models", "jaxserve.decode"], "beartype.beartype")

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / ".cache" / "checkpoints"
MODEL = "smollm2-135m-instruct"
GATED_MODEL = "gemma3-270m"
MOST_MAPS = 20_000

# The suite compiles the same small programs again and again: keep them, however quickly they compile.
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

hypothesis.settings.register_profile("house", deadline=None, print_blob=True)
hypothesis.settings.load_profile("house")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what `-m` does not name
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "supports" in getattr(item, "fixturenames", ()):
            item.add_marker("supports")


@pytest.fixture
def supports(request: pytest.FixtureRequest) -> Callable[..., None]:
    """For tests to say, at their end, that a family is tested (or "refused") in a column of the support matrix."""

    def say(model_type: str, column: str, value: str = "tested") -> None:
        request.node.user_properties.append(("supports", f"{model_type}|{column}|{value}"))

    return say


@pytest.fixture(scope="module", autouse=True)
def few_maps():
    """Forgets compiled programs before there are too many: each has memory maps, of which a process may have 65,530."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def tiny():
    """A compiled engine around a tiny random model; tests leave it idle."""
    from jaxserve.testing import tiny_engine

    engine = tiny_engine()
    yield engine
    assert not engine.has_work


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's folder, pulled once and kept; float32, so that it can be compared with other engines."""
    from jaxserve.checkpoint.catalog import read_catalog
    from jaxserve.checkpoint.pull import pull
    from jaxserve.checkpoint.store import Store
    from jaxserve.launch.golden import goldens

    catalog = read_catalog(ROOT / "checkpoints" / "catalog.yaml")
    return pull(MODEL, Store(MODELS), catalog, dtype="float32", goldens=goldens).folder


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """The folder of the model under terms of its own, in float32; nobody accepts them by running tests."""
    from jaxserve.checkpoint.catalog import read_catalog
    from jaxserve.checkpoint.pull import pull
    from jaxserve.checkpoint.store import Store
    from jaxserve.launch.golden import goldens

    store = Store(MODELS)
    if GATED_MODEL not in store.models():
        pytest.skip(f"JAXSERVE_CHECKPOINTS__ROOT={MODELS} jaxserve pull {GATED_MODEL} --accept-licence --dtype float32")
    catalog = read_catalog(ROOT / "checkpoints" / "catalog.yaml")
    return pull(GATED_MODEL, store, catalog, dtype="float32", accept_licence=True, goldens=goldens).folder
