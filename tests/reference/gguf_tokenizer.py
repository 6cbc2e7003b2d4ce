"""Two tokenizers stated by hand on the vocabularies of GGUF files: SmolLM2's (merges) and Gemma 3's (scores).

SmolLM2's pre-tokenizer is the one of the model's own tokenizer.json: single digits first, then the GPT-2 pattern. (What
transformers derives from a GGUF file leaves the digits out and splits strings such as "½" differently.)
"""

import re

import gguf
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.reference.gguf_llama import value

UNKNOWN, CONTROL, WORD = 2, 3, 4  # tokenizer.ggml.token_type: WORD is never split


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


class Scored:
    """Gemma 3's: SentencePiece's own library on the pieces, scores and kinds of the file.

    The file writes runs of spaces among its words as they are; the library looks for them after it has marked spaces.
    """

    def __init__(self, reader: gguf.GGUFReader) -> None:
        tokens, kinds, scores = (value(reader, f"tokenizer.ggml.{key}") for key in ("tokens", "token_type", "scores"))
        if value(reader, "tokenizer.ggml.model") != "llama" or value(reader, "tokenizer.ggml.add_space_prefix"):
            raise SystemExit("not a Gemma vocabulary")
        model, unknown = sentencepiece_model_pb2.ModelProto(), value(reader, "tokenizer.ggml.unknown_token_id")
        for index, (token, kind, score) in enumerate(zip(tokens, kinds, scores, strict=True)):
            kind = UNKNOWN if index == unknown else kind  # the file takes it for a special token
            model.pieces.add(piece=token.replace(" ", "\u2581") if kind == WORD else token, score=score, type=kind)
        trainer, normalizer = model.trainer_spec, model.normalizer_spec
        trainer.model_type, trainer.byte_fallback, trainer.vocab_size = trainer.BPE, True, len(tokens)
        trainer.unk_id, trainer.unk_piece = unknown, tokens[unknown]
        for role in ("bos", "eos"):
            token = value(reader, f"tokenizer.ggml.{role}_token_id")
            setattr(trainer, f"{role}_id", token)
            setattr(trainer, f"{role}_piece", tokens[token])
        trainer.pad_id = value(reader, "tokenizer.ggml.padding_token_id")
        trainer.pad_piece = tokens[trainer.pad_id]
        normalizer.name, normalizer.escape_whitespaces = "identity", True
        normalizer.remove_extra_whitespaces = normalizer.add_dummy_prefix = False
        self.processor = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
        self.control = {token: index for index, token in enumerate(tokens) if kinds[index] == CONTROL}
        self.size = len(tokens)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of a text; with `special` false, what looks like a special token is ordinary text."""
        if not special:
            return list(self.processor.encode(text))
        words = sorted(self.control, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, words))})", text)
        ids = []
        for part in parts:
            ids += [self.control[part]] if part in self.control else self.processor.encode(part)
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of ids, special tokens left out."""
        return str(self.processor.decode([token for token in ids if token not in self.control.values()]))
