"""Write tiny/diffusion_gemma/: a small random DiffusionGemma, and what transformers computes and generates from it.

As make_tiny.py, whose arrays it writes for the causal mode (the encoder and the shared head), and beside them:

- logits of a canvas over two prompts, without and with the scores of a pass before (`denoised`, `conditioned`);
- canvases filled by the class's own `generate`, whose random numbers are replaced by the house's: a number in [0, 1)
  for each request, position and pass (`uniforms`, written out here in numpy). A token is drawn by inverting the sum of
  probabilities at that number, a random token is a second number's share of the vocabulary.

A seed of the weights is refused where rounding could decide anything: which token is drawn, the best token, what the
bound on entropies accepts, whether a canvas is confident.

    python -m tests.reference.make_canvas
"""

import copy
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion, DynamicCache
from transformers.models.diffusion_gemma import generation_diffusion_gemma as generation
from transformers.utils import logging

from tests.reference.make_tiny import (
    LARGEST_NOISE,
    PROMPT_LENGTH,
    SMALLEST_GAP,
    SMALLEST_MARGIN,
    SMALLEST_ROUTER_MARGIN,
    forward,
    greedy,
    margins,
    noise,
    prompt,
    randomise,
)
from tests.reference.tiny_cases import BOS, EOS, VOCAB
from tests.reference.tiny_families import FULL, GEMMA4_ROPE, SLIDING

FOLDER = Path(__file__).parent / "tiny" / "diffusion_gemma"
CANVAS, CANVASES, MOST = 20, 2, 12
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 40,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 16,
    "sliding_window": 12,  # shorter than a canvas
    "layer_types": [SLIDING, SLIDING, FULL],
    "rope_parameters": GEMMA4_ROPE,
    "max_position_embeddings": 512,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "use_bidirectional_attention": "vision",  # of images only
}
VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "position_embedding_size": 4,
    "patch_size": 2,
}
PROMPTS = (7, 53)  # tokens before the canvas of the logits: fewer than a window, and more
# Times some norms, so that a canvas settles: entropies are small, and a layer changes a token's guess, but not each.
SCALED = {
    "model.decoder.norm.weight": 2.0,
    "post_attention_layernorm.weight": 0.2,
    "post_feedforward_layernorm.weight": 0.2,
}
# Of each request: prompt tokens, most passes, entropy bound, lowest and highest temperature, stable, confident.
REQUESTS: tuple[tuple[int, int, float, float, float, int, float], ...] = (
    (53, 8, 2.0, 0.4, 0.8, 1, 0.05),
    (7, MOST, 6.0, 0.2, 0.5, 1, 0.5),
    (PROMPT_LENGTH, 6, 0.3, 0.2, 0.6, 2, 0.9),
    (20, MOST, 40.0, 0.1, 0.4, 2, 0.4),
    (12, 5, 40.0, 0.1, 0.4, 0, 0.4),
)
CLOSEST = 5e-6  # of anything that decides to its threshold
CLOSEST_ROUTER = 3e-6


# --- random numbers ---------------------------------------------------------------------------------------------------


