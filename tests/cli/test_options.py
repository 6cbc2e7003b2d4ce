"""Flags: one for each setting, under its own name and a few short ones."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from jaxserve.cli.options import SHORT_NAMES, SettingsCommand, takes_settings
from jaxserve.config import SETTINGS, Loaded, Pool, written
from jaxserve.errors import ConfigError


@pytest.fixture
def loads():
    """Runs a command that takes settings; returns what it was called with."""

    def loads(*arguments: str) -> Loaded:
        seen = []
        command = click.command(cls=SettingsCommand)(takes_settings()(seen.append))
        result = CliRunner().invoke(command, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return seen[0]

    return loads


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_every_setting_has_a_flag(loads, setting):
    loaded = loads(setting.flag, written(setting.default))
    assert {name for name, origin in loaded.origins.items() if origin != "default"} == {setting.name}


def test_short_names(loads):
    values = {"--model": "m", "--host": "h", "--port": "1", "--pool": "1x64"}
    assert set(values) == set(SHORT_NAMES.values())
    config = loads(*[word for pair in values.items() for word in pair]).config
    assert (config.model.id, config.server.host, config.server.port) == ("m", "h", 1)
    assert config.engine.pools == (Pool(1, 64),)


def test_a_list_may_be_repeated(loads):
    assert loads("--pool", "1x64", "--pool", "2x128").config.engine.pools == (Pool(1, 64), Pool(2, 128))


def test_an_empty_value_is_a_value(loads):
    with pytest.raises(ConfigError, match=r"`server\.host` takes text, not ''"):
        loads("--host", "")


def test_config_file(loads, tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("server:\n  port: 7\n")
    assert loads("--config", str(file)).config.server.port == 7


def test_help_lists_settings_by_section():
    command = click.command(cls=SettingsCommand)(takes_settings()(print))
    lines = CliRunner().invoke(command, ["--help"]).output.splitlines()
    assert all(any(setting.flag in line for line in lines) for setting in SETTINGS.values())
    headings = [line.partition(":")[0] for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["Options", "model", "checkpoints", "engine", "mesh", "server", "auth", "tls", "audit", "log"]


def test_a_command_may_offer_a_section_only(monkeypatch):
    seen = []
    command = click.command(cls=SettingsCommand)(takes_settings("log")(seen.append))
    output = CliRunner().invoke(command, ["--help"]).output
    assert "--log.level" in output
    assert "--server.port" not in output
    monkeypatch.setenv("JAXSERVE_SERVER__PORT", "7")
    CliRunner().invoke(command, ["--log.level", "debug"], catch_exceptions=False)
    assert (seen[0].config.server.port, seen[0].config.log.level) == (7, "debug")
