"""Where torch and transformers are there, the committed goldens are computed again from the committed files."""

import importlib
from pathlib import Path

import numpy as np
import pytest

from tests.reference.test_data import CASES, HERE, golden, read

pytest.importorskip("torch")
pytest.importorskip("transformers")
make_tiny = importlib.import_module("tests.reference.make_tiny")
make_rope = importlib.import_module("tests.reference.make_rope")
make_sampling = importlib.import_module("tests.reference.make_sampling")

pytestmark = [pytest.mark.reference, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("case", CASES)
def test_tiny(case: str) -> None:
    expected = golden(case)
    found = make_tiny.goldens(HERE / "tiny" / case, make_tiny.CASES[case])
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=5e-5, err_msg=name)


def test_every_case_is_there() -> None:
    assert sorted(make_tiny.CASES) == CASES


def test_rope() -> None:
    expected = read(HERE / "oracle.json")
    assert [entry["name"] for entry in expected["frequencies"]] == list(make_rope.CASES)
    for entry in expected["frequencies"]:
        found = make_rope.frequencies(entry["config"], entry["length"], entry["layer_type"])
        np.testing.assert_allclose(found["inv_freq"], entry["inv_freq"], rtol=1e-6, err_msg=entry["name"])
        assert found["attention_factor"] == pytest.approx(entry["attention_factor"])
    for found, entry in zip(make_rope.rotations(), expected["rotations"], strict=True):
        np.testing.assert_allclose(found["after"], entry["after"], rtol=0, atol=1e-4)


def test_sampling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_sampling, "FILE", tmp_path / "sampling.npz")
    make_sampling.main()
    with np.load(HERE / "sampling.npz") as expected, np.load(tmp_path / "sampling.npz") as found:
        for name in expected:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-6, err_msg=name)
