from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.text.control import AddedToken, ControlMatcher, end_of_turn_tokens

fixed = settings(derandomize=True, deadline=None, max_examples=200)
spellings = st.lists(st.text(alphabet="<|ab>", min_size=1, max_size=5), min_size=1, max_size=12, unique=True)


def matcher(*words: str, control: bool = True, **flags: bool) -> ControlMatcher:
    return ControlMatcher(AddedToken(token, word, control, **flags) for token, word in enumerate(words))


def plainly(words: list[str], text: str) -> list[str | int]:
    """Leftmost, longest; written as slowly as it is said."""
    parts: list[str | int] = []
    stretch = ""
    at = 0
    while at < len(text):
        found = [word for word in words if text.startswith(word, at)]
        if not found:
            stretch += text[at]
            at += 1
            continue
        if stretch:
            parts.append(stretch)
        word = max(found, key=len)
        parts.append(words.index(word))
        stretch, at = "", at + len(word)
    return [*parts, stretch] if stretch else parts


@fixed
@given(spellings, st.text(alphabet="<|ab> ", max_size=40))
def test_leftmost_longest(words, text):
    assert matcher(*words).split(text) == plainly(words, text)


@fixed
@given(spellings, st.text(alphabet="<|ab> ", max_size=40), st.data())
def test_nothing_covers_an_inert_position(words, text, data):
    inert = frozenset(data.draw(st.sets(st.integers(0, 40))))
    parts = matcher(*words).split(text, inert)
    assert "".join(words[part] if isinstance(part, int) else part for part in parts) == text
    at = 0
    for part in parts:
        length = len(words[part] if isinstance(part, int) else part)
        assert isinstance(part, str) or not inert & set(range(at, at + length))
        at += length


def test_a_refused_match_hides_no_other():
    assert matcher("<a<", "<b>").split("<a<b>", frozenset({1})) == ["<a", 1]


def test_white_space_goes_along():
    assert matcher("<x>", rstrip=True).split("a <x> \n\u3000b") == ["a ", 0, "b"]
    assert matcher("<x>", lstrip=True).split("a \n<x> b") == ["a", 0, " b"]
    assert matcher("<x>", lstrip=True, rstrip=True).split("<x> <x> ") == [0, 0]
    assert matcher("<x>", rstrip=True).split("<x>\x1c") == [0, "\x1c"], "a separator is no white space in Unicode"


def test_single_words():
    assert matcher("STOP", single_word=True).split("STOP xSTOP STOPx (STOP)") == [0, " xSTOP STOPx (", 0, ")"]


def test_words_that_are_no_control_tokens_stay_text_and_hide_what_they_cover():
    added = [AddedToken(0, "<a>", control=False), AddedToken(1, "a>b", control=True)]
    assert ControlMatcher(added).split("<a>b a>b") == ["<a>b ", 1]


def test_nothing_to_find():
    assert ControlMatcher([]).split("<|im_end|>") == ["<|im_end|>"]
    assert matcher("<x>").split("") == []


def test_many_tokens_of_one_kind_are_found_fast():
    words = [f"<unused{n}>" for n in range(6000)]
    text = "<unused" * 100_000 + "<unused5999>"
    assert matcher(*words).split(text) == ["<unused" * 100_000, 5999]


@pytest.mark.parametrize(
    ("controls", "ends"),
    [
        ({"<|im_start|>": 1, "<|im_end|>": 2}, (2,)),
        ({"<|end|>": 3, "<|user|>": 4}, (3,)),
        ({"<|end|>": 3, "<|return|>": 4, "<|call|>": 5}, (4, 5)),
        ({}, ()),
    ],
)
def test_end_of_turn(controls, ends):
    assert end_of_turn_tokens(controls) == ends
