"""Write blocks.json: texts that diffusers and loops written out here decode block by block from the tiny checkpoints.

Knows torch, transformers and diffusers, and nothing of jaxserve. diffusers' ``LLaDA2Pipeline`` and its
``BlockRefinementScheduler`` state the joint threshold of LLaDA2.1, LLaDA2.0's threshold, and SDAR's dynamic and static
rules; it reads the whole text anew in each pass. Rules that it does not have (leftmost masks, leftmost masks and
what is sure behind them, bounded entropy, a penalty against stuttering) are loops over positions.

Some things are made to agree. The model is GLM-4-MoE or Qwen3 under a mask that lets each position see all of its
block. Its head is ``SHARP``, and never says the mask's token: it would undo what a pass decides. And the pipeline
counts a pass more for editing than LLaDA2.1's own code does, so it is given one less.

    python -m tests.reference.make_blocks
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from diffusers import BlockRefinementScheduler, LLaDA2Pipeline

from tests.reference.make_tiny import CASES, FOLDER, load
from tests.reference.tiny_families import MASK

FILE = Path(__file__).with_name("blocks.json")
BLOCKS = 4  # decoded behind each prompt
SMALLEST_GAP = 1e-4  # of logits, of probabilities to a threshold, and what is put in order: far above noise
SEEDS = 200
SHARP = 4.0  # factor on the head: random weights are sure of nothing
JOINT = {"threshold": 0.4, "edit_threshold": 0.7, "post_steps": 16}
EAGER = JOINT | {"edit_threshold": 0.3, "post_steps": 2}
STUTTER = {"threshold": 0.3, "penalty": 6.0}

# Name: checkpoint, block, rule, settings, prompts' lengths, and what must happen in all prompts together.
Runs = dict[str, tuple[str, int, str, dict[str, Any], tuple[int, ...], dict[str, int]]]
RUNS: Runs = {
    "joint": ("llada2_moe", 8, "pipeline", JOINT, (5, 8, 19, 34), {"edits": 12, "several": 12, "settled": 5}),
    "joint, two post steps": (
        "llada2_moe",
        8,
        "pipeline",
        JOINT | {"edit_threshold": 0.3, "post_steps": 2},
        (6, 17),
        {"edits": 6, "several": 6},
    ),
    "threshold": ("llada2_moe", 8, "pipeline", {"threshold": 0.35}, (7, 24), {"several": 5}),
    "dynamic": ("sdar_moe", 4, "pipeline", {"threshold": 0.3}, (1, 4, 6, 15), {"several": 6}),
    "dynamic, dense": ("sdar", 4, "pipeline", {"threshold": 0.25}, (3, 10), {"several": 3}),
    "static": ("sdar_moe", 4, "pipeline", {"threshold": 1.0, "steps": 3}, (2, 9), {"several": 4}),
    "sequential": ("sdar_moe", 4, "sequential", {"threshold": 0.5, "steps": 2}, (3, 8), {"several": 4}),
    "left prefix": ("llada2_moe", 8, "prefix", {"threshold": 0.3}, (9,), {"several": 3}),
    "bounded entropy": ("sdar_moe", 4, "entropy", {"entropy_bound": 4.0}, (3, 6), {"several": 3}),
    "against stuttering": (
        "llada2_moe",
        8,
        "dynamic",
        {"threshold": 0.3, "penalty": 6.0},
        (11, 14, 20),
        {"penalised": 1},
    ),
}


class Oracle(torch.nn.Module):
    """A checkpoint's model under a block-causal mask; keeps the logits of its last pass."""

    def __init__(self, checkpoint: str, block: int) -> None:
        super().__init__()
        self.model, self.block = load(FOLDER / checkpoint, CASES[checkpoint].layout), block
        self.config, self.logits = self.model.config, torch.zeros(0)
        self.device, self.dtype = torch.device("cpu"), torch.float32

    @torch.no_grad()
    def forward(self, tokens: torch.Tensor, **_: object) -> SimpleNamespace:
        """Logits of a whole text."""
        at = torch.arange(tokens.shape[1]) // self.block
        seen = torch.where(at[:, None] >= at[None, :], 0.0, torch.finfo(torch.float32).min)
        logits = self.model(tokens, attention_mask=seen[None, None], use_cache=False).logits
        logits *= SHARP
        logits[..., MASK] = -1e30
        self.logits = logits[0, -self.block :].double()
        return SimpleNamespace(logits=logits)


