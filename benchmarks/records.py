"""Records to JSON: a small, exact task, to train and to measure the tiny block-diffusion model with.

Knows the records, their wording, which of them are held out, and how drafts are corrupted. It does not know a model.

A record is held out if a hash of its names and its city says so, so training never sees that person in that city:
with the same words, the combination is always new.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import string
from collections.abc import Iterator
from itertools import islice


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FIRST = _words(
    "Alice Boris Carol David Elena Frank Grace Heidi Ivan Judy Kevin Laura Mario Nina Oscar Peggy "
    "Quentin Ruth Simon Teresa Ursula Victor Wendy Xavier Yvonne Zach Amber Bruno Clara Dmitri Felix Hugo"
)
LAST = _words(
    "Adams Baker Clark Dixon Evans Fisher Garcia Hansen Irwin Jones Keller Lopez Miller Novak Olsen Perez "
    "Quinn Rossi Silva Turner Ulrich Vogel Weber Xu Young Zhang Brown Cruz Dubois Ferrari Kovacs Sato"
)
CITIES = _words("Paris Berlin Tokyo Lima Cairo Oslo Delhi Quito Athens Bogota Dublin Hanoi Madrid Nairobi Seoul Vienna")
AGES = range(18, 80)
CONSONANTS = _words("l m n r s t d k b f g h j p v w z c q x sh ch th st tr br")
VOWELS = _words("a e i o u y ai ou")
LONGEST = 7  # letters of a word

HELD_OUT = 10  # one of so many
PRINTABLE = "".join(map(chr, range(0x20, 0x7F)))


@dataclasses.dataclass(frozen=True)
class Record:
    """One person: what is asked and what is right."""

    first: str
    last: str
    age: int
    city: str

    @property
    def question(self) -> str:
        """What a user writes."""
        return f"{self.first} {self.last}, {self.age}, {self.city}"

    @property
    def answer(self) -> str:
        """The JSON that is right, to the letter."""
        mail = f"{self.first}.{self.last}@{self.city}.org".lower()
        name = f"{self.first} {self.last}"
        return json.dumps({"name": name, "age": self.age, "city": self.city, "mail": mail})

    @property
    def held_out(self) -> bool:
        """Training must not see it."""
        digest = hashlib.sha256(f"{self.first} {self.last} {self.city}".encode()).digest()
        return digest[0] % HELD_OUT == 0


def records(seed: int, *, held_out: bool, strange: float = 0.0) -> Iterator[Record]:
    """Records without end, the same for the same seed, held out or for training.

    Args:
        strange: how often a name or a city is made up, of syllables that nobody need have seen together.
    """
    draw = random.Random(seed)

    def word(known: tuple[str, ...]) -> str:
        return _made_up(draw) if strange and draw.random() < strange else draw.choice(known)

    while True:
        record = Record(word(FIRST), word(LAST), draw.choice(AGES), word(CITIES))
        if record.held_out == held_out:
            yield record


def _made_up(draw: random.Random) -> str:
    """A capitalised word of 3 to 7 letters that can be pronounced, more or less."""
    syllables = (draw.choice(CONSONANTS) + draw.choice(VOWELS) for _ in range(draw.randint(2, 3)))
    return ("".join(syllables) + draw.choice(("", *CONSONANTS[:8]))).capitalize()[:LONGEST]


def held_out(count: int = 500) -> list[Record]:
    """The records to measure with: always the same ones, all different."""
    found: dict[Record, None] = {}
    for record in records(0, held_out=True):
        found[record] = None
        if len(found) == count:
            return list(found)
    raise AssertionError("there is always another record")


def strangers(count: int = 200) -> list[Record]:
    """Held-out records of which every name and city is made up: has a model learnt to copy, or only words?"""
    return list(islice(records(0, held_out=True, strange=1.0), count))


def corrupted(text: str, count: int, seed: int) -> tuple[str, tuple[int, ...]]:
    """A draft with ``count`` of its characters replaced by others, and where they are.

    A letter becomes another letter and a digit another digit, which nothing but the question can tell from the right
    one; anything else becomes any other printable character.
    """
    draw = random.Random(f"{seed} {text}")
    places = tuple(sorted(draw.sample(range(len(text)), count)))
    letters = list(text)
    for at in places:
        letters[at] = draw.choice([other for other in kind(text[at]) if other != text[at]])
    return "".join(letters), places


def kind(character: str) -> str:
    """Those like it: digits, small or capital letters; all that can be printed for any other."""
    kinds = (string.digits, string.ascii_lowercase, string.ascii_uppercase)
    return next((one for one in kinds if character in one), PRINTABLE)
