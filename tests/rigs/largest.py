"""The largest bodies that are read, each made of as many of one small thing as fit: what may one request cost?

Knows where a parser, a template or a tokenizer does work for each of them. Nothing here is malformed.
"""

from __future__ import annotations

from tests.rigs.bad_inputs import CHAT, TEXT

MOST = 4 << 20  # the default of ``server.max_body_bytes``
MOST_GROWTH = 256 << 20  # of the process, over all of them


def _filled(start: bytes, thing: bytes, end: bytes) -> bytes:
    """As many of ``thing`` with commas between them as fit."""
    count = (MOST - len(start) - len(end)) // (len(thing) + 1)
    return start + b",".join([thing] * count) + end


def _text(start: bytes, piece: bytes, end: bytes, most: int = MOST) -> bytes:
    """A text of as many pieces as fit."""
    return start + piece * ((most - len(start) - len(end)) // len(piece)) + end


TURN = b'{"messages":[{"role":"user","content":"a"}],"max_tokens":1'
CASES: dict[str, tuple[str, bytes]] = {
    "token ids to be text": ("/detokenize", _filled(b'{"tokens":[', b"5", b"]}")),
    "lists for token ids": ("/detokenize", _filled(b'{"tokens":[', b"[]", b"]}")),
    "token ids": (TEXT, _filled(b'{"prompt":[', b"5", b"]}")),
    "lists of token ids": (TEXT, _filled(b'{"prompt":[', b"[5]", b"]}")),
    "prompts": (TEXT, _filled(b'{"prompt":[', b'"a"', b"]}")),
    "stop strings": (TEXT, _filled(b'{"prompt":"a","stop":[', b'"a"', b"]}")),
    "stop tokens": (TEXT, _filled(b'{"prompt":"a","stop_token_ids":[', b"1", b"]}")),
    "biases": (
        TEXT,
        b'{"prompt":"a","logit_bias":{' + b",".join(b'"%d":1' % token for token in range(350_000)) + b"}}",
    ),
    "messages": (CHAT, _filled(b'{"messages":[', b'{"role":"user","content":"a"}', b"]}")),
    "parts": (
        CHAT,
        _filled(b'{"messages":[{"role":"user","content":[', b'{"type":"text","text":"a"}', b"]}]}"),
    ),
    "calls": (
        CHAT,
        _filled(b'{"messages":[{"role":"assistant","tool_calls":[', b'{"function":{"arguments":"{}"}}', b"]}]}"),
    ),
    "arguments": (
        CHAT,
        _text(b'{"messages":[{"role":"assistant","tool_calls":[{"function":{"arguments":"', b"[1],", b'"}}]}]}'),
    ),
    "variables": (CHAT, _filled(TURN + b',"chat_template_kwargs":{"a":[', b"1", b"]}}")),
    "names of variables": (
        CHAT,
        TURN + b',"chat_template_kwargs":{' + b",".join(b'"a%d":1' % n for n in range(300_000)) + b"}}",
    ),
    "unknown things": (CHAT, _filled(TURN + b',"x":[', b"[]", b"]}")),
    "things that are not served": (CHAT, _filled(TURN + b',"tools":[', b"[]", b"]}")),
    "lists before a number that is none": (CHAT, _filled(b'{"messages":[', b"[]", b",NaN]}")),
    "half a character at the end": (TEXT, _text(b'{"prompt":"', b"\\u00e9", b'\\ud800"}')),
    "the same key": (CHAT, _filled(b"{", b'"messages":[]', b"}")),
    "a text of one letter": (TEXT, _text(b'{"prompt":"', b"a", b'"}')),
    "a text of spaces": (TEXT, _text(b'{"prompt":"', b" ", b'"}')),
    "escaped zeros": (TEXT, _text(b'{"prompt":"', b"\\u0000", b'"}')),
    "a message of signs": (CHAT, _text(b'{"messages":[{"role":"user","content":"', b"<", b'"}]}')),
    "a message of control tokens": (
        CHAT,
        _text(b'{"messages":[{"role":"user","content":"', b"<|im_start|>", b'"}]}'),
    ),
    "words to count": ("/tokenize", _text(b'{"prompt":"', b"word ", b'"}')),
    "characters to count": ("/tokenize", _text(b'{"prompt":"', "日本 ß😀".encode(), b'"}')),
    "a megabyte to name": ("/tokenize", _text(b'{"return_token_strs":true,"prompt":"', b"ab ", b'"}', 1 << 20)),
    "a conversation to count": ("/tokenize", _text(b'{"messages":[{"role":"user","content":"', b"<|im_", b'"}]}')),
}
