"""The README's tables as the code has them. `python -m tests.house.tables` writes them into it."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path

import click

from jaxserve import errors
from jaxserve.cli import cli
from jaxserve.config import config_table
from jaxserve.server.openai import TABLE
from tests.house.matrix import support_table

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


# What each rig tries: its make target, and the gate that decides its exit status.
GATES = {
    "simulate": "10,000 histories of the engine on a device that is a hash: 0 violations; planted leaks are found",
    "faults": "F1 to F35, staged on the real server: others' tokens stay identical",
    "poison": "one poisoned request among 16, in each phase of its life: 15 of 15 others identical",
    "cancels": "10,000 cancels and disconnects: no slot, descriptor, task or thread is left",
    "drain": "SIGTERM in 32 streams, 20 times: no token lost, exit 0",
    "probes": "engine killed, stopped, hung, loop blocked: unready within 1 s, never wrongly dead; 50 ms at 4x load",
    "overload": "open loop at 4x: goodput 95 % of the peak, first token within 2x of that at 0.8x, refusals in 50 ms",
    "slow": "500 slow clients: 99 % of the others served, all of them gone 2 s after their limit, +20 MiB at most",
    "fuzz": "10,000 malformed requests: none answered with 500 or more, none later than 2 s, all in OpenAI's shape",
    "fuzz-parsers": "ten minutes each of damaged GGUF, safetensors, manifests, requests; less of 8 others: no crash",
    "corrupt": "200 bit flips, truncations and deletions: each refused before ready, the file named",
    "test-mesh": "every family on four meshes of eight: scores within 1e-5, an eighth of the bytes, no weight gathered",
    "memory": "2 GB in eight files, converted, restored on 1 and 8 devices: twice the largest tensor beside what stays",
    "flagship": "35 B parameters compiled for eight devices: bytes within 2 % of the plan; lowered for cuda and tpu",
    "soak": "30 minutes of everything: at most 1 MB per 1,000 requests, nothing compiled; a planted leak is found",
}
RESULTS = Path(__file__).resolve().parents[1] / "rigs" / "results"


def reliability_table() -> str:
    """Every rig with its gate and the last result that was kept."""
    lines = ["| `make` | What must hold | Seen |", "|---|---|---|"]
    for name, gate in GATES.items():
        path = RESULTS / f"{name.replace('-', '_')}.json"
        result = json.loads(path.read_text()) if path.exists() else None
        seen = "not measured yet" if result is None else ("" if result["held"] else "**broken:** ") + result["figure"]
        lines.append(f"| `{name}` | {gate} | {seen} |")
    return "\n".join(lines) + "\n"


TABLES = {
    "Commands": commands_table,
    "Settings": config_table,
    "Errors": errors_table,
    "Families": support_table,
    "Reliability": reliability_table,
}


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
