"""A module has one purpose and a function one thing to say: both stay short."""

from __future__ import annotations

import ast

MODULE_LINES = 400
FUNCTION_LINES = 60


def long_modules(modules: dict[str, str]) -> list[str]:
    return [f"{name}: {n}" for name, source in modules.items() if (n := source.count("\n")) >= MODULE_LINES]


def long_functions(modules: dict[str, str]) -> list[str]:
    return [
        f"{name}:{node.lineno} {node.name}: {lines}"
        for name, source in modules.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) >= FUNCTION_LINES
    ]


def headless_modules(modules: dict[str, str]) -> list[str]:
    return [name for name, source in modules.items() if source.strip() and not ast.get_docstring(ast.parse(source))]


def test_modules_are_short(modules):
    assert long_modules(modules) == []


def test_functions_are_short(modules):
    assert long_functions(modules) == []


def test_modules_say_what_they_know(modules):
    assert headless_modules(modules) == []


def test_the_measures_measure():
    body = "".join(f"    x = {i}\n" for i in range(FUNCTION_LINES - 2))
    planted = {"a.py": "def short():\n" + body, "b.py": "async def long():\n    y = 0\n" + body, "c.py": "\n" * 400}
    assert long_functions(planted) == ["b.py:1 long: 60"]
    assert long_modules(planted) == ["c.py: 400"]
    assert headless_modules(planted) == ["a.py", "b.py"]
