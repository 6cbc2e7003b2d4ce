"""``jaxserve keys``: who may use a server, and for what.

Knows the key file. A server that uses it needs no restart: it looks at the file twice a second.
"""

from __future__ import annotations

import datetime
from pathlib import Path

import click

from jaxserve.cli.columns import print_columns
from jaxserve.cli.options import SettingsCommand, takes_settings
from jaxserve.config import Loaded
from jaxserve.errors import ConfigError
from jaxserve.server import keys as key_file
from jaxserve.server.keys import Key, KeyLimits, Scope

_KEY_SCOPES = [scope.value for scope in Scope if scope is not Scope.PUBLIC]
_COUNT = click.IntRange(min=1)


@click.group()
def keys() -> None:
    """Create, list and revoke API keys."""


@keys.command(cls=SettingsCommand)
@click.argument("client")
@click.option("--scope", "scopes", type=click.Choice(_KEY_SCOPES), multiple=True, help="What it is for [infer].")
@click.option("--days", type=click.IntRange(min=1, max=36_500), help="Days until it expires; by default it does not.")
@click.option("--requests-per-minute", type=_COUNT, help="Requests a minute; by default any.")
@click.option("--input-tokens-per-minute", type=_COUNT, help="Prompt tokens a minute; by default any.")
@click.option("--output-tokens-per-minute", type=_COUNT, help="Generated tokens a minute; by default any.")
@click.option("--concurrency", type=_COUNT, help="Requests at once; by default any.")
@takes_settings("auth")
def create(
    loaded: Loaded,
    client: str,
    scopes: tuple[str, ...],
    days: int | None,
    requests_per_minute: int | None,
    input_tokens_per_minute: int | None,
    output_tokens_per_minute: int | None,
    concurrency: int | None,
) -> None:
    """Make a key for CLIENT and print it; nobody can print it again."""
    limits = KeyLimits(
        requests_per_minute=requests_per_minute,
        input_tokens_per_minute=input_tokens_per_minute,
        output_tokens_per_minute=output_tokens_per_minute,
        concurrency=concurrency,
    )
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    expires = None if days is None else now + datetime.timedelta(days=days)
    key, shown = key_file.create(client, tuple(map(Scope, scopes)) or (Scope.INFER,), expires, limits)
    with key_file.changing(_path(loaded)) as entries:
        entries.append(key)
    click.echo(shown)
    click.echo(f"{key.id}: {client}, {_scopes(key)}, {_time(key, now)}. It is not shown again.", err=True)


@keys.command(name="list", cls=SettingsCommand)
@takes_settings("auth")
def list_keys(loaded: Loaded) -> None:
    """List keys by their ids, and what each may do."""
    now = datetime.datetime.now(datetime.UTC)
    ring = key_file.read_ring(_path(loaded))
    rows = [(key.id, key.client, _scopes(key), _time(key, now), _limits(key)) for key in ring.keys.values()]
    print_columns([("ID", "CLIENT", "SCOPES", "VALID", "LIMITS"), *rows])


@keys.command(cls=SettingsCommand)
@click.argument("key_id", metavar="ID")
@takes_settings("auth")
def revoke(loaded: Loaded, key_id: str) -> None:
    """Take the key ID out of the file: within a second no server knows it."""
    path = _path(loaded)
    with key_file.changing(path) as entries:
        kept = [key for key in entries if key.id != key_id]
        if len(kept) == len(entries):
            raise ConfigError(f"{path}: no key has the id `{key_id[:64]}`.", param="auth.keys")
        entries[:] = kept
    click.echo(f"{key_id}: revoked.")


def _path(loaded: Loaded) -> Path:
    path = loaded.config.auth.keys
    if path is None:
        raise ConfigError("There is no key file: name one by `--auth.keys`.", param="auth.keys")
    return path


def _scopes(key: Key) -> str:
    return ",".join(key.scopes)


def _time(key: Key, now: datetime.datetime) -> str:
    if key.expires is not None and key.expires <= now:
        return f"expired {key.expires:%Y-%m-%d}"
    begin = f"from {key.not_before:%Y-%m-%d}" if key.not_before is not None and key.not_before > now else ""
    end = f"until {key.expires:%Y-%m-%d}" if key.expires is not None else ""
    return " ".join(filter(None, (begin, end))) or "always"


def _limits(key: Key) -> str:
    limits = key.limits
    shown = [
        (limits.requests_per_minute, "requests/min"),
        (limits.input_tokens_per_minute, "input tokens/min"),
        (limits.output_tokens_per_minute, "output tokens/min"),
        (limits.concurrency, "at once"),
    ]
    return ", ".join(f"{amount:,} {unit}" for amount, unit in shown if amount is not None) or "none"