def threefry(key: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011)."""
    whole = 0xFFFFFFFF
    keys = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    x, y = (block[0] + keys[0]) & whole, (block[1] + keys[1]) & whole
    for turn in range(5):
        for bits in ((13, 15, 26, 6), (17, 29, 16, 24))[turn % 2]:
            x = (x + y) & whole
            y = ((y << bits) | (y >> (32 - bits))) & whole ^ x
        x = (x + keys[(turn + 1) % 3]) & whole
        y = (y + keys[(turn + 2) % 3] + turn + 1) & whole
    return x, y


def uniform(seed: int, *folded: int) -> float:
    """The number in [0, 1) of a seed and what is folded into it, one after the other: 23 bits of it."""
    key = (0, seed)
    for data in folded:
        key = threefry(key, (0, data))
    high, low = threefry(key, (0, 0))
    return ((high ^ low) >> 9) / 2**23


def uniforms(seed: int, start: int, turn: int, *purpose: int) -> np.ndarray:
    """Of every position of a canvas that begins at ``start``, in its pass ``turn``."""
    return np.array([uniform(seed, start + at, turn, *purpose) for at in range(CANVAS)])


def random_tokens(seed: int, start: int, turn: int) -> np.ndarray:
    """What stands in the canvas of pass ``turn`` where nothing was accepted before."""
    return np.floor(np.float32(uniforms(seed, start, turn, 1)) * np.float32(VOCAB)).astype(np.int64)


class Oracle:
    """Stands in for torch's random numbers in one request's ``generate``; remembers what is close to a tie."""

    def __init__(self, seed: int, start: int) -> None:
        self.seed, self.start, self.turn = seed, start, 0
        self.closest = 1.0

    def randint(self, *, size: tuple[int, int], **_: object) -> torch.Tensor:
        """The random canvas of this pass."""
        return torch.from_numpy(random_tokens(self.seed, self.start, self.turn)).reshape(size)

    def multinomial(self, shares: torch.Tensor, num_samples: int) -> torch.Tensor:
        """The token at whose share the sum passes this position's number; then it is the next pass's turn."""
        assert num_samples == 1
        sums = np.cumsum(shares.double().numpy(), axis=-1)
        goal = uniforms(self.seed, self.start, self.turn)[:, None] * sums[:, -1:]
        token = (sums > goal).argmax(-1)
        self.closest = min(self.closest, float(np.abs(sums - goal).min()))
        self.turn += 1
        return torch.from_numpy(token)[:, None]

    def next_canvas(self) -> None:
        """The canvas behind is final."""
        self.start, self.turn = self.start + CANVAS, 0


@contextmanager
def watched(request: tuple[float, ...], oracle: Oracle) -> Iterator[list[list[tuple[np.ndarray, np.ndarray]]]]:
    """Lets ``generate`` use the oracle; yields, canvas by canvas, what each pass read and its best tokens."""
    bound, confident = request[2], request[6]
    seen: list[list[tuple[np.ndarray, np.ndarray]]] = []
    accept = generation.EntropyBoundSampler.accept_canvas
    prepare = generation.DiffusionGemmaGenerationMixin._prepare_denoiser_inputs

    def prepared(self: object, *args: object, **options: object) -> object:
        if seen:
            oracle.next_canvas()
        seen.append([])
        return prepare(self, *args, **options)

    def accepted(self: object, current: torch.Tensor, drawn: torch.Tensor, logits: torch.Tensor, step: int) -> object:
        best = logits.topk(2, dim=-1)
        seen[-1].append((current[0].numpy().copy(), best.indices[0, :, 0].numpy().copy()))
        # What a rounded entropy could change: on which side of the bound a position lies, and which comes next.
        entropy = torch.distributions.Categorical(logits=logits).entropy()[0].sort().values
        before = entropy.cumsum(0) - entropy
        gaps = [
            (best.values[..., 0] - best.values[..., 1]).min(),
            (before - bound).abs().min(),
            torch.where((before <= bound)[:-1] != (before <= bound)[1:], entropy.diff(), 1.0).min(),
            (entropy.mean() - confident).abs(),
        ]
        oracle.closest = min(oracle.closest, *map(float, gaps))
        return accept(self, current, drawn, logits, step)

    with (
        mock.patch.object(torch, "multinomial", oracle.multinomial),
        mock.patch.object(torch, "randint", oracle.randint),
        mock.patch.object(generation.EntropyBoundSampler, "accept_canvas", accepted),
        mock.patch.object(generation.DiffusionGemmaGenerationMixin, "_prepare_denoiser_inputs", prepared),
    ):
        yield seen


def filled(
    model: DiffusionGemmaForBlockDiffusion, seed: int, request: tuple[float, ...]
) -> tuple[dict[str, np.ndarray], float]:
    """One request's canvases, and how close anything came to a tie."""
    length, steps, bound, coldest, hottest, stable, confident = request
    oracle = Oracle(seed, int(length))
    config = generation.DiffusionGemmaGenerationConfig(
        max_new_tokens=CANVAS * CANVASES,
        max_denoising_steps=steps,
        sampler_config=generation.EntropyBoundSamplerConfig(entropy_bound=bound),
        t_min=coldest,
        t_max=hottest,
        stability_threshold=stable,
        confidence_threshold=confident,
    )
    tokens = torch.from_numpy(prompt()[: int(length)].astype(np.int64))[None]
    with watched(request, oracle) as seen:
        out = model.generate(tokens, generation_config=config)
    read, best = (np.full((CANVASES, MOST, CANVAS), -1, np.int32) for _ in range(2))
    for canvas, passes in enumerate(seen):
        for turn, (before, after) in enumerate(passes):
            read[canvas, turn], best[canvas, turn] = before, after
    arrays = {
        "tokens": out.sequences[0, int(length) :].numpy().astype(np.int32),
        "passes": np.array([len(passes) for passes in seen], np.int32),
        "read": read,
        "best": best,
    }
    return arrays, oracle.closest


