"""The tree: every setting has bounds, a meaning and a default that its own type takes."""

from __future__ import annotations

import msgspec
import pytest

from jaxserve.config import SETTINGS, Config, EngineConfig, Pool, config_table, written
from jaxserve.config.layers import load


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_default_survives_being_written_and_read(setting):
    loaded = load(flags={setting.name: written(setting.default)}, environ={})
    section, name = setting.name.split(".")
    value = getattr(getattr(loaded.config, section), name)
    assert value == getattr(getattr(load(environ={}).config, section), name)


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_setting_explains_itself(setting):
    assert 10 <= len(setting.meaning) <= 90
    assert setting.values
    assert setting.flag.startswith("--")
    assert "_" not in setting.flag
    assert setting.variable.startswith("JAXSERVE_")
    assert "__" in setting.variable


def test_numbers_are_bounded():
    unbounded = [s.name for s in SETTINGS.values() if s.values in ("an integer", "a number")]
    assert unbounded == []


def test_durations_name_their_unit():
    words = ("timeout", "window", "drain", "limit", "after", "ping", "duck")
    for name, setting in SETTINGS.items():
        if isinstance(setting.default, float) and any(word in name for word in words):
            assert name.endswith(("_s", "_ms")), name


def test_values_in_words():
    assert SETTINGS["engine.max_waiting"].values == "`auto` or an integer from 0 to 1,000,000"
    assert SETTINGS["log.format"].values == "`console` or `json`"
    assert SETTINGS["engine.memory_headroom"].values == "a number from 0 below 1"
    assert SETTINGS["engine.compilation_cache"].values == "a path or `off`"
    assert SETTINGS["engine.pools"].values == "pools like `24x2048,4x32768`"
    assert SETTINGS["engine.prefill_buckets"].values == "`auto` or an integer from 1 to 1,000,000, several with commas"


def test_frozen():
    with pytest.raises(AttributeError):
        Config().engine.max_waiting = 3  # type: ignore[misc]
    assert msgspec.structs.replace(EngineConfig(), max_waiting=3).max_waiting == 3


def test_written():
    assert written((Pool(4, 2048), Pool(1, 64))) == "4x2048,1x64"
    assert [written(value) for value in (True, None, 0.5, 60.0, 7, "auto")] == ["true", "off", "0.5", "60", "7", "auto"]


def test_table_has_a_row_for_each_setting():
    lines = config_table().splitlines()
    assert len(lines) == len(SETTINGS) + 2
    assert all(line.count("|") == lines[0].count("|") for line in lines)
