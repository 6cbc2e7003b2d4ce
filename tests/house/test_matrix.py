"""The support matrix says what tests showed, and nothing else."""

from __future__ import annotations

import json

import pytest

from tests.house.matrix import COLUMNS, FILE, MESHES, UNTESTED, VALUES, families, found, on_meshes, render


def report(tmp_path, *cases: tuple[str, str]):
    """A report of tests: what each says, and what became of it."""
    path = tmp_path / "report.xml"
    tests = "".join(
        f'<testcase classname="t" name="n"><properties><property name="supports" value="{said}"/></properties>'
        f"{fate}</testcase>"
        for said, fate in cases
    )
    path.write_text(f"<testsuites><testsuite>{tests}</testsuite></testsuites>")
    return path


def test_what_was_kept_has_a_place_in_the_table():
    kept = json.loads(FILE.read_text())
    assert kept.keys() <= set(families())
    assert {column for cells in kept.values() for column in cells} <= set(COLUMNS)
    assert {value for cells in kept.values() for value in cells.values()} <= set(VALUES)


def test_what_passed_is_tested_and_the_rest_is_not(tmp_path):
    seen = found(report(tmp_path, ("llama|steps|tested", ""), ("qwen3|GGUF|refused", "")))
    assert seen == {"llama": {"steps": "tested"}, "qwen3": {"GGUF": "refused"}}
    rows = {row.split("`")[1]: row for row in render(seen).splitlines()[2:]}
    assert rows.keys() == set(families())
    assert rows["llama"].count(UNTESTED) == len(COLUMNS) - 1
    assert rows["mistral"].count(UNTESTED) == len(COLUMNS)


def test_what_was_skipped_says_nothing(tmp_path):
    assert found(report(tmp_path, ("llama|steps|tested", "<skipped/>"))) == {}


def test_meshes_count_where_all_of_them_held(tmp_path):
    result = tmp_path / "result.json"
    assert on_meshes(result) == []
    for held, meshes, expected in ((True, 4, ["llama"]), (False, 4, []), (True, 1, [])):
        details = {"models": ["llama"], "meshes": ["2x4"] * meshes}
        result.write_text(json.dumps({"held": held, "details": details}))
        assert on_meshes(result) == expected
    assert set(on_meshes(MESHES)) <= set(families())


@pytest.mark.parametrize("fate", ["<failure/>", "<error/>"])
def test_a_run_that_is_not_whole_says_nothing(tmp_path, fate):
    with pytest.raises(SystemExit, match="did not pass"):
        found(report(tmp_path, ("llama|steps|tested", ""), ("llama|steps|tested", fate)))


@pytest.mark.parametrize("said", ["clover|steps|tested", "llama|dreams|tested", "llama|steps|fine"])
def test_a_claim_must_have_a_place(tmp_path, said):
    with pytest.raises(SystemExit, match="no place"):
        found(report(tmp_path, (said, "")))


def test_tests_may_not_contradict_each_other(tmp_path):
    with pytest.raises(SystemExit, match="contradicts"):
        found(report(tmp_path, ("llama|GGUF|tested", ""), ("llama|GGUF|refused", "")))
