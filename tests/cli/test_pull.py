"""``jaxserve pull``: what it asks of the store and the catalogue, and what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve import cli
from jaxserve.checkpoint.store import Store

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def store(tmp_path, monkeypatch) -> Store:
    monkeypatch.setenv("JAXSERVE_CHECKPOINTS__ROOT", str(tmp_path / "checkpoints"))
    monkeypatch.setenv("JAXSERVE_CHECKPOINTS__CATALOG", str(ROOT / "checkpoints" / "catalog.yaml"))
    return Store(tmp_path / "checkpoints")


def test_pull_a_folder_once(capsys, store, toy_source):
    assert cli.run(["pull", str(toy_source)]) == 0
    version = store.current("toy")
    output = capsys.readouterr()
    assert output.out == f"toy {version}: pulled, in {store.path('toy')}.\n"
    assert "convert" in output.err
    assert "goldens 1/1" in output.err
    assert store.path("toy").joinpath("goldens.json").is_file()
    assert cli.run(["pull", str(toy_source), "--name", "toy"]) == 0
    assert capsys.readouterr().out == f"toy {version}: already there, in {store.path('toy')}.\n"
    assert store.versions("toy") == [version]


def test_the_served_model_is_pulled_unless_another_is_named(capsys, store):
    assert cli.run(["pull", "--model", "no-such-model"]) == 78
    assert "'no-such-model' is no model of the catalogue" in capsys.readouterr().err


def test_terms_have_to_be_accepted(capsys, store):
    assert cli.run(["pull", "gemma3-270m"]) == 78
    assert "Gemma Terms of Use" in capsys.readouterr().err
    assert store.models() == []


def test_a_catalogue_that_is_not_there(capsys, store, monkeypatch, tmp_path):
    monkeypatch.setenv("JAXSERVE_CHECKPOINTS__CATALOG", str(tmp_path / "no.yaml"))
    assert cli.run(["pull"]) == 78
    assert str(tmp_path / "no.yaml") in capsys.readouterr().err
