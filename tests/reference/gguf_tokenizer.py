"""SmolLM2's tokenizer, stated by hand on the vocabulary and merges of its GGUF file.

The pre-tokenizer is the one of the model's own tokenizer.json: single digits first, then the GPT-2 pattern. (What
transformers derives from a GGUF file leaves the digits out and splits strings such as "½" differently.)
"""

import gguf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.reference.gguf_llama import value

CONTROL = 3  # tokenizer.ggml.token_type of a special token


def smollm2(reader: gguf.GGUFReader, *, special: bool = True) -> Tokenizer:
    """The tokenizer; with `special` false, text that looks like a special token is ordinary text."""
    if value(reader, "tokenizer.ggml.pre") != "smollm":
        raise SystemExit("not a SmolLM vocabulary")
    tokens = value(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in value(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    if special:
        kinds = value(reader, "tokenizer.ggml.token_type")
        control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
        tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return tokenizer
