"""Write tiny/<case>/: small random checkpoints of every family, with what transformers computes from them.

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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from tests.reference import tiny_cases, tiny_families
from tests.reference.hub_layouts import Layout, old_spelling
from tests.reference.tiny_cases import BOS, EOS, Case, configuration

CASES = tiny_cases.CASES | tiny_families.CASES

FOLDER = Path(__file__).parent / "tiny"
PROMPT_LENGTH, NEW_TOKENS = 90, 24
SMALLEST_GAP = 0.01  # of the best two logits along the greedy path: far above float32 noise, so the ids are facts
LARGEST_NOISE = 3e-5  # of float32 arithmetic on any logit, so that tests may ask for 1e-4
SMALLEST_EFFECT = 0.05  # of a wrong configuration on some logit: far above any sensible tolerance
SMALLEST_MARGIN = 5e-4  # of the best two logits anywhere in the prompt, and 5e-5 of the last expert chosen and the next
SMALLEST_ROUTER_MARGIN = 5e-5
EXACT = ("A_log", "e_score_correction_bias")  # float32 in files whatever the rest is stored as
AROUND = {  # middle and width of what is no matrix
    "A_log": (-1.5, 1.0),  # a memory of a few tokens to many
    "e_score_correction_bias": (0.0, 0.2),
    "layer_scalar": (0.9, 0.2),
    "sinks": (0.0, 1.0),
}


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Weights that let a mistake show: norms far from one, biases not small, attention that looks somewhere."""
    generator = np.random.default_rng(seed)
    kept = set(model.state_dict())
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in kept]
    for name, tensor in [*model.named_parameters(), *buffers]:
        values = generator.standard_normal(tuple(tensor.shape))
        values = drawn(name, values, float(tensor.detach().flatten()[0]), model.config)
        tensor.data = torch.from_numpy(values.astype(np.float32))


def drawn(name: str, values: np.ndarray, before: float, config: PreTrainedConfig) -> np.ndarray:
    """Standard normal numbers moved and scaled for a tensor whose elements were `before`."""
    *_, module, _ = ("", *name.split("."))
    fan_in = values.shape[-1] if values.ndim > 1 else 1
    if ("norm" in module and name.endswith("weight")) or name.endswith(("per_expert_scale", "router.scale")):
        size = 0.6 if config.model_type == "gemma4_text" and module in {"q_norm", "k_norm"} else 1.0
        return size * (before + 0.3 * values)  # around one, or around zero where the module adds one
    if name.rpartition(".")[2] in AROUND:
        middle, width = AROUND[name.rpartition(".")[2]]
        return middle + width * values
    if name.endswith("bias"):
        return 0.5 * values
    if "embed_tokens_per_layer" in name:
        return values / np.sqrt(config.hidden_size_per_layer_input)
    if "embed_tokens" in name:
        return values / np.sqrt(fan_in) if config.tie_word_embeddings else values
    if name.endswith("conv1d.weight"):
        return 0.6 * values
    if name.endswith("router.proj.weight"):
        return 1.6 * values  # of Gemma 4: what it reads is scaled down by the root of the width
    if config.model_type == "gpt_oss" and "experts" in name:  # transposed; gates and ups that reach the clamp at 7
        return values * (4.0 if "gate_up" in name else 0.15) / np.sqrt(values.shape[1])
    gain = 1.6 if "q_proj" in name or "k_proj" in name or "gate.weight" in name or "router.weight" in name else 1.2
    return gain * values / np.sqrt(fan_in)


def prompt() -> np.ndarray:
    """The 90 ids every case reads: random with a repeated stretch, no special token."""
    ids = np.random.default_rng(7).integers(0, BOS, PROMPT_LENGTH)
    ids[60:80] = ids[10:30]
    return ids.astype(np.int32)


def load(folder: Path, layout: Layout | None = None) -> PreTrainedModel:
    """The folder's model in float32 with the plain attention and experts, ready to read from."""
    plain = {"dtype": torch.float32, "attn_implementation": "eager"}
    if layout is None:
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **plain)
        wrong = {kind: names for kind, names in info.items() if names}
        if wrong:
            raise SystemExit(f"{folder.name}: {wrong}")
    else:
        files = sorted(folder.glob("*.safetensors"))
        tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
        fields, tensors = layout.read(json.loads((folder / "config.json").read_text()), tensors)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), **plain)
        if model.config.tie_word_embeddings:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, strict=True)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model.eval()


