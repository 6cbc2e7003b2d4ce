"""The tests mirror the package.

``jaxserve/a/b.py`` is tested by ``tests/a/test_b.py``, and its parts by ``tests/a/test_b_part.py``.
"""

from __future__ import annotations

from pathlib import PurePosixPath

ELSEWHERE = ("house/", "reference/", "rigs/")  # about the repository, other engines, the whole server
SHAPES_ONLY = {"server/wire.py"}  # types without behaviour; what reads and writes them is tested


def strays(tests: list[str], modules: list[str]) -> list[str]:
    """Test files that no module stands behind."""
    known = {module.removesuffix("/__init__.py").removesuffix(".py") for module in modules}
    return [test for test in tests if not test.startswith(ELSEWHERE) and not _subjects(test) & known]


def untested(tests: list[str], modules: dict[str, str]) -> list[str]:
    """Modules with code in them that no test file is named after."""
    subjects = {subject for test in tests for subject in _subjects(test)}
    names = {module: module.removesuffix("/__init__.py").removesuffix(".py") for module in modules}
    return [module for module, name in names.items() if "def " in modules[module] and name not in subjects]


def _subjects(test: str) -> set[str]:
    """What a test file may be about: ``a/b_c`` or ``a/b`` for ``a/test_b_c.py``, ``a`` for ``a/test_a.py``."""
    path = PurePosixPath(test)
    words = path.stem.removeprefix("test_").split("_")
    subjects = {(path.parent / "_".join(words[: n + 1])).as_posix() for n in range(len(words))}
    return subjects | ({path.parent.as_posix()} if words[0] == path.parent.name else set())


def test_every_test_has_a_module(root, modules):
    tests = [path.relative_to(root / "tests").as_posix() for path in root.joinpath("tests").rglob("test_*.py")]
    assert strays(tests, list(modules)) == []


def test_every_module_has_a_test(root, modules):
    tests = [path.relative_to(root / "tests").as_posix() for path in root.joinpath("tests").rglob("test_*.py")]
    assert set(untested(tests, modules)) - SHAPES_ONLY == set()


def test_the_mirror_shows():
    modules = {
        "a/b.py": "\ndef f(): ...",
        "a/__init__.py": "\ndef f(): ...",
        "a/c.py": "x = 1",
        "d_e.py": "\ndef f(): ...",
    }
    assert strays(["a/test_b.py", "a/test_b_fast.py", "a/test_a.py", "test_d_e.py"], list(modules)) == []
    assert strays(["a/test_x.py", "test_b.py", "house/test_x.py"], list(modules)) == ["a/test_x.py", "test_b.py"]
    assert untested(["a/test_b_fast.py", "test_d.py"], modules) == ["a/__init__.py", "d_e.py"]
