"""Goldens: made by the whole-sequence pass, kept by the served one, broken by a changed weight."""

from __future__ import annotations

import json
import shutil

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxserve.engine.engine import Engine
from jaxserve.errors import CheckpointError, SelfTestFailed
from jaxserve.launch import golden
from jaxserve.launch.loading import LoadedModel, load_model
from jaxserve.models.decoding import RULES
from tests.launch.conftest import configured
from tests.models import tiny_checkpoints as checkpoints


def silent(phase: str, done: int, total: int) -> None:
    pass


def test_goldens_are_stored_and_kept(loaded: LoadedModel):
    stored = json.loads((loaded.folder / "goldens.json").read_text())
    assert sum(len(one["tokens"]) for one in stored["prompts"]) >= golden.ENOUGH
    heard = []
    golden.self_test(loaded.engine, loaded.folder, lambda *step: heard.append(step))
    assert heard[-1] == ("selftest", len(stored["prompts"]), len(stored["prompts"]))
    assert golden.goldens(loaded.folder) == stored


def test_a_changed_weight_fails_the_test(loaded: LoadedModel):
    engine: Engine = loaded.engine
    layer = engine.device.programs._params["layers"][1]["ffn"]["down"]
    good = layer["kernel"]
    try:
        layer["kernel"] = good * -1.0
        with pytest.raises(SelfTestFailed, match="golden 0"):
            golden.self_test(engine, loaded.folder, silent)
        layer["kernel"] = good.at[0, 0].set(jnp.nan)
        with pytest.raises(SelfTestFailed, match="not finite"):
            golden.self_test(engine, loaded.folder, silent)
    finally:
        layer["kernel"] = good
    golden.self_test(engine, loaded.folder, silent)


def test_where_blocks_are_filled_goldens_are_filled_one_by_one(blocks: LoadedModel):
    stored = json.loads((blocks.folder / "goldens.json").read_text())
    assert stored["settings"]["rule"] == RULES.index("sequential")
    assert sum(len(one["tokens"]) for one in stored["prompts"]) >= golden.ENOUGH
    assert golden.goldens(blocks.folder) == stored
    assert all(blocks.family.decoding.mask_id not in one["tokens"] for one in stored["prompts"])
    layer = blocks.engine.device.programs._params["layers"][1]["ffn"]["down"]
    good = layer["kernel"]
    try:
        layer["kernel"] = good * -1.0
        with pytest.raises(SelfTestFailed, match="golden 0"):
            golden.self_test(blocks.engine, blocks.folder, silent)
    finally:
        layer["kernel"] = good
    golden.self_test(blocks.engine, blocks.folder, silent)
    assert blocks.plan.decodes == "block"


def test_goldens_of_a_causal_pass_are_none_of_a_block(blocks: LoadedModel, tmp_path):
    """Each position's scores are for itself there, and it sees the masks behind it."""
    family, params = blocks.family, blocks.params
    logits = jax.jit(lambda ids: golden.logits(nnx.merge(blocks.graphdef, params), ids))
    stored = json.loads((blocks.folder / "goldens.json").read_text())
    prompt = stored["prompts"][0]["prompt"]
    tokens, _ = golden._greedy(logits, prompt, 64, family.decoding)
    stored["prompts"] = [{"prompt": prompt, "tokens": tokens}]
    (tmp_path / "goldens.json").write_text(json.dumps(stored))
    with pytest.raises(SelfTestFailed, match="golden 0"):
        golden.self_test(blocks.engine, tmp_path, silent)


def test_goldens_of_a_canvas_are_those_of_its_first_pass(tmp_path):
    family, params = checkpoints.load("diffusion_gemma")
    engine = golden._own_engine(family, family.graphdef(jnp.float32), params, 64)
    prompts = [[5, 6, 7], list(range(20, 50))]
    runs = golden._first_passes(engine, prompts)
    assert [prompt for prompt, *_ in runs] == prompts
    assert all(len(tokens) == len(leads) == golden.NEW_TOKENS and min(leads) >= 0 for _, tokens, leads in runs)
    stored = {"settings": golden.one_by_one(family.decoding)}
    stored["prompts"] = [{"prompt": prompt, "tokens": tokens} for prompt, tokens, _ in runs]
    (tmp_path / "goldens.json").write_text(json.dumps(stored))
    golden.self_test(engine, tmp_path, silent)
    (tmp_path / "goldens.json").write_text(json.dumps(stored | {"settings": {}}))
    with pytest.raises(SelfTestFailed):  # a canvas that is refined further becomes another one
        golden.self_test(engine, tmp_path, silent)


def test_goldens_are_cut_to_what_may_be_asked(loaded: LoadedModel, tiny_store):
    config = configured(tiny_store, max_output_tokens=2, max_waiting=0)
    assert load_model(config, silent).engine.limits.max_output_tokens == 2


def test_no_goldens_no_service(loaded: LoadedModel, tmp_path):
    shutil.copyfile(loaded.folder / "goldens.json", tmp_path / "goldens.json")
    (tmp_path / "goldens.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no goldens"):
        golden.self_test(loaded.engine, tmp_path, silent)
    long = {"prompts": [{"prompt": [1] * 120, "tokens": [1] * 20}]}
    (tmp_path / "goldens.json").write_text(json.dumps(long))
    with pytest.raises(CheckpointError, match="no golden fits"):
        golden.self_test(loaded.engine, tmp_path, silent)


@pytest.mark.parametrize(
    ("leads", "least", "count"), [([1.0, 0.6, 0.4, 0.9], 0.5, 2), ([1.0], 0.5, 1), ([0.1], 0.5, 0)]
)
def test_a_golden_ends_before_the_first_close_call(leads, least, count):
    assert golden._first_below(leads, least) == count
