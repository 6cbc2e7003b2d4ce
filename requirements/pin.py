"""Writes this folder's constraint file for the interpreter that runs it: the newest release of everything, by name.

The file holds ``name==version`` lines only: no address, no path, no hash, so that it serves any index or mirror.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def resolve() -> list[str]:
    """What pip would install for the package and its developers into an empty environment, as sorted lines."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        report = Path(folder, "report.json")
        pip = [str(Path(folder, "bin", "python")), "-m", "pip"]
        options = ["--dry-run", "--ignore-installed", "--report", str(report)]
        subprocess.run([*pip, "install", *options, f"{FOLDER.parent}[dev,rigs]"], check=True)
        items = [item["metadata"] for item in json.loads(report.read_text())["install"] if not item["is_direct"]]
    return sorted((f"{item['name']}=={item['version']}" for item in items), key=str.lower)


def main() -> None:
    """Writes ``py311.txt``, ``py312.txt`` or ``py313.txt``."""
    major, minor = sys.version_info[:2]
    Path(FOLDER, f"py{major}{minor}.txt").write_text("\n".join(resolve()) + "\n")


if __name__ == "__main__":
    main()
