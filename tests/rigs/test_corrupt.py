"""A few damaged checkpoints are refused by name; and what would be wrong about a refusal shows."""

from __future__ import annotations

import jax
import pytest

from tests.rigs.corrupt import Copy, Damage, damages, fault, load

pytestmark = pytest.mark.rig


@pytest.fixture
def copy(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    yield Copy(tmp_path)
    jax.config.update("jax_compilation_cache_dir", before)


def test_damage_is_refused_by_name(copy):
    before = {path: path.read_bytes() for path in copy.root.rglob("*") if path.is_file()}
    for damage in damages(copy.version, 40, seed=3):
        assert fault(damage, *copy.with_damage(damage, lambda: load(copy.root))) == "", damage
    assert {path: path.read_bytes() for path in copy.root.rglob("*") if path.is_file()} == before


def test_every_file_is_damaged_in_every_way(copy):
    files = {path.relative_to(copy.version).as_posix() for path in copy.version.rglob("*") if path.is_file()}
    done = {(damage.path, damage.kind) for damage in damages(copy.version, 3 * len(files), seed=1)}
    assert {path for path, _ in done} == files
    assert {kind for _, kind in done} == {"flip", "truncate", "delete", "grow"}


@pytest.mark.parametrize("kind", ["flip", "truncate", "delete", "grow"])
def test_damage_changes_the_file(tmp_path, kind):
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    Damage("a", kind, 1).apply(path)
    assert not path.exists() or path.read_bytes() != b"abc"


def test_control_a_wrong_refusal_shows():
    damage = Damage("params/a", "flip", 1)
    good = "/store/params/a is damaged."
    assert fault(damage, good, {"verifying"}) == ""
    assert fault(damage, "", {"verifying", "loading"}) == "served"
    assert "not named" in fault(damage, "Something is damaged.", {"verifying"})
    assert "refused only after" in fault(damage, good, {"verifying", "loading"})
    assert fault(damage, good + "\nTraceback", {"verifying"}) == "more than a sentence"
