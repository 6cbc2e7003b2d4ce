"""Turns the settings into command line flags.

Knows click and the list of settings; no setting by its meaning, apart from the few that have a short name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from jaxserve.config import SETTINGS, Config, Setting, load, written

SHORT_NAMES = {"model.id": "--model", "server.host": "--host", "server.port": "--port", "engine.pools": "--pool"}


class SettingsCommand(click.Command):
    """A command whose help lists its own options first, then the settings, section by section."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the options; click would write one list of sixty."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                groups.setdefault(_heading(parameter), []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def _parameter(name: str) -> str:
    """What click calls the flag of a setting."""
    return name.replace(".", "__")


def _heading(parameter: click.Parameter) -> str:
    section, dot, _ = (parameter.name or "").partition("__")
    if not dot:
        return "Options"
    purpose = (type(getattr(Config(), section)).__doc__ or "").rstrip(".")
    return f"{section}: {purpose}"


def takes_settings(*sections: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command ``--config`` and a flag for each setting; it is called with what they add up to, a ``Loaded``.

    Args:
        sections: those whose settings get a flag; all without any. File and environment always count.
    """
    names = [name for name in SETTINGS if not sections or name.partition(".")[0] in sections]

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(config: Path | None, **parameters: Any) -> None:
            values = {name: parameters.pop(_parameter(name)) for name in names}
            flags = {name: value for name, value in values.items() if value is not None and value != ()}
            function(load(config, flags), **parameters)

        flagged: Callable[..., None] = command
        for name in reversed(names):
            flagged = _flag(SETTINGS[name])(flagged)
        return click.option("--config", type=click.Path(path_type=Path), help="YAML file of settings.")(flagged)

    return decorate


def _flag(setting: Setting) -> Callable[[Callable[..., None]], Callable[..., None]]:
    names = [*filter(None, [SHORT_NAMES.get(setting.name)]), setting.flag]
    text = f"{setting.meaning}: {setting.values} [{written(setting.default)}]"
    return click.option(*names, _parameter(setting.name), metavar="VALUE", multiple=setting.takes_list, help=text)
