"""The catalogue that ships is well formed; one that is not is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.checkpoint.catalog import read_catalog
from jaxserve.errors import CheckpointError

SHIPPED = Path(__file__).parents[2] / "checkpoints" / "catalog.yaml"


def test_the_shipped_catalogue():
    catalog = read_catalog(SHIPPED)
    assert set(catalog) >= {"smollm2-135m-instruct", "gemma3-270m"}
    default = catalog["smollm2-135m-instruct"]
    assert not default.licence.accept
    assert default.target.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    for name, entry in catalog.items():
        assert entry.about
        assert any(wheel.texts for wheel in entry.wheels), f"{name} comes without its licence's text"
        assert sum(wheel.part is not None for wheel in entry.wheels) > 0
        assert not entry.licence.accept or entry.licence.terms


GOOD = """
a:
  about: x
  model_type: llama
  licence: {name: MIT}
  target: {name: a.gguf, bytes: 10, sha256: SHA}
  wheels: [{package: p, version: "1", sha256: SHA, part: p/a}]
""".replace("SHA", "a" * 64)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("a:\n  about", "../a:\n  about"),
        ("about: x", "about: x\n  sampling: {heat: 1}"),
        ("bytes: 10", "bytes: 0"),
        ("sha256: aa", "sha256: zz"),
        ("name: a.gguf", "name: ../a.gguf"),
        ("package: p", "package: p --index x"),
        ('version: "1"', 'version: "1; evil"'),
        ("licence: {name: MIT}", "licence: {name: MIT, accepted: true}"),
        ("wheels: [", "wheels: [] #"),
        ("about: x", "about: [x"),
        ("about: x", "about: !!python/object/apply:os.system [x]"),
    ],
)
def test_what_is_malformed_is_refused(tmp_path, old, new):
    path = tmp_path / "catalog.yaml"
    path.write_text(GOOD)
    assert read_catalog(path)["a"].target.bytes == 10
    assert old in GOOD
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(CheckpointError, match=r"catalog\.yaml"):
        read_catalog(path)


def test_an_absent_catalogue_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"catalog\.yaml cannot be opened"):
        read_catalog(tmp_path / "catalog.yaml")
