"""A tiny model as an operator has it: a folder as Hugging Face has them, converted, with goldens, in a store."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "tests" / "reference" / "tiny_bpe"
NAME, BLOCKS = "tiny", "tiny-blocks"


def write_source(folder: Path, seed: int = 0, model: str = NAME) -> Path:
    """A Hugging Face folder: random weights, a real tokenizer of 400 tokens, a chat template."""
    from safetensors.numpy import save_file

    from jaxserve.models.family import family_of
    from jaxserve.testing import TINY, TINY_BLOCKS

    folder.mkdir()
    if model == BLOCKS:
        own = TINY_BLOCKS | {"vocab_size": 401, "mask_token_id": 400, "architectures": ["SDARForCausalLM"]}
    else:
        own = TINY | {"vocab_size": 400, "architectures": ["LlamaForCausalLM"]}
    config = own | {"eos_token_id": 2}
    random = np.random.default_rng(seed)
    tensors = {}
    for piece in (piece for rule in family_of(config).rules for piece in rule.ways[0]):
        draw = random.normal(size=piece.shape).astype(np.float32)
        tensors[piece.source] = 1 + 0.1 * draw if "norm" in piece.source else 0.4 * draw
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2], "temperature": 0.8, "top_k": 50}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / name, folder / name)
    return folder


def tiny_store(model: str = NAME) -> Path:
    """The root of a store with one version of the model ``tiny``, or of one that fills in blocks.

    It is made once for each state of the code that makes it. Nobody may change what lies there: copy it first.
    """
    root = ROOT / ".cache" / "rigs" / f"{model}-{_made_by()}"
    if not root.exists():
        from jaxserve.checkpoint.convert import convert
        from jaxserve.checkpoint.store import Store
        from jaxserve.launch.golden import goldens

        root.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root.parent) as scratch:
            making = Path(scratch)
            source = write_source(making / "source", model=model)
            convert(source, Store(making / "store"), model, dtype="float32", goldens=goldens)
            try:
                (making / "store").rename(root)
            except OSError:  # somebody else was faster
                if not root.exists():
                    raise
    return root


def _made_by() -> str:
    package = ROOT / "jaxserve"
    sources = [Path(__file__), package / "launch" / "golden.py", *sorted((package / "checkpoint").glob("*.py"))]
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]
