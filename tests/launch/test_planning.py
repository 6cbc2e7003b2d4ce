"""Plans for models that are not here, for machines that are not here, and for this one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import msgspec
import pytest

from jaxserve.config import Config, EngineConfig, MeshConfig, ModelConfig, Pool, load
from jaxserve.errors import CheckpointError, ConfigError, PlanError
from jaxserve.launch import planning
from jaxserve.launch.planning import FORCED, is_native, multiplies, plan, routing_of, where
from jaxserve.models.family import family_of
from jaxserve.models.kernels import native
from jaxserve.models.passes import Routing
from jaxserve.plan import Hardware, WeightShape
from jaxserve.plan.exchange import exchanged_from
from jaxserve.testing import TINY
from tests.models.test_diffusion_gemma import PUBLISHED

CONFIGS = Path(__file__).parents[2] / "configs"
FLAGSHIP = CONFIGS / "qwen3.6-35b-a3b.json"
DEPLOYED = sorted(CONFIGS.glob("qwen3.6-35b-a3b-*.yaml"))


def configured(**engine) -> Config:
    return Config(model=ModelConfig(dtype="float32"), engine=EngineConfig(**{"pools": (Pool(2, 64),)} | engine))


@pytest.fixture
def tiny_json(tmp_path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return path


def test_a_config_or_its_folder_is_enough(tiny_json):
    planned = plan(configured(), tiny_json)
    assert plan(configured(), tiny_json.parent) == planned
    assert planned.model.vocab_size == TINY["vocab_size"]
    with pytest.raises(CheckpointError, match="is missing"):
        plan(configured(), tiny_json.with_name("other.json"))
    with pytest.raises(CheckpointError, match="is missing"):
        plan(configured(), CONFIGS)


def test_it_is_for_the_hardware_that_is_named(tiny_json):
    planned = plan(configured(), tiny_json, "v5p-16")
    assert (planned.devices, planned.memory_limit) == (8, 95 * 10**9)
    with pytest.raises(ConfigError, match="no device is called 'abacus'"):
        plan(configured(), tiny_json, "abacus")


def test_a_canvas_has_room_behind_the_last_position_of_a_text(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    config = Config(engine=EngineConfig(pools=(Pool(4, 8192),), prefill_buckets=(512,)))
    planned = plan(config, tmp_path, "h200")
    assert planned.pools[0].positions == 8192 + 512
    assert "47.034 GiB" in planned.describe().splitlines()[0]


def test_the_compiler_is_asked(tiny_json):
    estimated, compiled = plan(configured(), tiny_json), plan(configured(), tiny_json, compiled=True)
    assert 0 < compiled.workspace_bytes <= estimated.workspace_bytes
    assert "workspace (compiled)" in compiled.describe()
    assert "workspace (estimate)" in estimated.describe()
    config = Config(
        model=ModelConfig(dtype="float32"), engine=EngineConfig(pools=(Pool(2, 64),)), mesh=MeshConfig(expert=8)
    )
    with pytest.raises(PlanError, match=f"{FORCED}=8"):
        plan(config, tiny_json, "8xh100", compiled=True)


def test_a_mesh_needs_its_devices(tiny_json, monkeypatch):
    monkeypatch.setattr(planning, "this_machine", lambda: Hardware("cpu", 1, 2**34))
    config = Config(engine=EngineConfig(pools=(Pool(2, 64),)), mesh=MeshConfig(tensor=2))
    with pytest.raises(PlanError, match="takes 2 devices, there is 1"):
        plan(config, tiny_json)


@pytest.mark.parametrize("file", DEPLOYED, ids=lambda file: file.stem)
def test_each_deployment_of_the_flagship_fits_its_hardware(file):
    """And takes what it is told to: with twice the slots it would not."""
    device = file.stem.removeprefix(FLAGSHIP.stem + "-")
    config = load(file, environ={}).config
    planned = plan(config, FLAGSHIP, device)
    assert planned.mesh.devices == planned.devices
    assert 34.6e9 < planned.model.parameters < 34.7e9
    assert planned.weight_bytes * planned.devices == pytest.approx(69.3e9, rel=0.01)
    assert planned.total_bytes > planned.usable_bytes / 2


def test_the_plan_names_what_multiplies_with_experts_and_when_tokens_travel():
    config = load(CONFIGS / f"{FLAGSHIP.stem}-8xh100.yaml", environ={}).config
    mesh = msgspec.structs.replace(config.mesh, exchange_tokens=64)
    engine = msgspec.structs.replace(config.engine, expert_product="ragged_dot")
    told = plan(msgspec.structs.replace(config, engine=engine, mesh=mesh), FLAGSHIP, "8xh100")
    assert "experts: multiplied by ragged_dot\n" in told.describe()
    assert routing_of(told) == Routing("ragged_dot", 64)
    left = dataclasses.replace(told, expert_product="auto", exchange="auto")
    assert [multiplies(left, platform) for platform in ("gpu", "tpu")] == ["triton", "megablox"]
    assert routing_of(left) == Routing("auto", exchanged_from(2048, 8, told.mesh.expert))


def test_programs_are_traced_as_the_plan_says(tiny_json):
    config = msgspec.structs.replace(configured(expert_product="ragged_dot"), mesh=MeshConfig(exchange_tokens=64))
    family = family_of(TINY)
    planned = plan(config, tiny_json)
    programs = planning.abstract_programs(planned, family)
    assert programs._graphdef == family.graphdef(jnp.float32, Routing("ragged_dot", 64)) != family.graphdef(jnp.float32)


@pytest.mark.parametrize(("drafts", "widths"), [("auto", (1, 8)), (None, (1,)), ((2, 4), (1, 3, 5))])
def test_programs_read_as_many_tokens_as_the_plan_counts(tiny_json, drafts, widths):
    planned = plan(configured(draft_tokens=drafts), tiny_json)
    assert planned.widths == widths
    assert planning.abstract_programs(planned, family_of(TINY)).strategy.widths == widths


def test_on_a_cpu_the_plan_names_native_kernels_or_says_why_not(monkeypatch):
    mixtral = Path(__file__).parents[1] / "reference" / "tiny" / "mixtral" / "config.json"
    off = plan(configured(native_kernels="off"), mixtral)
    assert "experts: multiplied by XLA in blocks (native kernels are off)\n" in off.describe()
    assert routing_of(off) == Routing(native=False) != routing_of(plan(configured(), mixtral))
    found = {}
    for forms in ((), ("AVX-512", "AMX")):
        monkeypatch.setattr(native, "native", lambda forms=forms: native.Native(forms, "none were built"))
        found[forms] = plan(configured(), mixtral)
    assert [one.multiplies for one in found.values()] == [
        "XLA in blocks (no native kernels: none were built)",
        "native kernels (AVX-512)",
    ]
    assert [is_native(one) for one in (off, *found.values())] == [False, False, True]


def test_a_packed_model_is_unpacked_block_by_block_and_others_have_no_experts(tiny_json):
    assert plan(configured(), tiny_json, "h100").multiplies is None
    held = WeightShape("layers.0.ffn.gate_up.blocks", (8, 2, 32, 64), ("experts", None, "ffn", "model"), "uint8")
    packed = dataclasses.replace(plan(configured(), tiny_json).model, weights=(held,))
    assert "unpacked" in multiplies(dataclasses.replace(plan(configured(), tiny_json), model=packed), "gpu")


def test_one_that_does_not_fit_is_told_the_nearest_that_does():
    config = load(CONFIGS / "qwen3.6-35b-a3b-1xh200.yaml", environ={}).config
    with pytest.raises(
        PlanError, match=r"needs 7\d\.\d+ GiB .* nearest that fits: a mesh of expert x tensor 2x1, of 2"
    ):
        plan(config, FLAGSHIP, "h100")


def test_what_of_it_fits_where():
    head, *rows = where(load(CONFIGS / "qwen3.6-35b-a3b-8xh100.yaml", environ={}).config, FLAGSHIP)
    fits = {row[0]: row[head.index("FITS")] for row in rows}
    assert fits["8xh100"] == fits["v5p-16"] == "yes"
    assert fits["1xh200"] == fits["v5e-8"] == "no"
