from __future__ import annotations

import pytest
from tokenizers import Regex, pre_tokenizers

from jaxserve.text.gguf_pretokenizers import PRE_TOKENIZERS


def pieces(name: str, text: str) -> list[str]:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[name].patterns]
    return [piece for piece, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)]


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_nothing_is_lost(name, texts):
    assert all("".join(pieces(name, text)) == text for text in texts[:500])


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt-2", "I'll  pay 1234½!\n\n x", ["I", "'ll", " ", " pay", " 1234½", "!", "\n\n", " x"]),
        ("smollm", "I'll pay 12½", ["I", "'ll", " pay", " ", "1", "2", "½"]),
        ("llama-bpe", "I'LL pay 12345!\n x", ["I", "'LL", " pay", " ", "123", "45", "!\n", " x"]),
        ("qwen2", "I'LL pay 123", ["I", "'LL", " pay", " ", "1", "2", "3"]),
        ("qwen2", "Vie\u0323t", ["Vie", "\u0323t"]),
        ("qwen35", "Vie\u0323t", ["Vie\u0323t"]),
        ("tekken", "helloWorld 12", ["hello", "World", " ", "1", "2"]),
        ("gpt-4o", "HELLOWorld's 1234", ["HELLOWorld's", " ", "123", "4"]),
        ("deepseek-llm", "ab, 日本12\n", ["ab", ",", " ", "日本", "12", "\n"]),
        ("deepseek-coder", "ab, 12\n", ["ab", ",", " ", "1", "2", "\n"]),
        ("deepseek-v3", ".join 日本1234", [".join", " ", "日本", "123", "4"]),
        ("default", "a+b 1234", ["a", "+", "b", " ", "123", "4"]),
        ("falcon", "a`b 1234", ["a", "`", "b", " ", "123", "4"]),
    ],
)
def test_cuts(name, text, expected):
    assert pieces(name, text) == expected


def test_the_vocabularies_asked_for_are_there():
    assert {"smollm", "llama-bpe", "llama3", "qwen2", "qwen35", "gpt-2", "tekken", "default"} <= set(PRE_TOKENIZERS)
