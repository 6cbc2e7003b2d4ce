from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.text.bound import LengthBound

fixed = settings(derandomize=True, deadline=None, max_examples=300)
tokens = st.lists(st.text(alphabet="ab1 \n!é日", min_size=1, max_size=6).map(str.encode), min_size=1, max_size=20)


@fixed
@given(tokens, st.data())
def test_no_text_has_fewer_tokens_than_the_bound_says(vocabulary, data):
    drawn = data.draw(st.lists(st.sampled_from(vocabulary), max_size=30))
    assert LengthBound(vocabulary).at_least(b"".join(drawn)) <= len(drawn)


def test_the_bound_is_reached():
    assert LengthBound([b"abc", b"  "]).at_least(b"abc" * 10) == 10
    assert LengthBound([b"abc", b"  "]).at_least(b" " * 10) == 5


def test_classes_are_bounded_apart():
    bound = LengthBound([b" " * 100, b"abcd"])
    assert bound.at_least(b"abcd" * 50) == 50, "long tokens of spaces say nothing about letters"


def test_dropped_bytes_do_not_count():
    assert LengthBound([b"ab"], dropped=b"\x04").at_least(b"\x04" * 1000 + b"abab") == 2


def test_an_empty_text():
    assert LengthBound([b"a"]).at_least(b"") == 0
