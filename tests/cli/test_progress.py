"""Progress: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from jaxserve.cli.progress import ProgressBars, amount


@pytest.mark.parametrize(
    ("done", "total", "text"),
    [(3, 12, "3/12"), (0, 0, "0"), (7, 0, "7"), (1_250_000, 97_600_000, "1.2/97.6 MB")],
)
def test_amount(done, total, text):
    assert amount(done, total) == text


def report(console: Console) -> None:
    with ProgressBars(console) as progress:
        for done in range(4):
            progress("verify", done, 3)
        progress("verify", 3, 3)
        progress("compile", 0, 2)
        progress("compile", 2, 2)
        progress("wait", 5, 0)


def test_lines_where_nobody_watches():
    console = Console(file=io.StringIO())
    report(console)
    assert console.file.getvalue().split("\n") == [
        "verify 0/3",
        "verify 3/3",
        "compile 0/2",
        "compile 2/2",
        "wait 5",
        "",
    ]


def test_bars_on_a_terminal():
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    report(console)
    text = console.file.getvalue()
    assert "━" in text
    assert "3/3" in text
    assert "2/2" in text
