"""The floor as a whole: one model in two foreign forms is one model afterwards."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from jaxserve.checkpoint import manifest, silent
from jaxserve.checkpoint.convert import Published, convert
from jaxserve.checkpoint.parameters import write_parameters
from jaxserve.checkpoint.restore import restore
from jaxserve.checkpoint.safetensors import SafetensorsFolder
from jaxserve.checkpoint.store import Store
from jaxserve.errors import CheckpointError
from jaxserve.models.family import family_of
from jaxserve.models.weights import abstract, nest
from tests.models import tiny_checkpoints


def load(published: Published) -> tuple[dict[str, Any], dict[str, Any]]:
    manifest.verify(published.folder)
    config = json.loads((published.folder / "config.json").read_text())
    return config, restore(published.folder, abstract(family_of(config).rules, jnp.float32))


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return jax.tree.all(jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), left, right))


def test_a_gguf_file_and_a_folder_are_the_same_model(uncaged, tmp_path, published, forms, tiny, supports):
    from_folder = load(published)
    from_gguf = load(convert(forms["gguf"], Store(tmp_path), "tiny"))
    assert same(from_folder[1], from_gguf[1])
    assert {key: from_gguf[0][key] for key in tiny.config} == from_folder[0]
    supports("llama", "GGUF")


def test_control_a_file_of_unpermuted_rows_is_another_model(uncaged, tmp_path, published, tiny, to_gguf):
    path = to_gguf(tiny, tmp_path / "wrong.gguf", permuted=False)
    assert not same(load(published)[1], load(convert(path, Store(tmp_path / "store"), "tiny"))[1])


@pytest.mark.parametrize("case", tiny_checkpoints.CASES)
def test_every_family_is_filled_from_what_its_authors_library_writes(tmp_path, case, supports):
    content, scratch = tmp_path / "content", tmp_path / "scratch"
    content.mkdir()
    scratch.mkdir()
    source = SafetensorsFolder(tiny_checkpoints.FOLDER / case)
    family = family_of(source.hf_config())
    leaves = write_parameters(source, family.rules, family.ignored, "auto", content, scratch, silent)
    assert {leaf.path: leaf.shape for leaf in leaves} == {rule.param: rule.shape for rule in family.rules}
    expected = nest(tiny_checkpoints.leaves(family, tiny_checkpoints.tensors(case)))
    assert same(jax.tree.map(lambda a, b: a.astype(b.dtype), ocp.load(content / "params"), expected), expected)
    with pytest.raises(CheckpointError, match="does not call for"):
        write_parameters(source, family.rules[1:], family.ignored, "auto", content, scratch, silent)
    model_type = tiny_checkpoints.config(case)["model_type"]
    supports(model_type, "Hugging Face")
    if family.quantisation is not None:
        supports(model_type, type(family.quantisation).__name__)


def test_silence_is_a_progress():
    silent("phase", 0, 1)
