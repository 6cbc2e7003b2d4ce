"""The pre-tokenizers that GGUF files name in ``tokenizer.ggml.pre``: how byte-level BPE cuts text before merging.

A GGUF carries only a name; the patterns behind the names are each vocabulary's own, as in its ``tokenizer.json``.
Patterns of one entry are applied one after the other, each cutting the pieces of the one before.
"""

from __future__ import annotations

import dataclasses

_CASED_RANGES = (
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 "
    "3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A "
    "1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 "
    "1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 "
    "212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D "
    "A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F "
    "104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TRAILING_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_OLD_STYLE = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


def _cased_letters() -> str:
    bounds = [[chr(int(end, 16)) for end in item.split("-")] for item in _CASED_RANGES.split()]
    return r"\s?[" + "".join("-".join(pair) for pair in bounds) + "]+"


def _words(digits: str, letter: str = r"\p{L}", beside: str = r"\p{L}") -> str:
    """The pattern that most vocabularies since 2024 share, by how they group digits and what counts as a letter."""
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letter}+|{digits}| ?[^\s{beside}\p{{N}}]+[\r\n]*|{_TRAILING_SPACES}"
    )


def _cased_words(digits: str, contractions: str = "") -> str:
    """The same with a cut between lower and upper case."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{start}{_UPPER}*{_LOWER}+{contractions}|{start}{_UPPER}+{_LOWER}*{contractions}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TRAILING_SPACES}"
    )


@dataclasses.dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One entry of the table.

    Attributes:
        patterns: regular expressions (Oniguruma); each match and each rest becomes a piece.
        ignore_merges: a piece that is a token as it stands is not split, whatever the merges say.
        adds_bos: default of ``tokenizer.ggml.add_bos_token``.
        nfc: text is brought into Unicode's composed form first.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False
    nfc: bool = False


_LLAMA_BPE = PreTokenizer((_words(r"\p{N}{1,3}"),), ignore_merges=True, adds_bos=True)
_SINGLE_DIGITS = PreTokenizer((r"\p{N}", _OLD_STYLE))
_PLAIN = PreTokenizer((_OLD_STYLE,))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _OLD_STYLE, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _PLAIN,
    "phi-2": _PLAIN,
    "mpt": _PLAIN,
    "olmo": _PLAIN,
    "exaone4": _PLAIN,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "command-r": _SINGLE_DIGITS,
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _OLD_STYLE, "[0-9][0-9][0-9]")),
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "falcon3": _LLAMA_BPE,
    "lfm2": _LLAMA_BPE,
    "pixtral": _LLAMA_BPE,
    "dbrx": PreTokenizer((_words(r"\p{N}{1,3}"),)),
    "smaug-bpe": PreTokenizer((_words(r"\p{N}{1,3}"),)),
    "glm4": PreTokenizer((_words(r"\p{N}{1,3}"),), ignore_merges=True),
    "qwen2": PreTokenizer((_words(r"\p{N}"),), nfc=True),
    "deepseek-r1-qwen": PreTokenizer((_words(r"\p{N}"),)),
    "stablelm2": PreTokenizer((_words(r"\p{N}"),)),
    "qwen35": PreTokenizer((_words(r"\p{N}", r"[\p{L}\p{M}]", r"\p{L}\p{M}"),), nfc=True),
    "tekken": PreTokenizer((_cased_words(r"\p{N}"),), ignore_merges=True, adds_bos=True),
    "gpt-4o": PreTokenizer((_cased_words(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"),)),
    "llama4": PreTokenizer((_cased_words(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"),)),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            _cased_letters(),
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _CJK,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "deepseek-v3": PreTokenizer(
        (
            r"\p{N}{1,3}",
            "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
            rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TRAILING_SPACES}",
        )
    ),
}
