"""What is declared is used, what is used is declared, and the pins are names and versions that fit it."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

WITHOUT_IMPORT = {"httptools": "parses HTTP in uvicorn", "uvloop": "runs uvicorn's event loop"}
PINS = ("py311.txt", "py312.txt", "py313.txt")


@pytest.fixture(scope="module")
def project(root) -> dict:
    return tomllib.loads(root.joinpath("pyproject.toml").read_text())["project"]


def imported(modules: dict[str, str]) -> set[str]:
    """The distributions that the package imports from."""
    nodes = [node for source in modules.values() for node in ast.walk(ast.parse(source))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    known = importlib.metadata.packages_distributions()
    tops = {"google.protobuf" if name.startswith("google.protobuf") else name.partition(".")[0] for name in names}
    foreign = tops - set(sys.stdlib_module_names) - {"jaxserve", ""}
    special = {
        "google.protobuf": ["protobuf"],
        "orbax": ["orbax-checkpoint"],
    }  # folders that several distributions share
    return {canonicalize_name((special.get(top) or known.get(top) or [top])[0]) for top in foreign}


def declared(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(requirement).name) for requirement in requirements}


def test_what_is_used_is_declared(modules, project):
    assert imported(modules) - declared(project["dependencies"]) == set()


def test_what_is_declared_is_used(modules, project):
    assert declared(project["dependencies"]) - imported(modules) - set(WITHOUT_IMPORT) == set()


@pytest.mark.parametrize("name", PINS)
def test_pins_are_names_and_versions_that_fit(root, project, name):
    lines = root.joinpath("requirements", name).read_text().splitlines()
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line)] == []
    pins = {canonicalize_name(line.partition("==")[0]): line.partition("==")[2] for line in lines}
    extras = project["optional-dependencies"]
    requirements = map(Requirement, [*project["dependencies"], *extras["dev"], *extras["rigs"]])
    unfit = [str(r) for r in requirements if pins.get(canonicalize_name(r.name), "") not in r.specifier]
    assert unfit == []


def test_there_is_a_pin_file_for_each_python(root, project):
    versions = re.findall(r"Python :: 3\.(\d+)$", "\n".join(project["classifiers"]), re.M)
    assert sorted(path.name for path in Path(root, "requirements").glob("*.txt")) == [f"py3{v}.txt" for v in versions]


def test_the_search_finds():
    planted = {"a.py": "import os, jax.numpy\nfrom yaml import load\nfrom google.protobuf.message import Message\n"}
    assert imported(planted) == {"jax", "pyyaml", "protobuf"}
