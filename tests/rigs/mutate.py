"""Small damage to good input, drawn from a seed: to bytes, to trees of JSON, to the head of a request.

Knows what has broken parsers before. Knows no parser.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

INTERESTING = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 60, (1 << 63) - 1, 1 << 63)
# Written as they are into JSON: some are no JSON.
RAW_NUMBERS = (
    *("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" + "0" * 400, "-0", "01", "1.", ".5", "1e", "0x10", "+1"),
    *("9223372036854775808", "-9223372036854775809", "18446744073709551616", "1E400", "5e-324", "0.1e-400"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 2**31, 2**63, -(2**63), 10**30, 1e308, -1e308, 0.5, 1e-320),
    *("", " ", "a", "3", "nan", "null", "\0", "\ud800", "\udfff\ud800", "\ufeff", "\u202e", "ﷺ" * 500, "é" * 300),
    *("<|im_start|>system", "<|endoftext|>", "</s>", "{{7*7}}", "{% for i in range(9) %}x{% endfor %}"),
    *("''.__class__.__mro__", "../../etc/passwd", "a\r\nset-cookie: x", "http://127.0.0.1:1/", "x" * 5000, "${jndi:x}"),
    *([], {}, [[]], [{}], {"": None}, [None], ["a", 1, None], [1.5], [-1], {"type": "text"}, {"a": {"a": {"a": {}}}}),
)
_TOKENS = (
    b"\0",
    b"\xff",
    b"\xc0\x80",
    b"\xed\xa0\x80",
    b"[" * 2000,
    b'"' * 50,
    b"\\u0000",
    b"\\ud800",
    b"{}",
    b",",
    b":",
)


def mutate_bytes(draw: random.Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """``data`` with one to four small faults; ``others`` are there to be spliced in."""
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 3, 4))):
        draw.choice(_BYTEWISE)(draw, found, others)
    return bytes(found)


def _flip(draw: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    if data:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def _overwrite(draw: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    if data:
        data[draw.randrange(len(data))] = draw.choice((0, 1, 0x20, 0x22, 0x5B, 0x7B, 0x7F, 0x80, 0xFF))


def _number(draw: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    width = draw.choice((2, 4, 8))
    place = draw.randrange(max(len(data) - width, 1))
    value = draw.choice(INTERESTING) & ((1 << 8 * width) - 1)
    data[place : place + width] = value.to_bytes(width, draw.choice(("little", "big")))


def _cut(draw: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    place = draw.randrange(len(data) + 1)
    del data[place : place + draw.choice((1, 1, 2, 8, 100, len(data)))]


def _insert(draw: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    place = draw.randrange(len(data) + 1)
    data[place:place] = draw.choice((*_TOKENS, draw.randbytes(draw.randrange(1, 20))))


def _repeat(draw: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    place, width = draw.randrange(len(data) + 1), draw.choice((1, 4, 16, 64))
    data[place:place] = data[place : place + width] * draw.choice((1, 2, 10))


def _splice(draw: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    if others:
        other = draw.choice(others)
        data[draw.randrange(len(data) + 1) :] = other[draw.randrange(len(other) + 1) :]


_BYTEWISE: tuple[Callable[[random.Random, bytearray, Sequence[bytes]], None], ...] = (
    *(_flip, _flip, _overwrite, _overwrite, _number, _cut, _insert, _repeat, _splice),
)


# --- trees ------------------------------------------------------------------------------------------------------------


def mutate_tree(draw: random.Random, tree: Any, fields: Mapping[str, Any] = MappingProxyType({})) -> bytes:
    """JSON of ``tree`` with one to three nodes changed, or what is almost JSON.

    ``fields`` are keys to put in, each with a value of the type that it should have.
    """
    found = copy.deepcopy(tree)
    for _ in range(draw.choice((1, 1, 2, 3))):
        found = _change(draw, found, fields)
    text = json.dumps(found)
    if draw.random() < 0.15:
        text = text.replace(draw.choice(('"#raw"', "1", "null", "true")), draw.choice(RAW_NUMBERS), 1)
    if draw.random() < 0.1 and text.endswith("}"):
        key = draw.choice([*fields, "a"])
        text = text[:-1] + f',"{key}":{json.dumps(draw.choice(VALUES))},"{key}":{json.dumps(draw.choice(VALUES))}' + "}"
    depth = draw.choice((500, 1000, 2000, 50_000))
    text = text.replace('"#deep"', "[" * depth + "]" * depth)
    return text.replace('"#raw"', draw.choice(RAW_NUMBERS)).encode()


def _change(draw: random.Random, tree: Any, fields: Mapping[str, Any]) -> Any:
    """One change at a random node; a node near the root is the likelier."""
    if isinstance(tree, dict) and draw.random() < 0.85:
        if fields and draw.random() < 0.4:
            name = draw.choice(list(fields))
            return tree | {name: _value(draw, fields[name])}
        if tree:
            key = draw.choice(list(tree))
            return _changed_entry(draw, tree, key, fields)
    if isinstance(tree, list) and tree and draw.random() < 0.7:
        place = draw.randrange(len(tree))
        if draw.random() < 0.3:
            return draw.choice((tree * 40, tree[:place], tree + [_value(draw, tree)], [tree]))
        return [*tree[:place], _change(draw, tree[place], fields), *tree[place + 1 :]]
    return _value(draw, tree)


def _changed_entry(draw: random.Random, tree: dict[str, Any], key: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    kind = draw.random()
    if kind < 0.15:
        return {name: value for name, value in tree.items() if name != key}
    if kind < 0.25:
        other = draw.choice((key.upper(), key + " ", "", "x" * 300, "__class__", *fields))
        return {other if name == key else name: value for name, value in tree.items()}
    return tree | {key: _change(draw, tree[key], fields) if kind < 0.7 else _value(draw, tree[key])}


def _value(draw: random.Random, old: Any) -> Any:
    """Something that should not be there; as often as not of the type that should."""
    kind = draw.random()
    alike = [value for value in VALUES if type(value) is type(old)]
    if alike and kind > 0.5:
        return draw.choice(alike)
    if kind < 0.1:
        return "#raw"
    if kind < 0.2:
        return [old] if draw.random() < 0.5 else {"a": old}
    if kind < 0.25:
        nested: Any = old
        for _ in range(draw.choice((3, 50))):
            nested = [nested]
        return draw.choice((nested, "#deep"))
    if kind < 0.3 and isinstance(old, str):
        return old * draw.choice((2, 100, 2000))
    return draw.choice(VALUES)


# --- heads ------------------------------------------------------------------------------------------------------------

_LINES = (
    *("content-length: -1", "content-length: 1e3", "content-length: 99999999999999999999", "content-length: 5"),
    *("content-length: 5, 5", "content-length : 5", "transfer-encoding: chunked", "transfer-encoding: identity"),
    *("transfer-encoding: identity, chunked", "transfer-encoding:\tchunked", "transfer-encoding: xchunked"),
    *("host: y", "host:", "host: a b", "host: evil/../..", "HOST: x", "connection: upgrade\r\nupgrade: h2c"),
    *("connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: x", "expect: 100-continue", "expect: 200-ok"),
    *("content-type: text/plain", "content-type: application/json; charset=utf-16", "content-encoding: gzip"),
    *("accept: text/event-stream", "accept-encoding: gzip", "range: bytes=0-1", "x-request-id: a\0b", "x: \xff\xfe"),
    *(
        "authorization: Bearer x",
        "authorization: Bearer " + "x" * 9000,
        "cookie: " + "a=b; " * 500,
        "x-http-method: PUT",
    ),
    *(
        "x-forwarded-for: 127.0.0.1",
        "x-forwarded-host: y",
        "origin: http://evil",
        "te: trailers",
        "trailer: x",
        " folded",
    ),
    *("no colon", ": no name", "x\x01y: z", "x-request-id: \u202e", "content-length: 0x10", "content-length: +5"),
)
_FIRST = (*("GET", "get", "POST ", "BREW", "CONNECT", "TRACE", "HEAD", "OPTIONS", "PRI", "A" * 300, "P\0ST", ""),)
_TARGETS = (
    *("*", "http://x/livez", "//livez", "/livez?" + "a=b&" * 300, "/livez#x", "/%zz", "/%00", "/v1/../livez", "/\xff"),
    *("/v1/models/%2e%2e%2f", "/v1/models/" + "x" * 4000, "/v1/models/a%0d%0ab", "livez", "/ livez", "/?", "/%ff%fe"),
    *("/v1/models/toy;x", "/v1//models", "/v1/models/%F0%9F", "/" + "a/" * 300, "/v1/chat/completions/", "/LIVEZ"),
)
_VERSIONS = ("HTTP/1.1", "HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "HTTP/9.9", "HTTP", "XTTP/1.1", "HTTP/1.1 x", "")


def mutate_head(draw: random.Random, data: bytes) -> bytes:
    """A request with a fault or two in its head."""
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    for _ in range(draw.choice((1, 1, 2))):
        kind = draw.random()
        if kind < 0.55:
            lines.insert(draw.randrange(len(lines) + 1), draw.choice(_LINES))
        elif kind < 0.65 and lines:
            del lines[draw.randrange(len(lines))]
        elif kind < 0.7 and lines:
            lines.append(draw.choice(lines))
        else:
            words = (first.split(" ") + ["", ""])[:3]
            place, choices = draw.choice(((0, _FIRST), (1, _TARGETS), (2, _VERSIONS)))
            words[place] = draw.choice(choices)
            first = " ".join(words)
    end = draw.choice(("\r\n",) * 12 + ("\n", "\r", "\r\n\r\n"))
    text = end.join([first, *lines])
    return text.encode("latin-1", "replace") + draw.choice((b"\r\n\r\n",) * 9 + (b"\n\n",)) + body
