"""What GGUF metadata means as a Hugging Face configuration, and what it may not mean."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxserve.checkpoint.gguf_architectures import ROPE_DIVISORS, Architecture, architecture_of
from jaxserve.errors import CheckpointError

PATH = Path("model.gguf")


def metadata(architecture: str = "llama", **changes: object) -> dict[str, object]:
    values: dict[str, object] = {
        "block_count": 2,
        "context_length": 4096,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": float(np.float32(1e-6)),
        "rope.freq_base": 500000.0,
    }
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    found = {f"{architecture}.{key}": value for key, value in values.items() if value is not None}
    return {"general.architecture": architecture} | found


SHAPES = {"token_embd.weight": (100, 64), "output_norm.weight": (64,), "blk.0.attn_q.weight": (64, 64)}


def read(
    values: dict[str, object], shapes: dict[str, tuple[int, ...]] = SHAPES, divisors: object = None
) -> Architecture:
    return architecture_of(PATH, values, shapes, divisors)


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [("llama", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3"), ("gemma3", "gemma3_text")],
)
def test_each_architecture_has_its_model_type(architecture, model_type):
    config = read(metadata(architecture, attention__sliding_window=512)).config
    assert config["model_type"] == model_type
    assert config["rms_norm_eps"] == 1e-6  # not the float32 nearest to it
    assert config["num_key_value_heads"] == 2
    assert config["head_dim"] == 16
    assert config["rope_theta"] == 500000.0


@pytest.mark.parametrize("name", ["mamba", "", 7, None, "x" * 1000])
def test_an_unknown_architecture_is_named(name):
    with pytest.raises(CheckpointError, match=r"not supported; known are gemma3, llama, qwen2, qwen3") as caught:
        read(metadata() | {"general.architecture": name})
    assert len(caught.value.message) < 200


# As llama.cpp names them.
@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("qwen3_moe", "qwen3moe"),
        ("glm4_moe", "glm4moe"),
        ("gpt_oss", "gpt-oss"),
        ("deepseek_v3", "deepseek2"),
        ("gemma4_text", "gemma4"),
        ("llada2_moe", "llada2"),
        ("smollm3", "smollm3"),
    ],
)
def test_families_whose_files_are_not_read_yet(model_type, architecture, supports):
    with pytest.raises(CheckpointError, match=f"'{architecture}'.*not supported"):
        read(metadata(architecture))
    supports(model_type, "GGUF", "refused")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", None),
        ("block_count", 0),
        ("block_count", True),
        ("block_count", 1 << 31),
        ("embedding_length", "64"),
        ("feed_forward_length", [96, 96]),
        ("attention.head_count", -4),
        ("attention.layer_norm_rms_epsilon", None),
        ("attention.layer_norm_rms_epsilon", float("nan")),
        ("rope.freq_base", float("inf")),
        ("rope.freq_base", 0.0),
        ("attention.value_length", 32),
        ("rope.dimension_count", 8),
        ("expert_count", 8),
        ("rope.scaling.type", "longrope"),
    ],
)
def test_metadata_that_is_missing_or_absurd_is_named(key, value):
    values = metadata()
    values[f"llama.{key}"] = value
    if value is None:
        del values[f"llama.{key}"]
    with pytest.raises(CheckpointError, match=r"model\.gguf: ") as caught:
        read(values)
    assert key in caught.value.message or "experts" in caught.value.message or "longrope" in caught.value.message


@pytest.mark.parametrize("name", ["blk.2.attn_q.weight", "blk.0.ssm_a.weight", "blk.0.attn_q.scale", "extra.weight"])
def test_a_tensor_that_the_architecture_lacks_is_named(name):
    with pytest.raises(CheckpointError, match=name):
        read(metadata(), SHAPES | {name: (4, 4)})


def test_two_names_of_one_weight_are_refused():
    with pytest.raises(CheckpointError, match="same weight"):
        read(metadata(), SHAPES | {"blk.00.attn_q.weight": (64, 64)})


def test_an_absent_embedding_is_named():
    with pytest.raises(CheckpointError, match="token_embd"):
        read(metadata(), {"output_norm.weight": (64,)})


def test_head_size_is_taken_from_the_file_where_it_states_it():
    assert read(metadata(attention__key_length=32, attention__value_length=32)).config["head_dim"] == 32


def test_ties_follow_from_the_output_tensor():
    assert read(metadata()).config["tie_word_embeddings"] is True
    assert read(metadata(), SHAPES | {"output.weight": (100, 64)}).config["tie_word_embeddings"] is False


def test_end_tokens_are_a_union():
    def ends(**ids: int) -> object:
        return read(metadata() | {f"tokenizer.ggml.{key}_token_id": value for key, value in ids.items()}).config[
            "eos_token_id"
        ]

    assert ends() is None
    assert ends(eos=5) == 5
    assert ends(eos=5, eot=5) == 5
    assert ends(eos=5, eot=3) == [3, 5]
    assert ends(eos=0xFFFFFFFF) is None
    with pytest.raises(CheckpointError, match="eos token is 100"):
        ends(eos=100)


# --- rotary embeddings -----------------------------------------------------------------------------------------------


def divisors_of(factor: float, low: float, high: float, original: int, theta: float, size: int) -> np.ndarray:
    """Per-frequency divisors, by the published rule, frequency by frequency."""
    found = []
    for pair in range(size // 2):
        wave = 2 * np.pi * theta ** (2 * pair / size)
        smooth = (original / wave - low) / (high - low)
        if wave < original / high:
            found.append(1.0)
        elif wave > original / low:
            found.append(factor)
        else:
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_banded_scaling_is_found_again(factor):
    values = metadata(embedding_length=256)  # heads of 64
    shapes = {"token_embd.weight": (100, 256), ROPE_DIVISORS: (32,)}
    found = read(values, shapes, divisors_of(factor, 1, 4, 8192, 500000.0, 64))
    assert found.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert ROPE_DIVISORS not in found.names


@pytest.mark.parametrize(
    "divisors",
    [
        divisors_of(8, 1, 3, 8192, 500000.0, 64),
        divisors_of(8, 1, 4, 4096, 500000.0, 64),
        divisors_of(8, 1, 4, 8192, 500000.0, 32),
        np.full(32, np.nan, np.float32),
        np.full(32, 0.5, np.float32),
    ],
    ids=["other band", "other length", "other size", "not a number", "below one"],
)
def test_divisors_of_another_rule_are_refused_not_approximated(divisors):
    with pytest.raises(CheckpointError, match="no known rule"):
        read(metadata(embedding_length=256), {"token_embd.weight": (100, 256)}, divisors)


def test_linear_and_yarn_scaling():
    linear = read(metadata(rope__scaling__type="linear", rope__scaling__factor=8.0)).config
    assert linear["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    yarn = {"type": "yarn", "factor": 4.0, "original_context_length": 1024, "yarn_beta_fast": 16.0}
    config = read(metadata(**{f"rope__scaling__{key}": value for key, value in yarn.items()})).config
    assert config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 16.0,
    }
    assert "rope_scaling" not in read(metadata(rope__scaling__type="none")).config


# --- values ----------------------------------------------------------------------------------------------------------


def test_only_one_architecture_permutes():
    rows = np.arange(64 * 3, dtype=np.float32).reshape(64, 3)
    for architecture in ("qwen2", "qwen3"):
        np.testing.assert_array_equal(read(metadata(architecture)).restore("blk.0.attn_q.weight", rows), rows)
    restored = read(metadata()).restore("blk.0.attn_q.weight", rows)
    # Head of 16: rows 0, 2, 4 ... of the file are the first half of each head.
    np.testing.assert_array_equal(restored[:8], rows[0:16:2])
    np.testing.assert_array_equal(restored[8:16], rows[1:16:2])
    np.testing.assert_array_equal(restored[16:24], rows[16:32:2])


def test_biases_are_permuted_with_their_rows():
    found = read(metadata(), SHAPES | {"blk.0.attn_q.bias": (64,), "blk.0.attn_v.bias": (32,)})
    bias = np.arange(64, dtype=np.float32)
    np.testing.assert_array_equal(found.restore("blk.0.attn_q.bias", bias)[:8], bias[0:16:2])
    np.testing.assert_array_equal(found.restore("blk.0.attn_v.bias", bias), bias)
    assert found.config["attention_bias"] is True


def test_rows_that_heads_cannot_share_are_refused():
    with pytest.raises(CheckpointError, match="4 heads"):
        read(metadata()).restore("blk.0.attn_q.weight", np.zeros((62, 64), np.float32))


def test_shifted_norms_come_back_around_zero():
    names = ("output_norm", "blk.0.attn_norm", "blk.0.attn_q_norm", "blk.0.post_ffw_norm")
    found = read(
        metadata("gemma3", attention__sliding_window=512), SHAPES | {f"{name}.weight": (64,) for name in names}
    )
    stored = np.array([1.5, 0.75, 1.0], np.float32)
    for name in names:
        np.testing.assert_array_equal(found.restore(f"{name}.weight", stored), [0.5, -0.25, 0.0])
    np.testing.assert_array_equal(found.restore("blk.0.attn_q.weight", stored), stored)
    assert found.names["blk.0.post_ffw_norm.weight"] == "model.layers.0.post_feedforward_layernorm.weight"


def test_windows_alternate_five_to_one():
    config = read(metadata("gemma3", block_count=12, attention__sliding_window=512)).config
    full = [layer for layer, kind in enumerate(config["layer_types"]) if kind == "full_attention"]
    assert full == [5, 11]
    assert config["query_pre_attn_scalar"] == config["head_dim"]
    assert config["rope_local_base_freq"] == 10000.0
