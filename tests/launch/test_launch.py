"""The README's notebook lines run as they stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house.test_documents import blocks

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.model
@pytest.mark.slow
def test_the_notebook_lines_run(smollm2, tmp_path, monkeypatch):
    (lines,) = blocks(README.read_text(), "python")
    tmp_path.joinpath("checkpoints").symlink_to(smollm2.parents[1])
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(lines, "README.md", "exec"), names)
    assert names["text"].startswith(" Paris.")
    first, second = names["answers"]
    assert len(first.tokens) == len(second.tokens) == 8
    assert names["logits"].shape == (1, len(names["prompt"]), 49_152)
