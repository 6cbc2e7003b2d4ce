"""Write tiny/<case>/: small random checkpoints of every Llama-shaped family, with what transformers computes from them.

Knows transformers and nothing of jaxserve: the folders are an independent statement of what a checkpoint means.
A golden is computed from the folder as written (stored dtype widened to float32), not from the model in memory, so the
files alone decide. Every case is also computed with one fact of its configuration or weights wrong (`wrong`): the
script refuses a case whose logits would not show the mistake.

    python -m tests.reference.make_tiny            # all cases; or the names of some
"""

import copy
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from tests.reference.tiny_cases import BOS, CASES, EOS, Case, configuration

FOLDER = Path(__file__).parent / "tiny"
PROMPT_LENGTH, NEW_TOKENS = 90, 24
SMALLEST_GAP = 0.01  # of the best two logits along the greedy path: far above float32 noise, so the ids are facts
LARGEST_NOISE = 2e-5  # of float32 arithmetic on any logit, so that tests may ask for 1e-4
SMALLEST_EFFECT = 0.05  # of a wrong configuration on some logit: far above any sensible tolerance


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Weights that let a mistake show: norms far from one, biases not small, attention that looks somewhere."""
    generator = np.random.default_rng(seed)
    for name, tensor in model.named_parameters():
        values = generator.standard_normal(tuple(tensor.shape))
        if name.endswith("norm.weight"):
            values = 1 + 0.3 * values
        elif name.endswith("bias"):
            values = 0.5 * values
        elif "embed_tokens" in name:
            values = values / np.sqrt(tensor.shape[1]) if model.config.tie_word_embeddings else values
        else:
            gain = 1.6 if "q_proj" in name or "k_proj" in name else 1.2
            values = gain * values / np.sqrt(tensor.shape[1])
        tensor.data = torch.from_numpy(values.astype(np.float32))


def prompt() -> np.ndarray:
    """The 90 ids every case reads: random with a repeated stretch, no special token."""
    ids = np.random.default_rng(7).integers(0, BOS, PROMPT_LENGTH)
    ids[60:80] = ids[10:30]
    return ids.astype(np.int32)


def load(folder: Path) -> PreTrainedModel:
    """The folder's model in float32 with the plain attention, ready to read from."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@torch.no_grad()
def forward(model: PreTrainedModel, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits [t, v] and the residual stream after the first layer [t, d] of one uncached pass, float32."""
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    out = model(tokens, attention_mask=torch.ones_like(tokens), use_cache=False, output_hidden_states=True)
    return out.logits[0].numpy(), out.hidden_states[1][0].numpy()


def noise(model: PreTrainedModel, logits: np.ndarray) -> float:
    """Largest distance of float32 logits from those of the same network in float64: what no test may ask below."""
    wide = forward(copy.deepcopy(model).double(), prompt())[0]
    return float(np.abs(wide - logits).max())


def greedy(model: PreTrainedModel, ids: np.ndarray) -> tuple[np.ndarray, float]:
    """The most likely continuation by uncached passes, and the smallest distance of the best two logits on the way."""
    line, gap = ids, np.inf
    for _ in range(NEW_TOKENS):
        last = forward(model, line)[0][-1]
        second, first = np.sort(last)[-2:]
        gap = min(gap, float(first - second))
        line = np.append(line, np.int32(last.argmax()))
    return line[len(ids) :], gap


def goldens(folder: Path, case: Case) -> dict[str, np.ndarray]:
    """Everything that goldens.npz holds, computed from the folder's files."""
    model, ids = load(folder), prompt()
    logits, layer0 = forward(model, ids)
    line, gap = greedy(model, ids)
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    cached = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=NEW_TOKENS)
    cached = cached[0, len(ids) :].numpy()  # ends early where the end token came
    if not np.array_equal(cached, line[: len(cached)]):
        raise SystemExit(f"{folder.name}: transformers continues differently with and without its cache")
    arrays = {
        "prompt": ids,
        "logits": logits,
        "layer0": layer0,
        "greedy": line.astype(np.int32),
        "gap": np.float32(gap),
    }
    if case.short_prompt:
        arrays["short_logits"] = forward(model, ids[: case.short_prompt])[0]
    return arrays


def effects(folder: Path, case: Case, logits: np.ndarray) -> dict[str, float]:
    """How far some logit moves, at most, for each mistake of the case."""
    moved = {}
    for name, mistake in case.wrong.items():
        right = load(folder)
        config, tensors = copy.deepcopy(right.config), dict(right.state_dict())
        mistake(config, tensors)
        if config.tie_word_embeddings:
            tensors.pop("lm_head.weight", None)
        config._attn_implementation = "eager"
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        model.load_state_dict(tensors, strict=False)
        moved[name] = float(np.abs(forward(model, prompt())[0] - logits).max())
    return moved


def respell(folder: Path, dtype: torch.dtype) -> None:
    """Rewrite config.json the way files older than transformers 5 spell it."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    if "type" in scaling:
        scaling.pop("rope_type")
    default = scaling.get("rope_type") == "default"
    config["rope_scaling"] = None if default else scaling
    config["torch_dtype"] = config.pop("dtype", str(dtype).removeprefix("torch."))
    config["transformers_version"] = "4.46.0"
    if config.get("head_dim", 0) * config["num_attention_heads"] == config["hidden_size"]:
        del config["head_dim"]
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def write(name: str, case: Case) -> None:
    """Write one case's folder, searching the first seed whose greedy path is unambiguous."""
    folder = FOLDER / name
    for seed in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        model = AutoModelForCausalLM.from_config(configuration(case), dtype=torch.float32)
        randomise(model, seed)
        model.to(case.dtype).save_pretrained(folder, max_shard_size=case.shard_size)
        if case.old_spelling:
            respell(folder, case.dtype)
        arrays = goldens(folder, case)
        if arrays["gap"] > SMALLEST_GAP and EOS not in arrays["greedy"]:
            break
    else:
        raise SystemExit(f"{name}: no seed gives a clear greedy path")
    moved = effects(folder, case, arrays["logits"])
    hidden = {mistake: effect for mistake, effect in moved.items() if effect < SMALLEST_EFFECT}
    if hidden:
        raise SystemExit(f"{name}: the golden does not show {hidden}")
    np.savez_compressed(folder / "goldens.npz", **arrays)
    rounding = noise(load(folder), arrays["logits"])
    if rounding > LARGEST_NOISE:
        raise SystemExit(f"{name}: float32 rounding moves the logits by {rounding}")
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{name}: seed {seed}, {model.num_parameters():,} parameters, {size:,} bytes, gap {arrays['gap']:.4f}")
    print(f"    float32 noise {rounding:.1e}; wrong:", ", ".join(f"{key} {value:.2f}" for key, value in moved.items()))


def main(names: list[str]) -> None:
    """Write the named cases, or all."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    for name in names or CASES:
        write(name, CASES[name])


if __name__ == "__main__":
    main(sys.argv[1:])