# --- logits -----------------------------------------------------------------------------------------------------------


class Causal(torch.nn.Module):
    """The encoder and the head as a plain causal model, as make_tiny.py's functions want one."""

    def __init__(self, whole: DiffusionGemmaForBlockDiffusion) -> None:
        super().__init__()
        self.whole, self.model = whole, whole.model.encoder.language_model

    def forward(self, tokens: torch.Tensor, **_: object) -> object:
        """Logits of an uncached pass."""
        hidden = self.model(tokens, use_cache=False).last_hidden_state
        cap = self.whole.config.text_config.final_logit_softcapping
        return mock.Mock(logits=torch.tanh(self.whole.lm_head(hidden) / cap) * cap)


@torch.no_grad()
def denoised(
    model: DiffusionGemmaForBlockDiffusion, length: int, canvas: np.ndarray, before: torch.Tensor | None = None
) -> torch.Tensor:
    """Logits [1, w, v] of a canvas behind the prompt's first tokens."""
    cache = DynamicCache(config=model.config.text_config)
    model.model.encoder(input_ids=torch.from_numpy(prompt()[:length].astype(np.int64))[None], cache=cache)
    canvas = torch.from_numpy(canvas.astype(np.int64))[None]
    return model(decoder_input_ids=canvas, cache=cache, self_conditioning_logits=before).logits


def clear(model: DiffusionGemmaForBlockDiffusion, request: tuple[float, ...]) -> dict[str, np.ndarray]:
    """A request's canvases by the first seed that leaves nothing to rounding."""
    for seed in range(400):
        with margins() as routed:
            arrays, closest = filled(model, seed, request)
        if closest > CLOSEST and min(routed) > CLOSEST_ROUTER:
            print(request, "seed", seed, "closest", closest, min(routed), "passes", arrays["passes"])
            return arrays | {"seed": np.uint32(seed)}
    raise SystemExit(f"{request}: no seed leaves nothing to rounding")


def logits_of(model: DiffusionGemmaForBlockDiffusion) -> dict[str, np.ndarray] | None:
    """The arrays without the filled canvases; nothing where something is close to a tie."""
    causal, ids = Causal(model), prompt()
    with margins() as routed:
        logits, taps = forward(causal, ids)
        line, gap = greedy(causal, ids)
        arrays = {
            "prompt": ids,
            "logits": logits,
            "taps": taps,
            "greedy": line.astype(np.int32),
            "gap": np.float32(gap),
        }
        arrays["canvas"] = np.random.default_rng(8).integers(0, VOCAB, CANVAS).astype(np.int32)
        for length in PROMPTS:
            plain = denoised(model, length, arrays["canvas"])
            arrays[f"denoised{length}"] = plain[0].numpy()
            arrays[f"conditioned{length}"] = denoised(model, length, arrays["canvas"], plain)[0].numpy()
    scores = [value for value in arrays.values() if value.shape[-1:] == (VOCAB,)]
    best = np.sort(np.concatenate(scores), axis=-1)
    apart = (best[:, -1] - best[:, -2]).min()
    rounding = noise(causal, logits)
    fine = gap > SMALLEST_GAP and EOS not in line and apart > SMALLEST_MARGIN and min(routed) > SMALLEST_ROUTER_MARGIN
    print("gap", gap, "apart", apart, "router", min(routed), "float32 noise", rounding)
    return arrays if fine and rounding < LARGEST_NOISE else None


