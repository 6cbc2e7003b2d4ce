"""``jaxserve config``."""

from __future__ import annotations

from jaxserve import cli
from jaxserve.config import config_table, describe, load


def test_show(capsys):
    assert cli.run(["config", "show", "--port", "7"]) == 0
    assert capsys.readouterr().out == describe(load(flags={"server.port": "7"}))


def test_show_origin(capsys, tmp_path, monkeypatch):
    file = tmp_path / "a.yaml"
    file.write_text("log:\n  format: json\n")
    monkeypatch.setenv("JAXSERVE_LOG__LEVEL", "debug")
    assert cli.run(["config", "show", "--origin", "--config", str(file), "--port", "7"]) == 0
    origins = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines() if line.startswith("  "))
    assert origins["  port"].split() == ["7", "#", "--server.port"]
    assert origins["  level"].split() == ["debug", "#", "JAXSERVE_LOG__LEVEL"]
    assert origins["  format"].split() == ["json", "#", f"{file}:2"]
    assert origins["  host"].split() == ["127.0.0.1", "#", "default"]


def test_table(capsys):
    assert cli.run(["config", "table"]) == 0
    assert capsys.readouterr().out == config_table()
