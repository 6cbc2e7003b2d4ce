"""Quantised folders from end to end: their bits arrive unchanged, and the model is the one that they stand for."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxserve.checkpoint import manifest
from jaxserve.checkpoint.convert import convert
from jaxserve.checkpoint.restore import restore
from jaxserve.checkpoint.store import Store
from jaxserve.decode import jitted
from jaxserve.errors import CheckpointError
from jaxserve.models.family import Family, family_of
from jaxserve.models.weights import abstract, nest, params_of
from tests.models.test_deepseek_v3 import HF as DEEPSEEK
from tests.models.test_gpt_oss import HF as OSS
from tests.models.test_quant import encoded, unpacked

Arrays = dict[str, np.ndarray]
BLOCK = 32
SAFETENSORS = {"float32": "F32", "uint8": "U8", "float8_e4m3fn": "F8_E4M3", "bfloat16": "BF16"}
# Nothing is a whole number of blocks: not the width, not the heads' rows, not the experts'.
SIZES = {"vocab_size": 320, "hidden_size": 80, "intermediate_size": 100, "moe_intermediate_size": 72, "v_head_dim": 20}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}


def drawn(shapes: dict[str, tuple[int, ...]]) -> Arrays:
    rng = np.random.default_rng(0)
    plain = {name: rng.normal(size=shape).astype(np.float32) / math.sqrt(shape[-1]) for name, shape in shapes.items()}
    return {name: 1 + leaf if "norm" in name else leaf for name, leaf in plain.items()}


def deepseek(hf: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    d, n, e = hf["hidden_size"], hf["num_attention_heads"], hf["n_routed_experts"]
    plain, rotary, value = hf["qk_nope_head_dim"], hf["qk_rope_head_dim"], hf["v_head_dim"]
    latent, narrow = hf["kv_lora_rank"], hf["q_lora_rank"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (hf["vocab_size"], d), "model.norm": (d,)}
    shapes["lm_head"] = (hf["vocab_size"], d)
    for layer in range(hf["num_hidden_layers"]):
        own = {
            "input_layernorm": (d,),
            "post_attention_layernorm": (d,),
            "self_attn.q_a_proj": (narrow, d),
            "self_attn.q_a_layernorm": (narrow,),
            "self_attn.q_b_proj": (n * (plain + rotary), narrow),
            "self_attn.kv_a_proj_with_mqa": (latent + rotary, d),
            "self_attn.kv_a_layernorm": (latent,),
            "self_attn.kv_b_proj": (n * (plain + value), latent),
            "self_attn.o_proj": (d, n * value),
        }
        blocks = {"mlp": hf["intermediate_size"]}
        if layer >= hf["first_k_dense_replace"]:
            own |= {"mlp.gate": (e, d)}
            blocks = {f"mlp.experts.{at}": hf["moe_intermediate_size"] for at in range(e)}
            blocks["mlp.shared_experts"] = hf["moe_intermediate_size"] * hf["n_shared_experts"]
        for block, f in blocks.items():
            own |= {f"{block}.gate_proj": (f, d), f"{block}.up_proj": (f, d), f"{block}.down_proj": (d, f)}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    shapes = {f"{name}.weight": shape for name, shape in shapes.items()}
    moe = range(hf["first_k_dense_replace"], hf["num_hidden_layers"])
    return shapes | {f"model.layers.{layer}.mlp.gate.e_score_correction_bias": (e,) for layer in moe}


def in_fp8(plain: Arrays) -> tuple[Arrays, Arrays]:
    """The files, and the numbers that they stand for."""
    files, stands_for = dict(plain), dict(plain)
    for name, matrix in plain.items():
        if "_proj" not in name:
            continue
        rows, columns = matrix.shape
        count = -(-rows // BLOCK), -(-columns // BLOCK)
        scales = np.exp(np.random.default_rng(len(name)).normal(size=count)).astype(np.float32)
        spread = scales.repeat(BLOCK, 0)[:rows].repeat(BLOCK, 1)[:, :columns]
        files[name] = (matrix / spread).astype(ml_dtypes.float8_e4m3fn)
        files[f"{name}_scale_inv"] = scales
        stands_for[name] = files[name].astype(np.float32) * spread
    return files, stands_for


def oss(hf: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    d, f, e, n, kv, h = (
        hf[name]
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_local_experts",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
        )
    )
    shapes = {"model.embed_tokens.weight": (320, d), "model.norm.weight": (d,), "lm_head.weight": (320, d)}
    for layer in range(hf["num_hidden_layers"]):
        own = {
            "input_layernorm.weight": (d,),
            "post_attention_layernorm.weight": (d,),
            "self_attn.sinks": (n,),
            "mlp.router.weight": (e, d),
            "mlp.router.bias": (e,),
            "mlp.experts.gate_up_proj": (e, 2 * f, d),  # as packed files have it; plain ones are transposed
            "mlp.experts.gate_up_proj_bias": (e, 2 * f),
            "mlp.experts.down_proj": (e, d, f),
            "mlp.experts.down_proj_bias": (e, d),
        }
        for name, (outputs, inputs) in {"q": (n * h, d), "k": (kv * h, d), "v": (kv * h, d), "o": (d, n * h)}.items():
            own[f"self_attn.{name}_proj.weight"], own[f"self_attn.{name}_proj.bias"] = (outputs, inputs), (outputs,)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    return shapes


def in_mxfp4(plain: Arrays) -> tuple[Arrays, Arrays]:
    files, stands_for = dict(plain), dict(plain)
    for name in [name for name in plain if name.endswith(("gate_up_proj", "down_proj"))]:
        values, scales = encoded(files.pop(name))
        files[f"{name}_blocks"], files[f"{name}_scales"] = values, scales
        stands_for[name] = unpacked(values, scales).swapaxes(1, 2)
    return files, stands_for


def save(path: Path, arrays: Arrays) -> None:
    """A safetensors file; the library writes no eight-bit floats of numpy."""
    header, at = {}, 0
    for name, array in arrays.items():
        kind = SAFETENSORS[array.dtype.name]
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": (at, at + array.nbytes)}
        at += array.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for array in arrays.values()))


CASES = {
    "fp8": (DEEPSEEK | SIZES | {"quantization_config": FP8}, deepseek, in_fp8),
    "mxfp4": (OSS | {"vocab_size": 320, "quantization_config": {"quant_method": "mxfp4"}}, oss, in_mxfp4),
}


@pytest.fixture(params=CASES)
def case(request, tmp_path, tiny) -> tuple[Path, dict[str, Any], Arrays, Arrays]:
    """A folder, its configuration, its tensors, and the plain ones that they stand for."""
    hf, shapes, pack = CASES[request.param]
    files, stands_for = pack(drawn(shapes(hf)))
    folder = tmp_path / request.param
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf))
    tiny.tokenizer.save(str(folder / "tokenizer.json"))
    save(folder / "model.safetensors", files)
    return folder, hf, files, stands_for


def logits(family: Family, params: dict[Any, Any]) -> np.ndarray:
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 320, 20), jnp.int32)[None]
    return np.asarray(jitted.logits(family.graphdef(jnp.float32), params, tokens))[0]


def test_bits_arrive_unchanged_and_stand_for_the_same_model(uncaged, case, tmp_path):
    folder, hf, files, stands_for = case
    version = convert(folder, Store(tmp_path / "store"), "packed").folder
    family = family_of(hf)
    found = manifest.verify(version)
    assert {leaf.dtype for leaf in found.tree} == {"float32", "uint8"}
    params = params_of(restore(version, abstract(family.rules, jnp.float32)))
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(params)) == sum(one.bytes(4) for one in family.shape.weights)
    plain = family_of({name: value for name, value in hf.items() if name != "quantization_config"})
    made = {rule.param: jnp.asarray(rule.make(stands_for, np.float32)) for rule in plain.rules}
    expected = logits(plain, params_of(nest(made)))
    got = logits(family, params)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert (got.argmax(-1) == expected.argmax(-1)).all()

    def damaged(name: str, leaf: np.ndarray) -> np.ndarray:
        """Nibbles swapped; factors divided instead of multiplied."""
        if name.endswith("_blocks"):
            return leaf >> 4 | leaf << 4
        return 1 / leaf if name.endswith("_inv") else leaf

    bad = {name: damaged(name, leaf) for name, leaf in files.items()}
    wrong = {rule.param: jnp.asarray(rule.make(bad, np.float32)) for rule in family.rules}
    assert np.abs(logits(family, params_of(nest(wrong))) - expected).max() > 1e-2


def test_what_the_configuration_does_not_say_is_refused(uncaged, case, tmp_path):
    folder, hf, files, stands_for = case
    store = Store(tmp_path / "store")
    bare = {name: value for name, value in hf.items() if name != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(bare))
    with pytest.raises(CheckpointError, match=r"does not call for|lacks"):
        convert(folder, store, "packed")
    if folder.name == "fp8":  # even without the factors, which would give it away
        numbers = {name: leaf for name, leaf in files.items() if not name.endswith("_inv")}
        save(folder / "model.safetensors", numbers)
        with pytest.raises(CheckpointError, match="holds float8_e4m3fn, this weight must be a wider number"):
            convert(folder, store, "packed")
    (folder / "config.json").write_text(json.dumps(hf))
    save(folder / "model.safetensors", stands_for)
    with pytest.raises(CheckpointError, match="lacks"):
        convert(folder, store, "packed")


@pytest.mark.parametrize("case", ["fp8"], indirect=True)
def test_numbers_are_never_made_narrow(uncaged, case, tmp_path):
    folder, _, files, _ = case
    wide = {name: leaf.astype(np.float32) for name, leaf in files.items()}
    save(folder / "model.safetensors", wide)
    with pytest.raises(CheckpointError, match="holds float32, this weight must be float8_e4m3fn"):
        convert(folder, Store(tmp_path / "store"), "packed")