# --- mistakes ---------------------------------------------------------------------------------------------------------


def effects(model: DiffusionGemmaForBlockDiffusion, arrays: dict[str, np.ndarray]) -> dict[str, float]:
    """How far some logit of a canvas moves, at most, for mistakes in weights."""
    moved = {}
    for name, suffix, change in (
        ("scalars of the causal mode", "decoder.layers.{}.layer_scalar", None),
        ("norm of soft embeddings dropped", "self_conditioning.pre_norm.weight", torch.ones_like),
        ("soft embeddings dropped", "self_conditioning.down_proj.weight", torch.zeros_like),
    ):
        other = copy.deepcopy(model)
        tensors = dict([*other.named_parameters(), *other.named_buffers()])
        if change is None:
            for layer in range(TEXT["num_hidden_layers"]):
                own = tensors[f"model.{suffix.format(layer)}"]
                own.data = tensors[f"model.encoder.language_model.layers.{layer}.layer_scalar"].clone()
        else:
            tensors[f"model.decoder.{suffix}"].data = change(tensors[f"model.decoder.{suffix}"])
        length = PROMPTS[1]
        before = torch.from_numpy(arrays[f"denoised{length}"])[None]
        logits = denoised(other, length, arrays["canvas"], before)[0].numpy()
        moved[name] = float(np.abs(logits - arrays[f"conditioned{length}"]).max())
    return moved


def load() -> DiffusionGemmaForBlockDiffusion:
    """The folder's model in float32 with the plain attention and experts."""
    plain = {"dtype": torch.float32, "attn_implementation": "eager"}
    model, info = DiffusionGemmaForBlockDiffusion.from_pretrained(FOLDER, output_loading_info=True, **plain)
    wrong = {kind: names for kind, names in info.items() if names}
    if wrong:
        raise SystemExit(wrong)
    model.set_experts_implementation("eager")
    return model.eval()


def main() -> None:
    """Write the folder, searching the first seed that leaves nothing to rounding."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    for seed in range(400):
        shutil.rmtree(FOLDER, ignore_errors=True)
        config = DiffusionGemmaConfig(text_config=dict(TEXT), vision_config=dict(VISION), canvas_length=CANVAS)
        model = DiffusionGemmaForBlockDiffusion(config)
        randomise(model, seed)
        for suffix, factor in SCALED.items():
            for name, tensor in model.named_parameters():
                if name.endswith(suffix):
                    tensor.data *= factor
        model.to(torch.bfloat16).save_pretrained(FOLDER)
        model = load()
        arrays = logits_of(model)
        if arrays is not None:
            break
    else:
        raise SystemExit("no seed leaves nothing to rounding")
    found = [clear(model, request) for request in REQUESTS]
    arrays |= {f"filled_{name}": np.stack([one[name] for one in found]) for name in found[0]}
    arrays["requests"] = np.array(REQUESTS, np.float64)
    moved = effects(model, arrays)
    if min(moved.values()) < 0.05:
        raise SystemExit(f"the golden does not show {moved}")
    np.savez_compressed(FOLDER / "goldens.npz", **arrays)
    size = sum(path.stat().st_size for path in FOLDER.iterdir())
    print(f"seed {seed}, {model.num_parameters():,} parameters, {size:,} bytes")
    print(moved)


if __name__ == "__main__":
    main()
