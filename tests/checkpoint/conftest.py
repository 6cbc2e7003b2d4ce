"""One tiny model in every form that the checkpoint floor reads: arrays, a Hugging Face folder, a GGUF file, a store."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import tokenizers

from jaxserve.checkpoint import Progress, cage
from jaxserve.checkpoint import convert as convert_module
from jaxserve.checkpoint.convert import Published, convert
from jaxserve.checkpoint.store import Store

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import gguf

CORPUS = ["the quick brown fox jumps over the lazy dog", "pack my box with five dozen liquor jugs", "1234567890 ½"]
END = "<|end|>"


@dataclasses.dataclass(frozen=True)
class Tiny:
    """A model of two layers: its configuration, its weights under their Hugging Face names, and its tokenizer."""

    config: dict[str, Any]
    weights: dict[str, np.ndarray]
    tokenizer: tokenizers.Tokenizer

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self.weights[name].shape


def make_tokenizer() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=[END])
    made.train_from_iterator(CORPUS, trainer)
    return made


def make_tiny(seed: int = 0, **changes: Any) -> Tiny:
    tokenizer = make_tokenizer()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "hidden_act": "silu",
    } | changes
    rng = np.random.default_rng(seed)
    d, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, kv = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    shapes = {"model.embed_tokens": (v, d), "model.norm": (d,), "lm_head": (v, d)}
    for layer in range(config["num_hidden_layers"]):
        names = {"q_proj": (q, d), "k_proj": (kv, d), "v_proj": (kv, d), "o_proj": (d, q)}
        shapes |= {f"model.layers.{layer}.self_attn.{name}": shape for name, shape in names.items()}
        names = {"gate_proj": (f, d), "up_proj": (f, d), "down_proj": (d, f)}
        shapes |= {f"model.layers.{layer}.mlp.{name}": shape for name, shape in names.items()}
        shapes |= {f"model.layers.{layer}.{name}_layernorm": (d,) for name in ("input", "post_attention")}
    weights = {f"{name}.weight": rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    return Tiny(config, weights, tokenizer)


def write_folder(tiny: Tiny, folder: Path) -> Path:
    """A Hugging Face folder with two weight files and an index."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny.config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 3], "temperature": 0.7}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "chat_template": "{{ messages }}"}))
    (folder / "LICENSE").write_text("as you like it")
    tiny.tokenizer.save(str(folder / "tokenizer.json"))
    names = sorted(tiny.weights)
    index = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        safetensors.numpy.save_file({name: tiny.weights[name] for name in part}, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if not stem.startswith("model.layers."):
        return GGUF_NAMES[stem] + ".weight"
    layer, _, rest = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{GGUF_NAMES[rest]}.weight"


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """What a GGUF converter does to query and key rows: halves of a head become neighbours."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    tiny: Tiny,
    path: Path,
    kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    *,
    permuted: bool = True,
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """The same model as a GGUF file; ``kinds`` holds the type of a tensor by its Hugging Face name, else F32."""
    writer = gguf.GGUFWriter(path, "llama")
    config = tiny.config
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_string("general.license", "mit")
    model = json.loads(tiny.tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages }}")
    if extra is not None:
        extra(writer)
    for name, array in tiny.weights.items():
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        stored = permute(array, config[heads]) if heads and permuted else array
        kind = (kinds or {}).get(name, gguf.GGMLQuantizationType.F32)
        packed = stored if kind == gguf.GGMLQuantizationType.F32 else gguf.quants.quantize(stored, kind)
        writer.add_tensor(gguf_name(name), packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def tiny() -> Tiny:
    return make_tiny()


@pytest.fixture(scope="session")
def forms(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny) -> dict[str, Path]:
    """The model as ``folder`` and as ``gguf``. Not to be changed."""
    root = tmp_path_factory.mktemp("forms")
    return {"folder": write_folder(tiny, root / "Tiny-Folder"), "gguf": write_gguf(tiny, root / "Tiny.gguf")}


@pytest.fixture
def folder(tmp_path: Path, forms: dict[str, Path]) -> Path:
    """A copy of the Hugging Face folder, to be changed."""
    return Path(shutil.copytree(forms["folder"], tmp_path / "model"))


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory, forms: dict[str, Path]) -> Published:
    """The folder converted, in a store of its own. Not to be changed."""
    store = Store(tmp_path_factory.mktemp("store"))
    return convert(forms["folder"], store, "tiny", goldens=lambda _: {"greedy": [1, 2, 3]})


@pytest.fixture
def version(tmp_path: Path, published: Published) -> Path:
    """A copy of the published version's folder, to be changed."""
    return Path(shutil.copytree(published.folder, tmp_path / "store" / "tiny" / published.version))


@pytest.fixture
def uncaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Converts in this process, for tests of what a conversion does: starting a child takes seconds."""

    def run(module: str, arguments: dict[str, Any], limits: object, progress: Progress) -> dict[str, Any]:
        assert module == "jaxserve.checkpoint.convert"
        return json.loads(json.dumps(convert_module._convert_in_cage(arguments, progress)))

    monkeypatch.setattr(cage, "run", run)


@pytest.fixture(scope="session")
def make() -> Callable[..., Tiny]:
    return make_tiny


@pytest.fixture(scope="session")
def to_folder() -> Callable[[Tiny, Path], Path]:
    return write_folder


@pytest.fixture(scope="session")
def to_gguf() -> Callable[..., Path]:
    return write_gguf


def write_wheel(folder: Path, package: str, files: Mapping[str, bytes]) -> tuple[Path, str]:
    """A wheel that pip accepts, and its digest. It depends on a package that does not exist."""
    stem = package.replace("-", "_")
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\nRequires-Dist: no-such-package-anywhere\n"
    files = dict(files) | {
        f"{stem}-1.0.dist-info/METADATA": metadata.encode(),
        f"{stem}-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{stem}-1.0.dist-info/RECORD": b"",
    }
    path = folder / f"{stem}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the only place where pip looks for packages."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


@pytest.fixture(scope="session")
def to_wheel() -> Callable[..., tuple[Path, str]]:
    return write_wheel
