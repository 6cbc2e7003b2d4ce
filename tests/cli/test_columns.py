"""Columns line up, and no row is cut or wrapped."""

from __future__ import annotations

from jaxserve.cli.columns import print_columns


def test_columns(capsys):
    print_columns([("A", "B"), ("aaa", "b"), ("a", "b" * 200)])
    assert capsys.readouterr().out == f"A    B\naaa  b\na    {'b' * 200}\n"
