"""Lazy modules run when they are used, and only then."""

from __future__ import annotations

import sys

import pytest

from jaxserve.cli.lazy import lazy


@pytest.fixture
def module(tmp_path, monkeypatch) -> str:
    tmp_path.joinpath("lazily_loaded.py").write_text("import sys\nsys.lazily_loaded_ran = True\nanswer = 42\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "lazily_loaded_ran", False, raising=False)
    yield "lazily_loaded"
    sys.modules.pop("lazily_loaded", None)


def test_it_runs_when_used(module):
    loaded = lazy(module)
    assert sys.lazily_loaded_ran is False
    assert loaded.answer == 42
    assert sys.lazily_loaded_ran is True


def test_what_is_loaded_stays(module):
    assert lazy(module) is lazy(module)
    assert lazy("sys") is sys


def test_what_is_not_there_is_told():
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        lazy("no_such_module")
