"""How every rig ends: its figure as the last line, its verdict as the exit status, its result in a file if asked."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax

RESULTS = Path(__file__).parent / "results"


def arguments(what: str | None, **more: dict[str, Any]) -> argparse.Namespace:
    """The flags of a rig: ``--quick``, ``--save``, and its own (name to ``add_argument``'s keywords)."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--quick", action="store_true", help="a small size, for a first look")
    parser.add_argument("--save", action="store_true", help="keep the result in tests/rigs/results/")
    for name, keywords in more.items():
        parser.add_argument("--" + name.replace("_", "-"), **keywords)
    return parser.parse_args()


def report(
    name: str, *, figure: str, held: bool, details: Mapping[str, Any] | None = None, save: bool = False
) -> NoReturn:
    """Says what was seen and ends the process, with 0 if it held.

    Args:
        name: the rig's own.
        figure: what was counted, in a few words: it stands in the README.
        details: every number behind the figure, and the seeds.
        save: keep it as ``results/<name>.json``.
    """
    if save:
        RESULTS.mkdir(exist_ok=True)
        result = {
            "rig": name,
            "figure": figure,
            "held": held,
            "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
            "python": platform.python_version(),
            "jax": jax.__version__,
            "details": dict(details or {}),
        }
        (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{'held' if held else 'BROKEN'}: {name}: {figure}", flush=True)
    sys.exit(not held)