class Watch:
    """Passes of one text, what happened in them, and how close they came to a tie."""

    def __init__(self, block: int, settings: dict[str, Any], given: int) -> None:
        self.block, self.settings, self.given = block, settings, given % block
        self.passes: list[list[int]] = []
        self.gap = np.inf
        self.happened = {"edits": 0, "several": 0, "post": 0, "settled": 0, "penalised": 0}

    def look(self, logits: torch.Tensor, before: np.ndarray, after: np.ndarray) -> None:
        """One pass; the pipeline makes one more than is needed where nothing is edited."""
        if "edit_threshold" not in self.settings and MASK not in before:
            return
        given = self.given if not any(MASK not in row for row in self.passes) else 0
        best = logits.sort(-1).values[given:]
        sure = logits.softmax(-1).max(-1).values[given:].numpy()
        entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).nan_to_num().sum(-1)[given:].numpy()
        masked = before[given:] == MASK
        order = np.sort(np.concatenate([sure[masked], [self.settings.get("threshold", 1.0)]]))
        self.gap = min(self.gap, float((best[:, -1] - best[:, -2]).min()), *np.diff(order).tolist())
        if "entropy_bound" in self.settings:
            ahead = np.sort(entropy[masked])
            self.gap = min(self.gap, *np.diff(ahead).tolist(), *abs(ahead.cumsum() - self.settings["entropy_bound"]))
        if "edit_threshold" in self.settings and (~masked).any():
            self.gap = min(self.gap, float(abs(sure[~masked] - self.settings["edit_threshold"]).min()))
        self.happened["edits"] += int(((before != after) & (before != MASK)).sum())
        self.happened["several"] += int(((before == MASK) & (after != MASK)).sum()) > 1
        self.happened["post"] += bool((before != MASK).all())
        self.happened["settled"] += bool((before == after).all())
        self.passes.append(after.tolist())


