"""What may be named where: settings, mesh axes and model families in one place each; this machine's names nowhere."""

from __future__ import annotations

import re

import pytest

# Written with brackets so that this file does not hold what it looks for.
ANYWHERE = {
    "a registry's address": (
        r"py[p]i\.org|python[h]osted\.org|npm[j]s\.(org|com)|--(extra-)?index[-]url|https?://[^\s\"']+/[s]imple/"
    ),
    "a path of one machine": r"(?<![\w./~-])/(work|root|opt/v|home/\w+|Users/\w+)/",
    "a word about who or what wrote it": (
        r"(?i)cl[a]ude|cop[i]lot|chatg[p]t|co-authored[-]by|generated[ ](by|with) an? (ai|llm|model)"
    ),
    "an unfinished thought": r"\b(T[O]DO|FIXM[E]|XX[X])\b",
}
IN_ONE_PLACE = {
    "the environment": (r"os\.environ|os\.getenv|getenvb?\(", ("config/layers.py",)),
    "mesh axes": (r"PartitionSpec\(|\bjax\.P\(|\bPS?\(None", ("sharding.py",)),
    "the web framework": (r"^\s*(import|from) (starlette|uvicorn)", ("server/", "launch.py", "cli/", "testing.py")),
    "the command line's libraries": (r"^\s*(import|from) (click|rich)\b", ("cli/",)),
    "model families": (
        r"(?i)(llama(?!\.cpp)|mistral|mixtral|qwen|gemma|smollm|deepseek|\bphi-?\d|falcon|olmo)",
        # A GGUF file names its tensors and how text is cut by family: its readers translate those names. The default
        # model is a setting. The toy is of a family.
        ("models/", "checkpoint/gguf", "text/gguf", "config/tree.py", "testing.py"),
    ),
}


def found(pattern: str, files: dict[str, str], exempt: tuple[str, ...] = ()) -> list[str]:
    """``file:line: text`` of each line that the pattern matches, in files that don't start with one of ``exempt``."""
    return [
        f"{name}:{number}: {line.strip()[:100]}"
        for name, text in files.items()
        if not name.startswith(exempt)
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(pattern, line)
    ]


@pytest.mark.parametrize("what", ANYWHERE)
def test_nowhere(texts, what):
    assert found(ANYWHERE[what], texts) == []


@pytest.mark.parametrize("what", IN_ONE_PLACE)
def test_in_one_place(modules, what):
    pattern, place = IN_ONE_PLACE[what]
    assert found(pattern, modules, place) == []


@pytest.mark.parametrize("what", IN_ONE_PLACE)
def test_exemptions_are_used(modules, what):
    pattern, place = IN_ONE_PLACE[what]
    there = {name: text for name, text in modules.items() if name.startswith(place)}
    assert not there or found(pattern, there), f"no module names {what}: is the pattern still right?"


@pytest.mark.parametrize(
    ("what", "planted"),
    [
        ("a registry's address", "see https://py" + "pi.org/project/x"),
        ("a registry's address", "pip install --index" + "-url x"),
        ("a path of one machine", "open('/ro" + "ot/x')"),
        ("a path of one machine", "/wo" + "rk/main"),
        ("a word about who or what wrote it", "Co-authored" + "-by: x"),
        ("an unfinished thought", "# TO" + "DO later"),
        ("the environment", "os.getenv('A')"),
        ("mesh axes", "PartitionSpec('x')"),
        ("the web framework", "from starlette.requests import Request"),
        ("the command line's libraries", "import rich"),
        ("model families", "if name == 'Qwen3ForCausalLM':"),
    ],
)
def test_the_patterns_find(what, planted):
    pattern = ANYWHERE[what] if what in ANYWHERE else IN_ONE_PLACE[what][0]
    assert found(pattern, {"a.py": f"x = 1\n{planted}\n"}) == [f"a.py:2: {planted}"]


def test_the_patterns_leave_alone():
    assert found(ANYWHERE["a path of one machine"], {"a": "tests/work/x ~/root/x https://a/root/b"}) == []
    assert found(IN_ONE_PLACE["model families"][0], {"a": "as llama.cpp does"}) == []
