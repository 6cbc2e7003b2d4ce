"""Strings that tokenizers disagree about, drawn from a seed.

Knows what has gone wrong elsewhere: numbers that are not ASCII digits, runs of mixed white space, joined emoji, text
that looks like a special token or like the vocabulary's own spelling, replacement characters, very long words.
"""

import json
import random
import string
from collections.abc import Callable
from pathlib import Path

FRAGMENTS: dict[str, list[str]] = json.loads((Path(__file__).parent / "fuzz_fragments.json").read_text("utf-8"))
STRAY_BYTES = (0x80, 0xC0, 0xE2, 0xF0, 0xFF, 0x41)
CONTROLS = (0, 1, 7, 8, 27, 28, 31, 127, 0x9B, 0xAD)
RANGES = (0x250, 0x3000, 0xD7FF, 0xFFFD, 0x1FFFF, 0x10FFFF)


def one_of(name: str) -> Callable[[random.Random], str]:
    """Draws from a list of fragments."""
    return lambda rng: rng.choice(FRAGMENTS[name])


def invalid(rng: random.Random) -> str:
    """Bytes that are no UTF-8, read with replacement characters."""
    text = rng.choice(FRAGMENTS["scripts"] + FRAGMENTS["emoji"]).encode()
    cut = bytearray(text)
    for _ in range(rng.randint(1, 3)):
        cut[rng.randrange(len(cut))] = rng.choice(STRAY_BYTES)
    return bytes(cut[: rng.randint(1, len(cut))]).decode("utf-8", "replace")


def control(rng: random.Random) -> str:
    """Control characters, NUL included."""
    return "".join(chr(rng.choice(CONTROLS)) for _ in range(rng.randint(1, 4)))


def long_word(rng: random.Random) -> str:
    """One word of up to 200 characters: a repeated syllable, random letters, or a run of one sign."""
    kind = rng.randrange(4)
    if kind == 0:
        return rng.choice(FRAGMENTS["syllables"]) * rng.randint(10, 40)
    if kind == 1:
        return "".join(rng.choices(string.ascii_letters, k=rng.randint(30, 120)))
    if kind == 2:
        return rng.choice("=-_.aA0 \n\t*é") * rng.randint(5, 80)
    return "".join(rng.choices(string.ascii_letters + string.digits + "+/", k=rng.randint(40, 100))) + "=="


def scattered(rng: random.Random) -> str:
    """Characters from anywhere in Unicode, surrogates left out."""
    points = (rng.choice(RANGES) for _ in range(rng.randint(1, 6)))
    return "".join(chr(point) for top in points if not 0xD800 <= (point := rng.randrange(top)) <= 0xDFFF)


def run_of_spaces(rng: random.Random) -> str:
    """White space of several kinds in a row."""
    return "".join(rng.choices(FRAGMENTS["spaces"], k=rng.randint(1, 4)))


KINDS: list[tuple[int, Callable[[random.Random], str]]] = [
    (6, lambda rng: " ".join(rng.choices(FRAGMENTS["words"], k=rng.randint(1, 6)))),
    (3, one_of("emoji")),
    (3, one_of("numbers")),
    (3, run_of_spaces),
    (2, one_of("special")),
    (2, one_of("code")),
    (3, one_of("scripts")),
    (2, one_of("punctuation")),
    (2, lambda rng: "".join(rng.choices(string.printable, k=rng.randint(1, 12)))),
    (1, invalid),
    (1, control),
    (1, long_word),
    (2, scattered),
]


def strings(seed: int, count: int) -> list[str]:
    """`count` different strings: the empty one, every fragment of the lists alone, then mixtures."""
    rng = random.Random(seed)
    found = dict.fromkeys(["", *(fragment for fragments in FRAGMENTS.values() for fragment in fragments)])
    weights, kinds = zip(*KINDS, strict=True)
    while len(found) < count:
        pieces = [kind(rng) for kind in rng.choices(kinds, weights, k=rng.randint(1, 4))]
        found[rng.choice(("", "", " ")).join(pieces)] = None
    return list(found)[:count]
