"""``jaxserve pull``: from a model's name to a version in the store. Knows what to ask for and how to report it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxserve.checkpoint.catalog import read_catalog
from jaxserve.checkpoint.store import Store
from jaxserve.cli.lazy import lazy
from jaxserve.cli.options import SettingsCommand, takes_settings
from jaxserve.cli.progress import ProgressBars
from jaxserve.config import Loaded

if TYPE_CHECKING:
    from jaxserve import launch
    from jaxserve.checkpoint import pull as pulling
else:
    launch = lazy("jaxserve.launch")
    pulling = lazy("jaxserve.checkpoint.pull")


@click.command(cls=SettingsCommand)
@click.argument("source", required=False)
@click.option("--name", help="Its name here: that of the catalogue or of the source if none is given.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bfloat16", "float16", "float32", "source"]),
    default="auto",
    show_default=True,
    help="Type to store weights in; `auto`: the source's, bfloat16 where it is quantised.",
)
@click.option("--accept-licence", is_flag=True, help="You have read and accept the terms that the model comes under.")
@takes_settings("model", "checkpoints")
def pull(loaded: Loaded, source: str | None, name: str | None, dtype: str, accept_licence: bool) -> None:
    """Fetch and convert a model.

    SOURCE is a name of the catalogue, hf:organisation/name, a .gguf file or a folder; without it, it is the model that
    is served. What is there already is not fetched again.
    """
    checkpoints = loaded.config.checkpoints
    with ProgressBars() as progress:

        def goldens(folder: Path) -> dict[str, Any]:
            progress("goldens", 0, 1)
            computed = launch.goldens(folder)
            progress("goldens", 1, 1)
            return computed

        pulled = pulling.pull(
            source or loaded.config.model.id,
            Store(checkpoints.root),
            read_catalog(checkpoints.catalog),
            model=name,
            dtype=dtype,
            accept_licence=accept_licence,
            goldens=goldens,
            progress=progress,
        )
    click.echo(f"{pulled.model} {pulled.version}: {'pulled' if pulled.fresh else 'already there'}, in {pulled.folder}.")
