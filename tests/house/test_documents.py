"""What the documents say is so: paths exist, commands parse, tables are what the code says."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import pytest
import yaml
from starlette.routing import Route

import jaxserve
from jaxserve.cli import cli
from jaxserve.config import ModelConfig, ServerConfig
from jaxserve.server import wire
from jaxserve.server.app import SCOPES, create_app
from jaxserve.server.extensions import ParallelDetails
from jaxserve.server.keys import Scope, parse_ring
from jaxserve.server.parse import parse
from jaxserve.server.probes import create_probe_app
from jaxserve.server.service import Service
from tests.house import tables

DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
MADE_BY_USE = (".venv/", ".cache/", "dist/")  # not there in a fresh clone


def blocks(text: str, *languages: str) -> list[str]:
    """The fenced blocks in one of these languages."""
    return [body for language, body in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S) if language in languages]


def tree(text: str) -> list[str]:
    """The paths of the trees: what is indented lies in the folder above it."""
    found: list[str] = []
    for line in "".join(blocks(text, "tree")).splitlines():
        name = line.split()[0] if line.strip() else ""
        above = next((path for path in reversed(found) if path.find("/") == len(path) - 1), "")
        folder = above if line.startswith(" ") else ""
        found += [folder + name] if name else []
    return found


def paths(text: str) -> list[str]:
    """What is written as a path of the repository: in backticks, and in the tree."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    spans = re.findall(r"`([\w./-]+)`", prose)
    named = [span for span in spans if re.search(r"^[\w.-]+(/[\w.-]+)*/$|\.(py|md|yaml|toml|txt)$", span)]
    return named + tree(text)


