"""Rows of text under each other, for people and for pipes alike. Knows widths, not what is in them."""

from __future__ import annotations

from collections.abc import Sequence

import click


def print_columns(rows: Sequence[Sequence[str]]) -> None:
    """Prints rows of equally many cells, one row a line, however long it is."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