@torch.no_grad()
def forward(model: PreTrainedModel, ids: np.ndarray, mask: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Logits [t, v] and the residual stream after each layer [l, t, d] of one uncached pass, float32."""
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    seen = torch.ones_like(tokens) if mask is None else torch.from_numpy(mask)[None, None]
    taps: list[torch.Tensor] = []

    def tap(_module: object, _inputs: object, out: object) -> None:
        taps.append((out[0] if isinstance(out, tuple) else out).detach().clone())

    hooks = [layer.register_forward_hook(tap) for layer in model.model.layers]
    # Asking for hidden states keeps Gemma 4 from leaving out positions in the layers that share keys.
    out = model(tokens, attention_mask=seen, use_cache=False, output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    return out.logits[0].numpy(), np.stack([stream[0].numpy() for stream in taps])


@contextmanager
def margins() -> Iterator[list[float]]:
    """Distances of the last expert chosen and the first one not, of every routing done inside."""
    found: list[float] = []
    topk = torch.topk

    def watched(scores: torch.Tensor, k: int, *args: object, **options: object) -> object:
        best = topk(scores, min(k + 1, scores.shape[-1]), dim=-1).values
        gaps = best[..., k - 1] - best[..., -1] if best.shape[-1] > k else torch.ones(1)
        found.append(float(gaps.min()))
        return topk(scores, k, *args, **options)

    torch.topk = watched
    try:
        yield found
    finally:
        torch.topk = topk


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
    model, ids = load(folder, case.layout), prompt()
    logits, taps = forward(model, ids)
    line, gap = greedy(model, ids)
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    cached = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=NEW_TOKENS)
    cached = cached[0, len(ids) :].numpy()  # ends early where the end token came
    if not np.array_equal(cached, line[: len(cached)]):
        raise SystemExit(f"{folder.name}: transformers continues differently with and without its cache")
    arrays = {
        "prompt": ids,
        "logits": logits,
        **({"taps": taps} if case.taps else {"layer0": taps[0]}),
        "greedy": line.astype(np.int32),
        "gap": np.float32(gap),
    }
    if case.block:
        block = np.arange(len(ids)) // case.block
        seen = block[:, None] >= block[None, :]
        arrays["block_logits"] = forward(model, ids, np.where(seen, 0.0, np.finfo(np.float32).min).astype(np.float32))[
            0
        ]
    if case.short_prompt:
        arrays["short_logits"] = forward(model, ids[: case.short_prompt])[0]
    return arrays


def effects(folder: Path, case: Case, logits: np.ndarray) -> dict[str, float]:
    """How far some logit moves, at most, for each mistake of the case."""
    moved = {}
    for name, mistake in case.wrong.items():
        right = load(folder, case.layout)
        config, tensors = copy.deepcopy(right.config), dict(right.state_dict())
        mistake(config, tensors)
        if config.tie_word_embeddings:
            tensors.pop("lm_head.weight", None)
        config._attn_implementation = config._experts_implementation = "eager"
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        model.load_state_dict(tensors, strict=False)
        moved[name] = float(np.abs(forward(model, prompt())[0] - logits).max())
    return moved


def save(model: PreTrainedModel, folder: Path, case: Case) -> None:
    """Write the folder's files but for the golden."""
    exact = {name: tensor for name, tensor in model.state_dict().items() if name.endswith(EXACT)}
    exact = {name: tensor.clone() for name, tensor in exact.items()}
    model.to(case.dtype)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in exact:
            tensor.data = exact[name]
    model.save_pretrained(folder, max_shard_size=case.shard_size)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if case.old_spelling:
        config = old_spelling(config | {"dtype": str(case.dtype).removeprefix("torch.")})
    if case.layout is not None:
        tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            tensors.pop("lm_head.weight", None)
        config, tensors = case.layout.write(config, tensors)
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if case.old_spelling or case.layout is not None:
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def clear(folder: Path, case: Case, arrays: dict[str, np.ndarray]) -> bool:
    """Whether nothing in a golden is so close to a tie that rounding could decide it, and rounding is small."""
    if arrays["gap"] <= SMALLEST_GAP or EOS in arrays["greedy"]:
        return False
    if not case.taps:
        return True
    best = np.sort(arrays["logits"], axis=-1)
    model = load(folder, case.layout)
    with margins() as routed:
        forward(model, np.append(arrays["prompt"], arrays["greedy"]))
    apart = (best[:, -1] - best[:, -2]).min() > SMALLEST_MARGIN and min(routed, default=1.0) > SMALLEST_ROUTER_MARGIN
    return apart and noise(model, arrays["logits"]) < LARGEST_NOISE


def write(name: str, case: Case) -> None:
    """Write one case's folder, searching the first seed whose greedy path is unambiguous."""
    folder = FOLDER / name
    for seed in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        model = AutoModelForCausalLM.from_config(configuration(case), dtype=torch.float32)
        randomise(model, seed)
        save(model, folder, case)
        arrays = goldens(folder, case)
        if clear(folder, case, arrays):
            break
    else:
        raise SystemExit(f"{name}: no seed gives a clear greedy path")
    moved = effects(folder, case, arrays["logits"])
    hidden = {mistake: effect for mistake, effect in moved.items() if effect < SMALLEST_EFFECT}
    if hidden:
        raise SystemExit(f"{name}: the golden does not show {hidden}")
    np.savez_compressed(folder / "goldens.npz", **arrays)
    rounding = noise(load(folder, case.layout), arrays["logits"])
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
