"""Small tokenizers of every kind, trained in a blink, and how a folder of one looks."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

REFERENCE = Path(__file__).parent.parent / "reference"
CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def _corpus() -> list[str]:
    rng = random.Random(7)
    words = ["the", "river", "winds", "through", "old", "towns", "where", "people", "sell", "bread", "and", "rain"]
    words += [
        "system",
        "user",
        "assistant",
        "naïve",
        "Straße",
        "日本",
        "привет",
        "x=1;",
        "(a+b)",
        "don't",
        "2024",
        "  ",
        "\n",
    ]
    return [" ".join(rng.choices(words, k=rng.randint(3, 12))) for _ in range(400)]


CORPUS = _corpus()


def save(tokenizer: tokenizers.Tokenizer, folder: Path, **config: object) -> Path:
    """A Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.joinpath("tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    folder.joinpath("tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def byte_level_bpe() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=list(CONTROLS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def marked_bpe(scheme: str) -> tokenizers.Tokenizer:
    """BPE over UTF-8 with marked spaces and byte fallback, as converted SentencePiece models have it."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    replace = decoders.Replace("\u2581", " ")
    strip = [decoders.Strip(" ", 1, 0)] if scheme != "never" else []
    tokenizer.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), *strip])
    special = ["<unk>", *CONTROLS, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False, max_token_length=12)
    words = (text.split(" ") for text in CORPUS)
    tokenizer.train_from_iterator([" " + word for line in words for word in line], trainer)
    definition = json.loads(tokenizer.to_str())
    definition["added_tokens"] = [entry for entry in definition["added_tokens"] if entry["id"] < 4]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(definition))
    tokenizer.add_tokens([tokenizers.AddedToken("\u2581\u2581", normalized=False)])  # an added word of two spaces
    return tokenizer


def eating_spaces() -> tokenizers.Tokenizer:
    """Byte-level BPE whose control tokens take white space along, beside added words that are no control tokens."""
    tokenizer = byte_level_bpe()
    tokenizer.add_special_tokens([tokenizers.AddedToken("<|end|>", rstrip=True, normalized=False)])
    tokenizer.add_special_tokens([tokenizers.AddedToken("[MASK]", lstrip=True, normalized=False)])
    tokenizer.add_special_tokens([tokenizers.AddedToken("STOP", single_word=True, normalized=False)])
    tokenizer.add_tokens([tokenizers.AddedToken("</think>", normalized=False), tokenizers.AddedToken("<|im")])
    return tokenizer


def folding() -> tokenizers.Tokenizer:
    """Byte-level BPE behind a normaliser that changes lengths."""
    tokenizer = byte_level_bpe()
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Prepend("_")])
    return tokenizer


KINDS = {
    "byte-level": byte_level_bpe,
    "marked, first": lambda: marked_bpe("first"),
    "marked, always": lambda: marked_bpe("always"),
    "marked, never": lambda: marked_bpe("never"),
    "eating spaces": eating_spaces,
    "folding": folding,
}


def sentencepiece_model(model_type: str = "bpe", **options: object) -> bytes:
    """A SentencePiece model with byte fallback, a dummy space, a control and a user-defined piece."""
    model = io.BytesIO()
    defaults = {
        "vocab_size": 450,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "control_symbols": ["<|im_end|>"],
        "user_defined_symbols": ["<turn>"],
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type=model_type,
        num_threads=1,
        minloglevel=2,
        **{**defaults, **options},
    )
    return model.getvalue()
