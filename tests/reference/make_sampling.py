"""Write sampling.npz: logits as transformers' processors leave them, row by row with each row's own parameters.

Order: repetition penalty (prompt and output), frequency and presence penalties (output only), temperature, top-k,
top-p, min-p. transformers has no frequency and presence penalty; their formula is OpenAI's:
logit - count * frequency - (count > 0) * presence. Computed in float64; a row in which rounding could decide whether a
token is kept is drawn again.

    python -m tests.reference.make_sampling
"""

import itertools
from pathlib import Path

import numpy as np
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

FILE = Path(__file__).parent / "sampling.npz"
VOCAB, LENGTH, ROWS = 128, 24, 96
OFF = {
    "repetition": 1.0, "frequency": 0.0, "presence": 0.0, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
}  # fmt: skip
VALUES = {
    "repetition": (1.3, 0.8, 2.0),
    "frequency": (0.5, -0.7, 2.0),
    "presence": (0.9, -1.5, 2.0),
    "temperature": (0.2, 0.7, 1.8),
    "top_k": (1, 5, 40, VOCAB, 1000),
    "top_p": (0.05, 0.5, 0.9, 0.99),
    "min_p": (0.02, 0.1, 0.5, 1.0),
}
MILD = VALUES | {"temperature": (0.7, 1.0, 1.8), "top_k": (5, 20, 40), "top_p": (0.5, 0.8, 0.95), "min_p": (0.02, 0.1)}
MARGIN = 1e-4  # how far, relatively, every token stays from every threshold


def processors(row: dict[str, float]) -> list[LogitsProcessorList]:
    """transformers' processors before and after the place of OpenAI's penalties."""
    before = LogitsProcessorList()
    if row["repetition"] != 1.0:
        before.append(RepetitionPenaltyLogitsProcessor(row["repetition"]))
    after = LogitsProcessorList([TemperatureLogitsWarper(row["temperature"])])
    if row["top_k"]:
        after.append(TopKLogitsWarper(int(row["top_k"])))
    if row["top_p"] < 1.0:
        after.append(TopPLogitsWarper(row["top_p"]))
    if row["min_p"]:
        after.append(MinPLogitsWarper(row["min_p"]))
    return [before, after]


def process(logits: np.ndarray, prompt: np.ndarray, output: np.ndarray, row: dict[str, float]) -> np.ndarray:
    """The row's logits [v] float64 after everything; -inf where a token may not be drawn."""
    before, after = processors(row)
    context = torch.from_numpy(np.concatenate([prompt, output]).astype(np.int64))[None]
    values = before(context, torch.from_numpy(logits.astype(np.float64))[None])[0].numpy()
    counts = np.bincount(output, minlength=VOCAB)
    values = values - counts * row["frequency"] - (counts > 0) * row["presence"]
    found: np.ndarray = after(context, torch.from_numpy(values)[None])[0].numpy()
    return found


def robust(logits: np.ndarray, prompt: np.ndarray, output: np.ndarray, row: dict[str, float]) -> bool:
    """Whether slightly other thresholds keep the same tokens."""
    shares = {row["top_p"]} if row["top_p"] == 1.0 else {row["top_p"] * (1 - MARGIN), row["top_p"] * (1 + MARGIN)}
    floors = {row["min_p"] * (1 - MARGIN), min(1.0, row["min_p"] * (1 + MARGIN))}
    kept = {
        np.isfinite(process(logits, prompt, output, row | {"top_p": top_p, "min_p": min_p})).tobytes()
        for top_p, min_p in itertools.product(shares, floors)
    }
    return len(kept) == 1


def parameters(rng: np.random.Generator) -> list[dict[str, float]]:
    """Nothing at all, every value alone, then random combinations of values that leave a choice."""
    rows = [dict(OFF)]
    rows += [OFF | {name: value} for name, values in VALUES.items() for value in values]
    while len(rows) < ROWS:
        chosen = [name for name in VALUES if rng.random() < 0.6]
        rows.append(OFF | {name: MILD[name][rng.integers(len(MILD[name]))] for name in chosen})
    return rows


def main() -> None:
    """Write the file."""
    rng = np.random.default_rng(5)
    rows = parameters(rng)
    logits = np.empty((ROWS, VOCAB), np.float32)
    processed = np.empty((ROWS, VOCAB), np.float32)
    prompts = np.full((ROWS, LENGTH), -1, np.int32)
    outputs = np.full((ROWS, LENGTH), -1, np.int32)
    for i, row in enumerate(rows):
        while True:
            logits[i] = rng.standard_normal(VOCAB) * rng.choice((0.5, 1.0, 2.0)) + rng.normal()
            prompt, output = (rng.integers(0, VOCAB // 4, rng.integers(low, LENGTH + 1)) for low in (1, 0))
            if robust(logits[i], prompt, output, row):
                break
        processed[i] = process(logits[i], prompt, output, row)
        prompts[i, : len(prompt)], outputs[i, : len(output)] = prompt, output
    columns = {name: np.array([row[name] for row in rows], np.int32 if name == "top_k" else np.float32) for name in OFF}
    np.savez_compressed(FILE, logits=logits, prompt=prompts, output=outputs, processed=processed, **columns)
    print(f"{FILE.stat().st_size:,} bytes, kept by row:", *np.isfinite(processed).sum(1))


if __name__ == "__main__":
    main()
