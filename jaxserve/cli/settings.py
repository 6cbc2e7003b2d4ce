"""``jaxserve config``: what is set, to what, by whom. Knows the configuration and nothing else."""

from __future__ import annotations

import click

from jaxserve.cli.options import SettingsCommand, takes_settings
from jaxserve.config import Loaded, config_table, describe


@click.group()
def config() -> None:
    """Show the settings."""


@config.command(cls=SettingsCommand)
@click.option("--origin", is_flag=True, help="Say of each value whether a default, a line of a file, or what gave it.")
@takes_settings()
def show(loaded: Loaded, origin: bool) -> None:
    """Print the settings as they add up, as a YAML file."""
    click.echo(describe(loaded, origins=origin), nl=False)


@config.command()
def table() -> None:
    """Print all settings as a Markdown table."""
    click.echo(config_table(), nl=False)
