"""``jaxserve verify`` and ``jaxserve models``: what lies in the folder of checkpoints, and which of it is in use.

Knows the store and manifests. Does not know how a model is read or run, and does not load JAX.
"""

from __future__ import annotations

import math

import click

from jaxserve.checkpoint import manifest
from jaxserve.checkpoint.catalog import read_catalog
from jaxserve.checkpoint.store import Store
from jaxserve.cli.columns import print_columns
from jaxserve.cli.options import SettingsCommand, takes_settings
from jaxserve.cli.progress import MEGABYTE, ProgressBars
from jaxserve.config import Loaded


@click.command(cls=SettingsCommand)
@click.argument("model", required=False)
@click.option("--version", "version", help="Version to verify: the one in use if none is named.")
@takes_settings("model", "checkpoints")
def verify(loaded: Loaded, model: str | None, version: str | None) -> None:
    """Check every byte of a model against its manifest.

    Without MODEL it is the one that is served.
    """
    model = model or loaded.config.model.id
    folder = Store(loaded.config.checkpoints.root).path(model, version)
    with ProgressBars() as progress:
        found = manifest.verify(folder, progress)
    size = sum(entry.bytes for entry in found.files)
    click.echo(f"{model} {folder.name}: {len(found.files)} files, {size / MEGABYTE:.1f} MB, as the manifest says.")


@click.group(invoke_without_command=True)
@click.pass_context
def models(context: click.Context) -> None:
    """List, inspect, choose and remove converted models."""
    if context.invoked_subcommand is None:
        context.invoke(list_models)


@models.command(name="list", cls=SettingsCommand)
@takes_settings("checkpoints")
def list_models(loaded: Loaded) -> None:
    """List models and their versions, and what the catalogue knows besides."""
    store = Store(loaded.config.checkpoints.root)
    rows = [("MODEL", "VERSION", "", "DTYPE", "SIZE")]
    for model in store.models():
        marks = {store.previous(model): "previous", store.current(model): "in use"}
        for version in store.versions(model):
            found = manifest.read(store.path(model, version))
            size = sum(entry.bytes for entry in found.files)
            rows.append((model, version, marks.get(version, ""), _dtypes(found), f"{size / MEGABYTE:.1f} MB"))
    if loaded.config.checkpoints.catalog.is_file():
        known = read_catalog(loaded.config.checkpoints.catalog)
        rows += [(model, "-", "not pulled", "", "") for model in sorted(known.keys() - set(store.models()))]
    print_columns(rows)


@models.command(cls=SettingsCommand)
@click.argument("model")
@click.option("--version", "version", help="Version to show: the one in use if none is named.")
@takes_settings("checkpoints")
def show(loaded: Loaded, model: str, version: str | None) -> None:
    """Show where a model comes from and what it holds."""
    folder = Store(loaded.config.checkpoints.root).path(model, version)
    found = manifest.read(folder)
    source = found.source
    parameters = sum(math.prod(leaf.shape) for leaf in found.tree)
    facts = [
        ("model", found.model),
        ("version", folder.name),
        ("folder", str(folder)),
        ("source", f"{source.kind} {source.name}" + (f" at {source.revision}" if source.revision else "")),
        *((f"  {entry.path}", f"sha256 {entry.sha256}") for entry in source.files),
        ("licence", found.licence or "not named"),
        ("parameters", f"{parameters:,} in {len(found.tree)} arrays of {_dtypes(found)}"),
        ("tokenizer", ", ".join(found.tokenizer)),
        ("chat template", found.chat_template or "none"),
        ("goldens", found.goldens or "none"),
        ("converted by", f"jaxserve {found.engine}"),
    ]
    print_columns(facts)


@models.command(cls=SettingsCommand)
@click.argument("model")
@click.argument("version")
@takes_settings("checkpoints")
def use(loaded: Loaded, model: str, version: str) -> None:
    """Make VERSION the one that is served; the one before stays for a rollback."""
    Store(loaded.config.checkpoints.root).use(model, version)
    click.echo(f"{model}: {version} is in use.")


@models.command(cls=SettingsCommand)
@click.argument("model")
@takes_settings("checkpoints")
def rollback(loaded: Loaded, model: str) -> None:
    """Go back to the version that was in use before."""
    version = Store(loaded.config.checkpoints.root).rollback(model)
    click.echo(f"{model}: {version} is in use.")


@models.command(cls=SettingsCommand)
@click.argument("model")
@click.option("--keep", type=click.IntRange(min=0), default=2, show_default=True, help="Newest versions that stay.")
@takes_settings("checkpoints")
def gc(loaded: Loaded, model: str, keep: int) -> None:
    """Remove old versions and what crashed conversions left.

    The version in use and the previous one always stay.
    """
    removed = Store(loaded.config.checkpoints.root).gc(model, keep)
    click.echo(
        "".join(f"{model}: {version} removed.\n" for version in removed) or f"{model}: nothing to remove.\n", nl=False
    )


def _dtypes(found: manifest.Manifest) -> str:
    return ", ".join(sorted({leaf.dtype for leaf in found.tree}))
