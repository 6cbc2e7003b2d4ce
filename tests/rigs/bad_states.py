"""The kinds of bad input whose answer depends on the state of the server: keys, spent shares, a full house, a failure.

Knows how to bring a server of its own into each state. The other kinds are in ``bad_inputs.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx2

from jaxserve.server.keys import KeyLimits, Scope, changing, create
from tests.rigs.bad_inputs import CHAT, TEXT, Row, chat, text
from tests.rigs.exchange import Answer, exchange, request
from tests.rigs.faulty import MARK
from tests.rigs.served import Served, served

# Two places and nobody waits.
FLAGS = ("--engine.max-concurrency", "2", "--engine.max-waiting", "0")
HOSTILE = ("", "x", "jx_deadbeef_" + "0" * 64, "'; drop table keys; --", "x" * 9000, "\u00e9\u202e", "a b", "Bearer")


def issue(folder: Path) -> tuple[Path, dict[str, tuple[str, str]]]:
    """A key file, and the header of each key: one that may ask, one that may only look, one that may ask once."""
    wanted = {
        "asks": ((Scope.INFER,), None),
        "looks": ((Scope.METRICS,), None),
        "asks once": ((Scope.INFER,), KeyLimits(requests_per_minute=1)),
    }
    shown: dict[str, tuple[str, str]] = {}
    file = folder / "keys.yaml"
    with changing(file) as keys:
        for client, (scopes, limits) in wanted.items():
            key, secret = create(client, scopes, limits=limits)
            keys.append(key)
            shown[client] = ("authorization", f"Bearer {secret}")
    return file, shown


def rows(server: Served, shown: dict[str, tuple[str, str]]) -> Iterator[Row]:
    """Each row when the server is in the state that it is about."""
    told = (("www-authenticate", "Bearer"),)
    for headers in ((), *((("authorization", f"Bearer {key}"),) for key in HOSTILE)):
        yield Row(kind=11, path=CHAT, body=chat(), status=401, code="invalid_api_key", headers=headers, answers=told)
    looks, asks, once = shown["looks"], shown["asks"], shown["asks once"]
    yield Row(kind=12, path=CHAT, body=chat(), status=403, code="insufficient_permissions", headers=(looks,))
    yield Row(kind=23, path=TEXT, body=text(max_tokens=1), status=200, headers=(once,))
    waits = (("retry-after", "*"), ("retry-after-ms", "*"))
    yield Row(
        kind=23,
        path=TEXT,
        body=text(max_tokens=1),
        status=429,
        type="requests",
        code="rate_limit_exceeded",
        headers=(once,),
        answers=(*waits, ("x-ratelimit-remaining-requests", "0")),
    )
    with full_house(server, asks):
        yield Row(
            kind=24,
            path=TEXT,
            body=text(),
            status=503,
            type="service_unavailable_error",
            code="server_is_overloaded",
            headers=(asks,),
            answers=waits,
        )
    server.control("fail", phase="prefill", marked=True)
    yield Row(
        kind=25,
        path=TEXT,
        body=text(prompt=list(MARK), max_tokens=4),
        status=500,
        type="server_error",
        code="engine_error",
        headers=(asks,),
        answers=(("x-should-retry", "false"),),
    )
    server.control("clear")
    yield Row(kind=25, path=TEXT, body=text(max_tokens=4), status=200, headers=(asks,))


@contextlib.contextmanager
def full_house(server: Served, header: tuple[str, str]) -> Iterator[None]:
    """Both places are taken, by requests that take their time."""
    body = text(max_tokens=200, ignore_eos=True)

    def stay() -> None:
        httpx2.post(server.url + TEXT, json=body, headers=[header], timeout=60)

    server.control("slow", seconds=0.05)
    guests = [threading.Thread(target=stay) for _ in range(2)]
    for guest in guests:
        guest.start()
    end = time.monotonic() + 30
    while server.metric("jaxserve_requests_running") < 2 and time.monotonic() < end:
        time.sleep(0.02)
    yield
    server.control("clear")
    for guest in guests:
        guest.join()


def ask_all(patience: float) -> list[tuple[Row, bytes, Answer]]:
    """Every row with what was sent and what came back."""
    with tempfile.TemporaryDirectory(prefix="rig-keys-") as folder:
        file, shown = issue(Path(folder))
        with served(*FLAGS, "--auth.keys", str(file), faulty=True) as server:
            parts = urlsplit(server.url)
            address = (str(parts.hostname), int(parts.port or 0))
            found = []
            server.headers = dict([shown["looks"]])
            for row in rows(server, shown):
                data = request(row.method, row.path, row.content, row.headers)
                found.append((row, data, asyncio.run(exchange(address, data, patience))))
            return found
