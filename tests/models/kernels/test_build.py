from __future__ import annotations

import ctypes
import sys
import tomllib

import pytest

from jaxserve.models.kernels import build as subject
from jaxserve.models.kernels.build import BuildError, build, library, main

PROGRAM = "import sys; print('some words'); print('cpu.cc:1: error: no such thing', file=sys.stderr); sys.exit(1)"


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An empty place for the library."""
    monkeypatch.setattr(subject, "library", lambda: tmp_path / "cpu-0.so")
    monkeypatch.setattr(subject, "SOURCE", tmp_path / "cpu.cc")
    return tmp_path


@pytest.fixture
def failing(tmp_path):
    """A compiler that finds fault."""
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!{sys.executable}\n{PROGRAM}\n")
    compiler.chmod(0o755)
    return str(compiler)


def test_the_name_tells_what_it_was_built_from(monkeypatch):
    here = library()
    assert here.parent == subject.SOURCE.parent
    library.cache_clear()
    monkeypatch.setattr(subject, "FLAGS", (*subject.FLAGS, "-O1"))
    try:
        assert library().name != here.name
    finally:
        library.cache_clear()


def test_without_a_compiler_it_says_so(elsewhere, capsys):
    with pytest.raises(BuildError, match=r"no C\+\+ compiler \(nobody\)"):
        build("nobody")
    assert main(["--compiler", "nobody"]) == 1
    assert main(["--compiler", "nobody", "--optional"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told == ["native kernels are not built: there is no C++ compiler (nobody); XLA's own products are used"] * 2
    assert not list(elsewhere.iterdir())


def test_a_compiler_that_fails_leaves_nothing(elsewhere, failing):
    with pytest.raises(BuildError, match=r"compiler fails: cpu\.cc:1: error: no such thing"):
        build(failing)
    assert [path.name for path in elsewhere.iterdir()] == ["compiler"]


def test_one_that_takes_too_long_is_given_up(elsewhere, failing, monkeypatch):
    monkeypatch.setattr(subject, "SECONDS", 0.001)
    with pytest.raises(BuildError, match="takes longer"):
        build(failing)


def test_other_processors_are_told(elsewhere, monkeypatch):
    monkeypatch.setattr(subject.platform, "machine", lambda: "aarch64")
    with pytest.raises(BuildError, match="this is linux on aarch64"):
        build()


def test_a_folder_that_cannot_be_written_to(elsewhere, failing, monkeypatch):
    monkeypatch.setattr(subject, "SOURCE", elsewhere / "nowhere" / "cpu.cc")
    with pytest.raises(BuildError, match="cannot be written to"):
        build(failing)


@pytest.mark.skipif(not library().exists(), reason="no library was built here")
def test_what_is_there_is_not_built_again(capsys):
    assert main(["--compiler", "nobody"]) == 0
    assert capsys.readouterr().out == f"native kernels: {library()}\n"
    symbols = ctypes.CDLL(str(library()))
    assert symbols.jaxserve_grouped
    assert symbols.jaxserve_forms


def test_the_package_ships_the_source():
    """And not the library, which is of one jaxlib."""
    package = subject.SOURCE.parents[2]
    settings = tomllib.loads((package.parent / "pyproject.toml").read_text())
    shipped = settings["tool"]["setuptools"]["package-data"]["jaxserve"]
    assert [package / name for name in shipped if name.endswith(".cc")] == [subject.SOURCE]
    assert "*.so" in (package.parent / ".gitignore").read_text().splitlines()