def command_lines(text: str) -> Iterator[list[str]]:
    """The words of every `make` and `jaxserve` command in shell blocks and in backticks."""
    lines = [line.removeprefix("$ ") for block in blocks(text, "sh", "console") for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    for line in lines:
        match = re.match(r"(?:\.venv/bin/)?(make|jaxserve) [a-z-]", line)
        if match and "..." not in line and "|" not in line:
            yield [match[1], *shlex.split(line, comments=True)[1:]]


def refused(words: list[str], targets: set[str]) -> str | None:
    """Why a command line would not run, as far as its names go."""
    program, *arguments = words
    if program == "make":
        unknown = [word for word in arguments if "=" not in word and word not in targets]
        return f"no target {unknown}" if unknown else None
    command: click.Command = cli
    try:
        while isinstance(command, click.Group):
            context = command.make_context(program, arguments)
            rest = [*context._protected_args, *context.args]
            if not rest:
                return None
            program, subcommand, arguments = command.resolve_command(context, rest)
            command = subcommand or cli
        command.make_context(program, arguments)
    except click.exceptions.Exit:
        return None  # --help
    except click.ClickException as error:
        return error.format_message()
    return None


@pytest.fixture(scope="module", params=DOCUMENTS)
def document(request, root) -> str:
    return root.joinpath(request.param).read_text()


@pytest.fixture(scope="module")
def readme(root) -> str:
    return root.joinpath("README.md").read_text()


@pytest.fixture(scope="module")
def targets(root) -> set[str]:
    return set(re.findall(r"^([a-z-]+):", root.joinpath("Makefile").read_text(), re.M))


def absent(names: list[str], root: Path) -> list[str]:
    return [name for name in names if not name.startswith(MADE_BY_USE) and not root.joinpath(name).exists()]


def test_paths_exist(document, root):
    assert absent(paths(document), root) == []


def test_commands_would_run(document, targets):
    lines = list(command_lines(document))
    assert {shlex.join(words): reason for words in lines if (reason := refused(words, targets))} == {}


def test_readme_names_the_two_commands_on_its_first_screen(readme):
    first_screen = "\n".join(readme.splitlines()[:40])
    assert ["make", "serve"] in list(command_lines(first_screen))
    assert ["make", "test"] in list(command_lines(first_screen))
    assert "$ curl -N" in first_screen


def test_readme_has_every_room_in_its_tree(readme, root):
    rooms = [
        path.relative_to(root).as_posix() + ("/" if path.is_dir() else "")
        for path in root.joinpath("jaxserve").iterdir()
        if path.suffix == ".py" or path.joinpath("__init__.py").exists()
    ]
    assert sorted(set(rooms) - {"jaxserve/__init__.py"} - set(tree(readme))) == []


def test_readme_lists_every_route(readme):
    listed = re.findall(r"^\| (\w+) \| `(/[^`]*)` \|", tables.table(readme, "HTTP"), re.M)
    routes = [route for route in create_app(Service(config=ServerConfig())).routes if isinstance(route, Route)]
    served = [(method, route.path.replace(":path", "")) for route in routes for method in route.methods or ()]
    served = [(method, path) for method, path in served if method != "HEAD"]
    assert sorted(listed) == sorted(served)


def test_readme_says_what_each_route_needs(readme):
    listed = dict(re.findall(r"^\| \w+ \| `(/[^`]*)` \| (\w+) \|", tables.table(readme, "HTTP"), re.M))
    routes = create_app(Service(config=ServerConfig())).routes
    scopes = {route.path: SCOPES.get(route.path, Scope.PUBLIC) for route in routes if isinstance(route, Route)}
    assert listed == {path.replace(":path", ""): scope.value for path, scope in scopes.items()}


def test_readme_shows_a_key_file_that_would_be_read(readme):
    (block,) = [block for block in blocks(readme, "yaml") if "sha256" in block]
    (key,) = parse_ring(block.encode(), Path("README.md")).keys.values()
    assert key.limits.concurrency
    assert key.expires


def test_readme_shows_probes_that_would_answer(readme):
    (block,) = [block for block in blocks(readme, "yaml") if "Probe" in block]
    pod = yaml.safe_load(block)
    routes = {route.path for route in create_probe_app(Service(config=ServerConfig())).routes}
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert pod[name]["httpGet"]["path"] in routes
        assert pod[name]["httpGet"]["port"] == ServerConfig().port + 1
    assert refused(["jaxserve", *pod["args"], "--help"], set()) is None
    times = {flag: float(value) for flag, value in zip(pod["args"], pod["args"][1:], strict=False) if "-s" in flag[-2:]}
    assert pod["terminationGracePeriodSeconds"] >= sum(times.values()) + 10


def test_readme_shows_a_request_that_would_be_understood(readme):
    block, *_ = blocks(readme, "console")
    command, *output = block.splitlines()
    words = shlex.split(command.removeprefix("$ "))
    url, body = words[2], words[words.index("-d") + 1]
    request = parse(body.encode(), wire.ChatRequest)
    assert url == f"localhost:{ServerConfig().port}/v1/chat/completions"
    assert request.model == ModelConfig().id
    assert request.stream
    # What grep leaves of each chunk is a field of the delta.
    texts = [msgspec.json.decode("{" + line + "}", type=wire.ChatDelta).content for line in output]
    assert re.match(r"\w+ .*red.*blue.*yellow", "".join(texts), re.S | re.I)


def test_readme_shows_what_a_prediction_becomes(readme):
    (block,) = [block for block in blocks(readme, "console") if "prediction" in block]
    command, content, details = block.splitlines()
    words = shlex.split(command.removeprefix("$ "))
    request = parse(words[words.index("-d") + 1].encode(), wire.ChatRequest)
    assert request.prediction is not None
    said = json.loads(json.loads(content))
    assert f"{said['name']}, {said['age']}, {said['city']}" == request.messages[0].content
    took = parse(details.encode(), ParallelDetails)
    assert took.drafted_tokens == took.accepted_tokens + took.rejected_tokens


@pytest.mark.parametrize("heading", tables.TABLES)
def test_readme_holds_the_table(readme, heading):
    assert tables.table(readme, heading) == tables.TABLES[heading](), "`make tables` writes the right one"


def test_changelog_begins_with_this_version(root):
    text = root.joinpath("CHANGELOG.md").read_text()
    assert re.findall(r"^## (\S+)", text, re.M)[0] == jaxserve.__version__


def test_the_checks_would_notice(root, targets):
    text = "See `jaxserve/nowhere.py` and `attic/`, not `a.b` or `x/y`.\n"
    text += "```tree\ncellar/  dark\n  wine/\ntests/\n  x.py\n  y/\n```\n"
    assert absent(paths(text), root) == [
        "jaxserve/nowhere.py",
        "attic/",
        "cellar/",
        "cellar/wine/",
        "tests/x.py",
        "tests/y/",
    ]
    text = "```sh\nmake srve  # no\njaxserve models lst\njaxserve verify --vrsion 1\n```\n`jaxserve config table`"
    reasons = [refused(words, targets) for words in command_lines(text)]
    assert [bool(reason) for reason in reasons] == [True, True, True, False]


def test_readme_shows_the_figures_that_were_measured(readme, root):
    measured = json.loads(root.joinpath("benchmarks/results/transformers.json").read_text())["results"]
    for row in measured:
        mine, theirs = row["tokens_per_second"]
        speeds = f"| {row['streams']} | {mine:.3g} tokens/s | {theirs:.3g} tokens/s |"
        assert f"{speeds} {row['ratio']:.2f} | {row['whole_ratio']:.2f} |" in readme
        assert f"{mine:.0f}" in readme.split("## What is where")[0]
