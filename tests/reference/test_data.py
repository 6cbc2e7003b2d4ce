"""The reference data is whole, small, and says what is known from elsewhere."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from tokenizers import Tokenizer

from tests.reference.fuzz import strings

HERE = Path(__file__).parent
LIMIT = 24 * 2**20
TINY_LIMIT = 20 * 2**20
CASES = sorted(path.name for path in (HERE / "tiny").iterdir())
PROMPTS = ("capital", "fibonacci", "chat", "long", "unicode", "single")
SCRIPTS = {".py", ".md"}
TYPES = {"llama", "mistral", "qwen2", "qwen3"} | {
    "qwen3_moe", "mixtral", "glm4_moe", "llada2_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5_moe",
    "gemma3_text", "gemma3", "gemma4_text", "gemma4", "gpt_oss", "deepseek_v3", "smollm3",
    "diffusion_gemma",
    "sdar", "sdar_moe",
}  # fmt: skip

# Measured apart from these scripts, with another program, from the same file (transformers in float32).
KNOWN = {
    "capital": (
        [504, 3575, 282, 4649, 314],
        {7042: -0.2581, 260: -2.7407, 4528: -4.3844, 2250: -4.6199, 1315: -4.6778},
        # up to the end token, which that program suppressed
        "7042 30 198 198 504 2988 314 42 216 34 32 33 40 29 32 33 29 34 34 216 33 34 42 33 34 42 37 35 30",
        0.051,
    ),
    "fibonacci": (
        [1604, 3987, 46477, 24, 94, 727, 198],
        {},
        "198 1604 3987 46477 24 94 727 472 585 304 10204 216 33 42 448 1003 304 472 1745 42 448 1003 3987 46477 24 94"
        " 731 216 33 25 1232 3987",
        0.069,
    ),
}


def read(path: Path) -> Any:
    """A JSON file, compressed or not."""
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


@pytest.fixture(scope="module")
def smollm2() -> dict[str, np.ndarray]:
    with np.load(HERE / "smollm2.npz") as arrays:
        return dict(arrays)


def golden(case: str) -> dict[str, np.ndarray]:
    with np.load(HERE / "tiny" / case / "goldens.npz") as arrays:
        return dict(arrays)


def text_config(case: str) -> dict[str, Any]:
    """The text model's fields, which other models' files have inside."""
    config = read(HERE / "tiny" / case / "config.json")
    return config.get("text_config", config)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    return wide - np.log(np.exp(wide - wide.max()).sum()) - wide.max()


def test_the_data_stays_small() -> None:
    sizes = [path.stat().st_size for path in HERE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(sizes) < LIMIT
    assert sum(path.stat().st_size for path in (HERE / "tiny").rglob("*") if path.is_file()) < TINY_LIMIT


def test_the_readme_names_every_file() -> None:
    readme = (HERE / "README.md").read_text()
    missing = [
        path.name
        for path in HERE.iterdir()
        if path.suffix not in SCRIPTS and path.name != "__pycache__" and path.name not in readme
        and path.name not in {"tiny_sp.model", "tiny_sp.json.gz"}  # named by tiny_sp.*
    ]  # fmt: skip
    assert missing == []
    assert [case for case in CASES if f"`{case}`" not in readme] == []


@pytest.mark.parametrize("prompt", KNOWN)
def test_smollm2_agrees_with_what_was_measured_elsewhere(smollm2: dict[str, np.ndarray], prompt: str) -> None:
    ids, best, greedy, gap = KNOWN[prompt]
    line = [int(token) for token in greedy.split()]
    assert smollm2[f"{prompt}.ids"].tolist() == ids
    assert smollm2[f"{prompt}.greedy"][: len(line)].tolist() == line
    assert smollm2[f"{prompt}.gaps"][: len(line)].min() == pytest.approx(gap, abs=5e-4)
    if best:
        assert smollm2[f"{prompt}.top_ids"][-1].tolist() == list(best)
        logprobs = smollm2[f"{prompt}.top_logits"][-1] - smollm2[f"{prompt}.logsumexp"][-1]
        assert logprobs == pytest.approx(list(best.values()), abs=1.1e-4)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_smollm2_arrays_agree_with_each_other(smollm2: dict[str, np.ndarray], prompt: str) -> None:
    array = {key.split(".")[1]: value for key, value in smollm2.items() if key.startswith(f"{prompt}.")}
    columns, ids = smollm2["columns"], array["ids"]
    assert array["logits"].shape == (len(ids), len(columns))
    assert array["logprobs"].shape == (len(ids) - 1,)
    assert np.array_equal(array["last_logits"][columns], array["logits"][-1])
    assert np.array_equal(np.sort(array["last_logits"])[-5:][::-1], array["top_logits"][-1])
    assert array["greedy"][0] == array["last_logits"].argmax() == array["top_ids"][-1, 0]
    assert array["gaps"][0] == pytest.approx(array["top_logits"][-1, 0] - array["top_logits"][-1, 1], abs=1e-4)
    last = log_softmax(array["last_logits"])
    assert last.max() == pytest.approx(array["top_logits"][-1, 0] - array["logsumexp"][-1], abs=1e-5)
    for position, token in enumerate(ids[1:]):
        place = np.flatnonzero(array["top_ids"][position] == token)
        if place.size:
            expected = array["top_logits"][position, place[0]] - array["logsumexp"][position]
            assert array["logprobs"][position] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_a_tiny_golden_fits_its_configuration(case: str) -> None:
    config, array = text_config(case), golden(case)
    length, width = len(array["prompt"]), config["hidden_size"]
    assert array["logits"].shape == (length, config["vocab_size"])
    if "taps" in array:
        assert array["taps"].shape == (config["num_hidden_layers"], length, width)
        best = np.sort(array["logits"], axis=-1)
        assert (best[:, -1] - best[:, -2]).min() > 5e-4  # so that a test may ask for the same best token everywhere
    else:
        assert array["layer0"].shape == (length, width)
    assert array["prompt"].max() < config["bos_token_id"]
    assert array["greedy"][0] == array["logits"][-1].argmax()
    assert array["gap"] >= 0.01
    assert config["eos_token_id"] not in array["greedy"]


def test_the_tiny_cases_cover_spellings_and_kinds() -> None:
    whole = {case: read(HERE / "tiny" / case / "config.json") for case in CASES}
    configs = {case: text_config(case) for case in CASES}
    old = {case for case, config in configs.items() if "rope_theta" in config}
    assert all(("rope_parameters" in config) == (case not in old) for case, config in configs.items())
    ropes = [config.get("rope_parameters") or config.get("rope_scaling") or {} for config in configs.values()]
    ropes = [one for rope in ropes for one in (rope.values() if "full_attention" in rope else [rope])]
    kinds = {rope.get("rope_type", rope.get("type", "default")) for rope in ropes}
    assert kinds == {"default", "linear", "llama3", "yarn", "longrope", "proportional"}
    assert old
    assert old != set(CASES)
    assert {config["model_type"] for config in whole.values()} == TYPES
    assert {config.get("tie_word_embeddings") for config in configs.values()} == {True, False, None}
    forms = {config.get("quantization_config", {}).get("quant_method") for config in whole.values()}
    assert forms == {None, "fp8", "mxfp4"}
    assert len({str(golden(case)["prompt"]) for case in CASES}) == 1


def test_frequencies_have_half_the_rotated_size() -> None:
    for entry in read(HERE / "oracle.json")["frequencies"]:
        config, rope = entry["config"], entry["config"].get("rope_parameters") or {}
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        whole = rope.get("rope_type") == "proportional"
        assert len(entry["inv_freq"]) == (head if whole else int(head * share)) // 2, entry["name"]


def test_rotations_keep_lengths_and_pass_the_rest_through() -> None:
    for entry in read(HERE / "oracle.json")["rotations"]:
        before, after = np.array(entry["before"]), np.array(entry["after"])
        turned = int(before.shape[1] * entry["partial_rotary_factor"])
        assert np.array_equal(before[:, turned:], after[:, turned:])
        assert np.array_equal(before[0], after[0])  # position 0
        assert np.linalg.norm(before, axis=1) == pytest.approx(np.linalg.norm(after, axis=1), rel=1e-6)
        assert np.abs(before[1:, :turned] - after[1:, :turned]).max() > 0.1


@pytest.mark.parametrize(
    ("name", "seed", "count"),
    [("smollm2_tokenizer.json.gz", 1, 2000), ("tiny_sp.json.gz", 2, 2000), ("tiny_bpe/goldens.json", 3, 300)],
)
def test_texts_are_the_ones_fuzz_draws(name: str, seed: int, count: int) -> None:
    content = read(HERE / name)
    assert content["texts"] == strings(seed, count)
    assert len(set(content["texts"])) == len(content["ids"]) == count


def test_smollm2_ids_of_known_texts() -> None:
    content = read(HERE / "smollm2_tokenizer.json.gz")
    index = content["texts"].index("<|im_start|>user")
    assert content["ids"][index] == [1, 4093]
    assert content["plain"][str(index)][0] != 1
    assert len(content["ids"][content["texts"].index("99999999999")]) == 11  # single digits


def test_sentencepiece_still_gives_these_ids() -> None:
    processor = sentencepiece.SentencePieceProcessor(model_file=str(HERE / "tiny_sp.model"))
    content = read(HERE / "tiny_sp.json.gz")
    assert processor.encode(content["texts"]) == content["ids"]
    assert [processor.decode(ids) for ids, _ in content["decode"]] == [text for _, text in content["decode"]]


def test_tokenizers_still_gives_these_ids() -> None:
    tokenizer = Tokenizer.from_file(str(HERE / "tiny_bpe" / "tokenizer.json"))
    content = read(HERE / "tiny_bpe" / "goldens.json")
    assert [tokenizer.encode(text).ids for text in content["texts"]] == content["ids"]
    assert [tokenizer.decode(ids) for ids, _ in content["decode"]] == [text for _, text in content["decode"]]
    assert [tokenizer.encode(chat["text"]).ids for chat in content["chats"]] == [c["ids"] for c in content["chats"]]


def test_sampling_rows_keep_what_their_parameters_say() -> None:
    with np.load(HERE / "sampling.npz") as arrays:
        row = dict(arrays)
    kept = np.isfinite(row["processed"])
    vocab = row["logits"].shape[1]
    filtered = (row["top_k"] > 0) | (row["top_p"] < 1) | (row["min_p"] > 0)
    assert kept.any(1).all()
    assert kept[~filtered].all()
    assert (kept.sum(1) <= np.where(row["top_k"] > 0, row["top_k"], vocab)).all()
    bent = (row["repetition"] != 1) | (row["frequency"] != 0) | (row["presence"] != 0)
    scaled = row["logits"] / row["temperature"][:, None]
    assert row["processed"][kept & ~bent[:, None]] == pytest.approx(scaled[kept & ~bent[:, None]], abs=1e-5)
    assert (np.abs(row["processed"] - scaled)[kept & bent[:, None]] > 1e-3).any()
