"""A server that cannot start says why in a sentence, with the right exit code, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import socket

import pytest

from jaxserve import cli
from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError
from jaxserve.server.serve import listen
from tests.rigs.bad_starts import STARTS, End, run

EARLY = [name for name, start in STARTS.items() if start.early]
LATE = ("no key file", "a link out")  # the others are for `make corrupt`


@pytest.mark.parametrize("name", EARLY)
def test_what_is_wrong_before_anything_is_loaded(name, tmp_path, capsys, monkeypatch):
    start = STARTS[name]
    for file, content in start.files:
        tmp_path.joinpath(file).write_text(content)
    for variable, value in start.variables:
        monkeypatch.setenv(variable, value)
    before = sorted(tmp_path.rglob("*"))
    code = cli.run(["serve", *(flag.format(here=tmp_path) for flag in start.flags)])
    said = capsys.readouterr()
    end = End(code, 0.0, (said.out + said.err).splitlines(), [])
    assert end.fault(start) == ""
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", LATE)
def test_what_is_wrong_later(name, tmp_path):
    end = run(STARTS[name], tmp_path)
    assert end.fault(STARTS[name]) == ""
    assert end.seconds < 60


def test_there_are_twenty_and_more():
    assert len(STARTS) >= 20


def test_a_name_that_is_not_found_is_said_in_words(monkeypatch):
    def unknown(*args, **kwargs):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "create_server", unknown)
    with pytest.raises(ConfigError, match=r": Name or service not known\.$"):
        listen(ServerConfig(host="no.such.host.invalid"))


def test_control_a_wrong_end_shows():
    start = STARTS["no YAML"]
    good = End(78, 0.1, ["jaxserve: a.yaml:2: not YAML: x."], [])
    assert good.fault(start) == ""
    for wrong in (
        {"code": 1},
        {"lines": []},
        {"lines": ["jaxserve: something else."]},
        {"lines": ["jaxserve: not YAML.", "more"]},
        {"lines": ["Traceback (most recent call last):", "jaxserve: not YAML."]},
        {"left": ["tmp"]},
    ):
        assert dataclasses.replace(good, **wrong).fault(start), wrong
