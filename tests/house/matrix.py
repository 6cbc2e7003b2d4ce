"""Which families are tested in which ways: read from a run of the tests, kept in support.json, shown in the README.

A test that shows something of a family says so with the fixture ``supports``; `make matrix` runs these tests and then
`python -m tests.house.matrix REPORT...`, the reports being pytest's JUnit files. A run in which one of them fails
changes nothing; one that is skipped, because a model is not there, says nothing. What no test says is untested. The
meshes of eight devices are a rig's affair, whose kept result says which families it tried.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

FILE = Path(__file__).with_name("support.json")
MESHES = Path(__file__).resolve().parents[1] / "rigs" / "results" / "test_mesh.json"
FAMILIES = Path(__file__).resolve().parents[2] / "jaxserve" / "models"
UNTESTED = "untested"
VALUES = ("tested", "refused")
# What a cell of each column means.
COLUMNS = {
    "Hugging Face": "its files, as transformers or a hub writes them, become the model's leaves",
    "GGUF": "the same of llama.cpp's files",
    "whole pass": "logits of the uncached pass are those of transformers, within 1e-4 in float32",
    "chunks": "the same after prompts read in padded chunks, in at least three ways",
    "steps": "the same at every single cached step; greedy tokens are the same",
    "blocks": "texts that are filled in block by block are another implementation's at every pass",
    "engine": "requests in company get the tokens that they get alone",
    "8 devices": "sharded over meshes of 8 devices as unsharded, within 1e-5",
    "FP8": "files with 8-bit floats in blocks of 128 x 128, packed in memory",
    "MXFP4": "files with 4-bit floats in blocks of 32, packed in memory",
    "real weights": "a trained model gives another engine's numbers",
}


def families() -> list[str]:
    """Every family that can be read: a ``model_type`` of ``config.json``."""
    return sorted(path.stem for path in FAMILIES.glob("*.py") if "\ndef family(" in path.read_text())


def found(*reports: Path) -> dict[str, dict[str, str]]:
    """What the tests of a run, or of its parts, showed: family, column, value.

    Raises:
        SystemExit: a test that failed, or one that says what has no place in the table.
    """
    seen: dict[str, dict[str, str]] = {}
    known = set(families())
    for case in (case for report in reports for case in ElementTree.parse(report).getroot().iter("testcase")):
        name = f"{case.get('classname')}::{case.get('name')}"
        if any(case.find(kind) is not None for kind in ("failure", "error")):
            raise SystemExit(f"{name} did not pass")
        if case.find("skipped") is not None:
            print(f"{name} was skipped")
            continue
        for entry in case.iter("property"):
            if entry.get("name") != "supports":
                continue
            family, column, value = str(entry.get("value")).split("|")
            if family not in known or column not in COLUMNS or value not in VALUES:
                raise SystemExit(f"{name} says {entry.get('value')!r}, which has no place in the table")
            if seen.setdefault(family, {}).setdefault(column, value) != value:
                raise SystemExit(f"{name} contradicts another test on {column} of {family}")
    return {family: dict(sorted(seen[family].items())) for family in sorted(seen)}


def render(support: dict[str, dict[str, str]]) -> str:
    """The table in Markdown."""
    lines = [f"| `model_type` | {' | '.join(COLUMNS)} |", "|---|" + "---|" * len(COLUMNS)]
    for family in families():
        cells = (support.get(family, {}).get(column, UNTESTED) for column in COLUMNS)
        lines.append(f"| `{family}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def on_meshes(result: Path = MESHES) -> list[str]:
    """Families that the rig found to be right on all of its four meshes."""
    kept = json.loads(result.read_text()) if result.exists() else {"held": False}
    return kept["details"]["models"] if kept["held"] and len(kept["details"]["meshes"]) == 4 else []


def support_table() -> str:
    """The table of what was kept."""
    support = json.loads(FILE.read_text())
    for family in on_meshes():
        support.setdefault(family, {})["8 devices"] = "tested"
    return render(support)


def main(*reports: str) -> None:
    """Keeps what a run showed."""
    FILE.write_text(json.dumps(found(*map(Path, reports)), indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
