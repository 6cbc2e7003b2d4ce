"""The commands that run a model: ``serve``, ``plan``, ``generate``, ``score``, ``check`` and ``bench``.

Knows what to ask the composition root for and how to show what comes back. Does not know how a model is run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from jaxserve.cli.columns import print_columns
from jaxserve.cli.lazy import lazy
from jaxserve.cli.options import SettingsCommand, takes_settings
from jaxserve.cli.progress import ProgressBars
from jaxserve.config import Config, Loaded, Pool, tuned_environment

if TYPE_CHECKING:
    from jaxserve import launch
    from jaxserve.launch import LoadedModel
else:
    launch = lazy("jaxserve.launch")


@click.command(cls=SettingsCommand)
@takes_settings()
def serve(loaded: Loaded) -> None:
    """Serve a model over HTTP until a signal ends it."""
    _relaunch_tuned(loaded.config)
    launch.serve(loaded.config)


@click.command(cls=SettingsCommand)
@click.option(
    "--config-json", type=click.Path(path_type=Path), help="A model's config.json, or its folder: no weight is needed."
)
@click.option("--device", help="Plan for other hardware: h200, 8xh100, v5e-8, v6e-8, v5p-16; by default this machine.")
@click.option("--compile", "compiled", is_flag=True, help="Ask this machine's compiler what the programs need.")
@click.option("--where", is_flag=True, help="Show what of it fits on common hardware.")
@takes_settings("model", "checkpoints", "engine", "mesh")
def plan(loaded: Loaded, config_json: Path | None, device: str | None, compiled: bool, where: bool) -> None:
    """Print every program and byte that serving takes, without reading a weight."""
    if where:
        print_columns(launch.where(loaded.config, config_json))
        return
    with ProgressBars() as progress:
        planned = launch.plan(loaded.config, config_json, device, compiled=compiled, progress=progress)
    click.echo(planned.describe())


@click.command(cls=SettingsCommand)
@click.argument("prompt")
@click.option("--chat/--raw", default=None, help="Answer a message, or continue a text: by default what the model can.")
@click.option("--max-tokens", type=click.IntRange(min=0), default=128, show_default=True, help="Longest output.")
@click.option("--temperature", type=click.FloatRange(min=0), help="0 is greedy; by default the model's own.")
@click.option(
    "--top-p", type=click.FloatRange(min=0, max=1, min_open=True), help="Smallest set of tokens to draw from."
)
@click.option("--top-k", type=click.IntRange(min=0), help="Most tokens to draw from; 0: all.")
@click.option("--seed", type=click.IntRange(min=0), help="The same seed writes the same text.")
@takes_settings("model", "checkpoints", "engine", "mesh")
def generate(
    loaded: Loaded,
    prompt: str,
    chat: bool | None,
    max_tokens: int,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    seed: int | None,
) -> None:
    """Answer PROMPT, or continue it; `-` reads it from standard input."""
    prompt = sys.stdin.read() if prompt == "-" else prompt
    model = _load(loaded.config)
    asked = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    sampling = dataclasses.replace(model.defaults, max_tokens=max_tokens, **given)
    talks = model.chat_template is not None if chat is None else chat
    for piece in launch.generate(model, prompt, sampling, chat=talks):
        click.echo(piece, nl=False)
    click.echo()


@click.command(cls=SettingsCommand)
@click.argument("text")
@takes_settings("model", "checkpoints", "engine", "mesh")
def score(loaded: Loaded, text: str) -> None:
    """Print the log-probability of each token of TEXT; `-` reads from standard input."""
    text = sys.stdin.read() if text == "-" else text
    scores = list(launch.score(_load(loaded.config), text))
    print_columns([("TOKEN", "LOGPROB"), *((repr(token), f"{logprob:.4f}") for token, logprob in scores)])
    total = sum(logprob for _, logprob in scores)
    click.echo(f"total {total:.4f} over {len(scores)} tokens, mean {total / len(scores):.4f}")


@click.command(cls=SettingsCommand)
@takes_settings("model", "checkpoints", "engine", "mesh")
def check(loaded: Loaded) -> None:
    """Try the promises on a model; exit with 1 if one does not hold."""
    model = _load(loaded.config)
    failed = 0
    for promise, held, figure in launch.check(model):
        click.echo(f"{'held  ' if held else 'BROKEN'}  {promise}: {figure}")
        failed += not held
    if failed:
        raise click.exceptions.Exit(1)


@click.command(cls=SettingsCommand)
@click.option("--streams", type=click.IntRange(min=1), multiple=True, default=(1, 16), help="Requests at once [1, 16].")
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=32, show_default=True, help="Length of a prompt.")
@click.option(
    "--output-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Length of an output."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@takes_settings("model", "checkpoints", "engine", "mesh")
def bench(loaded: Loaded, streams: tuple[int, ...], prompt_tokens: int, output_tokens: int, as_json: bool) -> None:
    """Measure tokens per second and latencies.

    The engine runs in this process, in a pool with as many slots as streams unless one is set.
    """
    model: LoadedModel | None = None
    rows: list[dict[str, float]] = []
    for count in streams:
        config = loaded.config
        if loaded.origins["engine.pools"] == "default":
            pools = (Pool(count, prompt_tokens + output_tokens),)
            config = msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, pools=pools))
            model = None
        model = model or _load(config)
        figures = launch.bench(model, streams=count, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        rows.append(dict(figures))
    if as_json:
        click.echo("\n".join(map(json.dumps, rows)))
    else:
        print_columns([list(rows[0]), *([f"{value:.4g}" for value in row.values()] for row in rows)])


def _load(config: Config) -> LoadedModel:
    _relaunch_tuned(config)
    with ProgressBars() as progress:
        return launch.load_model(config, progress)


def _relaunch_tuned(config: Config) -> None:
    """Starts this process anew in the environment it should have had, if it hasn't; before JAX is loaded."""
    environment = tuned_environment(config)
    if environment is not None:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)  # noqa: S606  our own arguments
