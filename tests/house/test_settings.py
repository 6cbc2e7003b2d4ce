"""No setting is there for show: each is read somewhere outside the room that defines it."""

from __future__ import annotations

import re

from jaxserve.config import SETTINGS, Setting

READ_IN_CONFIG = {"engine.huge_pages"}  # decides about the environment, which only that room may read


def unread(settings: list[Setting], modules: dict[str, str]) -> list[str]:
    source = "\n".join(text for name, text in modules.items() if not name.startswith("config/"))
    return [s.name for s in settings if not re.search(rf"\.{s.name.partition('.')[2]}\b", source)]


def test_every_setting_is_read(modules):
    assert set(unread(list(SETTINGS.values()), modules)) == READ_IN_CONFIG


def test_the_search_finds():
    settings = [SETTINGS["server.port"], SETTINGS["server.host"]]
    assert unread(settings, {"a.py": "x = config.port", "config/tree.py": "config.host"}) == ["server.host"]
