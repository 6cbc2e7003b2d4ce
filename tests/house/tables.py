"""The README's tables as the code has them. `python -m tests.house.tables` writes them into it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click

from jaxserve import errors
from jaxserve.cli import cli
from jaxserve.config import config_table
from jaxserve.server.openai import TABLE

README = Path(__file__).resolve().parents[2] / "README.md"


def commands_table() -> str:
    """Every command with the first sentence of its help."""
    rows = (f"| `{name}` | {text} |" for name, text in _commands(cli, "jaxserve"))
    return "\n".join(["| Command | Does |", "|---|---|", *rows]) + "\n"


def _commands(command: click.Command, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(command, click.Group):
        for word, subcommand in sorted(command.commands.items()):
            yield from _commands(subcommand, f"{name} {word}")
    else:
        arguments = [parameter for parameter in command.params if isinstance(parameter, click.Argument)]
        words = [argument.make_metavar(click.Context(command)) for argument in arguments]
        yield " ".join([name, *words]), command.get_short_help_str(limit=200)


def errors_table() -> str:
    """Every error: code, HTTP status, exit code, meaning."""
    lines = ["| Code | HTTP | Exit | Means |", "|---|---|---|---|"]
    for cls in vars(errors).values():
        if inspect.isclass(cls) and issubclass(cls, errors.JaxserveError) and cls is not errors.JaxserveError:
            status = TABLE[cls].status if TABLE[cls].public else "-"
            exit_code = cls.exit_code if cls.exit_code != 1 else "-"
            meaning = (inspect.getdoc(cls) or "").split("\n")[0].replace("``", "`")
            lines.append(f"| `{cls.code}` | {status} | {exit_code} | {meaning} |")
    return "\n".join(lines) + "\n"


TABLES = {"Commands": commands_table, "Settings": config_table, "Errors": errors_table}


def table(text: str, heading: str) -> str:
    """The table below a heading."""
    part = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return "\n".join(line for line in part.splitlines() if line.startswith("|")) + "\n"


def with_tables(text: str) -> str:
    """The README with all tables as they should be."""
    for heading, render in TABLES.items():
        text = text.replace(table(text, heading), render(), 1)
    return re.sub(r"\n{3,}", "\n\n", text)


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text()))