def by_pipeline(oracle: Oracle, settings: dict[str, Any], prompt: np.ndarray, watch: Watch) -> list[int]:
    """The text behind a prompt, decoded by diffusers."""
    block = oracle.block
    steps, edit = settings.get("steps", block), settings.get("edit_threshold")
    scheduler = BlockRefinementScheduler(block_length=block, num_inference_steps=steps)
    pipeline = LLaDA2Pipeline(model=oracle, scheduler=scheduler, tokenizer=None)
    pipeline.set_progress_bar_config(disable=True)
    before: np.ndarray | None = None

    def look(_: object, __: int, ___: int, seen: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        nonlocal before
        after = seen["block_x"][0, -block:].numpy().copy()
        masks = seen["active_block"][0].numpy()
        if before is None or (before != MASK)[masks].any():  # another block
            before = after
        watch.look(oracle.logits, np.where(masks, MASK, before), after)
        before = after
        return {}

    out = pipeline(
        input_ids=torch.from_numpy(prompt.astype(np.int64))[None],
        gen_length=(len(prompt) // block + BLOCKS) * block - len(prompt),
        block_length=block,
        num_inference_steps=steps,
        temperature=0.0,
        threshold=settings["threshold"],
        editing_threshold=edit,
        max_post_steps=settings.get("post_steps", 1) - 1,
        eos_early_stop=False,
        mask_token_id=MASK,
        output_type="seq",
        callback_on_step_end=look,
        callback_on_step_end_tensor_inputs=["block_x", "active_block"],
    )
    return out.sequences[0].tolist()


def chosen(rule: str, settings: dict[str, Any], masks: list[int], shares: np.ndarray, due: int) -> list[int]:
    """The masks that a rule fills."""
    sure = shares.max(-1)
    if rule == "sequential":
        return masks[:due]
    if rule == "dynamic":
        above = [at for at in masks if sure[at] > settings["threshold"]]
        return above if len(above) >= due else sorted(masks, key=lambda at: -sure[at])[:due]
    if rule == "prefix":
        taken = masks[:due]
        for at in masks[due:]:
            if sure[at] <= settings["threshold"]:
                break
            taken.append(at)
        return taken
    entropy = -(shares * np.log(np.maximum(shares, 1e-30))).sum(-1)
    taken, spent = [], 0.0
    for at in sorted(masks, key=lambda at: entropy[at]):
        spent += entropy[at]
        if taken and spent > settings["entropy_bound"]:
            break
        taken.append(at)
    return taken


def by_loop(oracle: Oracle, rule: str, settings: dict[str, Any], prompt: np.ndarray, watch: Watch) -> list[int]:
    """The same by a loop of its own."""
    block, text = oracle.block, prompt.tolist()
    steps = settings.get("steps", block)
    for _ in range(BLOCKS):
        given = len(text) % block
        text += [MASK] * (block - given)
        for step in range(block):
            now = np.asarray(text[-block:])
            if MASK not in now:
                break
            oracle(torch.tensor([text]))
            logits = oracle.logits.clone()
            plain = logits.argmax(-1)
            for at in range(block):
                if len(text) - block + at > 0:
                    logits[at, text[len(text) - block + at - 1]] -= settings.get("penalty", 0.0)
            shares = logits.softmax(-1).numpy()
            due = block // steps + (step < block % steps)
            taken = chosen(rule, settings, [at for at in range(block) if now[at] == MASK], shares, due)
            for at in taken:
                text[len(text) - block + at] = int(shares[at].argmax())
                watch.happened["penalised"] += int(plain[at]) != int(shares[at].argmax())
            watch.look(logits, now, np.asarray(text[-block:]))
    return text[len(prompt) :]


def run(oracle: Oracle, rule: str, settings: dict[str, Any], length: int) -> tuple[dict[str, Any], dict[str, int]]:
    """A prompt of this length whose text comes near no tie."""
    for seed in range(SEEDS):
        prompt = np.random.default_rng([length, seed]).integers(0, MASK, length)
        watch = Watch(oracle.block, settings, length)
        args = (settings, prompt, watch)
        text = by_pipeline(oracle, *args) if rule == "pipeline" else by_loop(oracle, rule, *args)
        if watch.gap > SMALLEST_GAP and MASK not in text:
            print(f"    {length}: {watch.happened}")
            found = {"prompt": prompt.tolist(), "text": text, "passes": watch.passes}
            return found, watch.happened
    raise SystemExit(f"{rule}, {settings}: each of {SEEDS} prompts of {length} comes near a tie")


def main() -> None:
    """Write the file."""
    torch.set_num_threads(1)
    cases = []
    for name, (checkpoint, block, rule, settings, lengths, expected) in RUNS.items():
        oracle = Oracle(checkpoint, block)
        texts, happened = zip(*(run(oracle, rule, settings, length) for length in lengths), strict=True)
        total = {what: sum(one[what] for one in happened) for what in happened[0]}
        passes = sum(len(text["passes"]) for text in texts)
        print(f"{name}: {sum(len(text['text']) for text in texts)} tokens, {passes} passes, {total}")
        if missing := {what: total[what] for what, least in expected.items() if total[what] < least}:
            raise SystemExit(f"{name}: too little happens: {missing}")
        facts = {"name": name, "checkpoint": checkpoint, "block": block, "mask": MASK, "sharp": SHARP}
        cases.append(facts | {"rule": rule, "settings": settings, "happened": total, "texts": texts})
    FILE.write_text("[\n" + ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases) + "\n]\n")


if __name__ == "__main__":
    sys.exit(main())
