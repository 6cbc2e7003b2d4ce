from __future__ import annotations

import inspect

from jaxserve import errors


def classes() -> list[type[errors.JaxserveError]]:
    return [one for _, one in inspect.getmembers(errors, inspect.isclass) if issubclass(one, errors.JaxserveError)]


def test_every_class_has_a_code_of_its_own():
    codes = [one.code for one in classes()]
    assert len(codes) == len(set(codes))


def test_an_error_says_what_and_where():
    error = errors.InvalidRequest("top_p must be at most 1", param="top_p", code="too_large")
    assert (str(error), error.param, error.code) == ("top_p must be at most 1", "top_p", "too_large")
    assert errors.InvalidRequest("x").code == "invalid_value"
    assert errors.Overloaded("full", retry_after=2.5).retry_after == 2.5


def test_configuration_and_checkpoints_exit_as_such():
    assert {one.exit_code for one in classes() if issubclass(one, errors.CheckpointError | errors.ConfigError)} == {78}
