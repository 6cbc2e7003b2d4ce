"""Errors: each explains itself, has a word of its own, and ends a process as its kind should."""

from __future__ import annotations

import inspect

import pytest

from jaxserve import errors

CLASSES = [cls for cls in vars(errors).values() if inspect.isclass(cls) and issubclass(cls, errors.JaxserveError)]


def test_each_explains_itself():
    assert [cls.__name__ for cls in CLASSES if "__doc__" not in vars(cls)] == []


def test_codes_differ():
    codes = [cls.code for cls in CLASSES]
    assert sorted(set(codes)) == sorted(codes)


@pytest.mark.parametrize("cls", CLASSES)
def test_one_sentence_and_what_it_is_about(cls):
    error = cls("a sentence")
    assert (str(error), error.message) == ("a sentence", "a sentence")
    assert error.exit_code > 0
    if not issubclass(cls, errors.Unavailable):
        named = cls("a sentence", param="setting", code="word")
        assert (named.param, named.code) == ("setting", "word")
        assert cls.code != "word"


def test_what_stops_a_process_says_how():
    assert {cls.exit_code for cls in CLASSES if issubclass(cls, errors.ConfigError | errors.CheckpointError)} == {78}
    assert errors.SourceUnavailable("x").exit_code == 69


def test_unavailable_says_when_to_come_back():
    assert errors.Overloaded("full").retry_after == 1.0
    assert errors.Overloaded("full", retry_after=7.5).retry_after == 7.5
