"""Load by a plan: requests go out when they are due, whatever became of those before, and each is timed from then on.

An open loop, as real crowds are: a client that waited for its answers would send less the slower they come, and would
miss what everybody else waits for. Cheap, since it shares two cores with the server it measures: one task, one parser
in C, connections kept. Knows HTTP and the service's events as far as they have to be counted.

    python -m tests.rigs.load URL --rate 20 --seconds 10     # prints what it saw
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from urllib.parse import urlsplit

import httptools
import uvloop

WORDS = ("the", "river", "winds", "through", "old", "towns", "where", "people", "sell", "bread", "and", "rain")
_TOKENS = re.compile(rb'"completion_tokens":(\d+)')
_CODE = re.compile(rb'"code":"(\w+)"')
_KEPT = 2048  # bytes of an answer's end in which the usage or an error is looked for
_STALE = 20.0  # seconds after which an idle connection is not used again: the server closes it at 30


@dataclasses.dataclass(slots=True)
class Shot:
    """One request and what became of it; times in seconds on the event loop's clock.

    Attributes:
        due: when it is to be sent.
        data: the bytes, head and body.
        tenant: whose it is, for the reader of the results.
        sent: when it was; the client itself is too slow if that is much later.
        status: 0 while there is none.
        first, end: first and last byte of the answer's body.
        tokens: as the answer's usage says.
        code: of an error, in an answer or in a stream's last event; "cut" or "hung" if neither came.
        retry_after: whether the answer said when to come back.
    """

    due: float
    data: bytes
    tenant: str = ""
    sent: float = math.nan
    status: int = 0
    first: float = math.nan
    end: float = math.nan
    tokens: int = 0
    code: str = ""
    retry_after: bool = False

    @property
    def served(self) -> bool:
        """Answered to the end without an error."""
        return self.status == 200 and not self.code

    @property
    def refused(self) -> bool:
        """Told to come back later."""
        return self.status in (429, 503)


def poisson(rate: float, seconds: float, dice: random.Random) -> Iterator[float]:
    """Moments of arrival, ``rate`` a second, each independent of the others."""
    moment = dice.expovariate(rate)
    while moment < seconds:
        yield moment
        moment += dice.expovariate(rate)


def completion(
    dice: random.Random, host: str, *, key: str = "", words: tuple[int, int] = (4, 40), outputs: Sequence[int] = (32,)
) -> bytes:
    """A streamed completion, as bytes: some ``words`` in (from, to), one of ``outputs`` tokens out."""
    prompt = " ".join(dice.choices(WORDS, k=dice.randint(*words)))
    body = {"prompt": prompt, "max_tokens": dice.choice(outputs), "ignore_eos": True, "stream": True}
    body |= {"temperature": 0, "stream_options": {"include_usage": True}}
    content = json.dumps(body).encode()
    lines = [
        "POST /v1/completions HTTP/1.1",
        f"host: {host}",
        "content-type: application/json",
        f"content-length: {len(content)}",
        *([f"authorization: Bearer {key}"] if key else []),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + content


# --- connections ------------------------------------------------------------------------------------------------------


class _Line(asyncio.Protocol):
    """A connection, with one request on it at a time."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._shot: Shot | None = None
        self._tail = b""
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._client.lines.add(self)
        self._parser = httptools.HttpResponseParser(self)

    def send(self, shot: Shot) -> None:
        self._shot, self._tail = shot, b""
        self._transport.write(shot.data)
        shot.sent = self._loop.time()

    @property
    def usable(self) -> bool:
        return not self._transport.is_closing() and self._loop.time() - self.idle_since < _STALE

    def close(self) -> None:
        """Says nothing more of its request."""
        self._shot = None
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.lines.discard(self)
        if self._shot is not None:
            self._shot.code = "cut"
            self._finish()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._shot is not None and name.lower() == b"retry-after":
            self._shot.retry_after = True

    def on_headers_complete(self) -> None:
        if self._shot is not None:
            self._shot.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._shot is not None and math.isnan(self._shot.first):
            self._shot.first = self._loop.time()
        self._tail = (self._tail + body)[-_KEPT:]

    def on_message_complete(self) -> None:
        shot = self._shot
        if shot is None:
            return
        error = _CODE.search(self._tail)
        shot.code = error[1].decode() if error else ""
        tokens = _TOKENS.findall(self._tail)
        shot.tokens = int(tokens[-1]) if tokens else 0
        if shot.status == 200 and not error and not self._tail.rstrip().endswith(b"data: [DONE]"):
            shot.code = "cut"
        self._finish()

    def _finish(self) -> None:
        shot, self._shot = self._shot, None
        assert shot is not None
        shot.end = self.idle_since = self._loop.time()
        if not self._transport.is_closing() and self._parser.should_keep_alive():
            self._client.idle.append(self)
        self._client.finished(shot)


class Client:
    """Sends shots and keeps the connections; used on one event loop."""

    def __init__(self, url: str, on_end: Callable[[Shot], None] = lambda _: None) -> None:
        parts = urlsplit(url)
        self.address = (parts.hostname or "", parts.port or 0)
        self.lines: set[_Line] = set()
        self.idle: list[_Line] = []
        self.open = 0
        self._on_end = on_end
        self._connecting: set[asyncio.Task[None]] = set()
        self._answered = asyncio.Event()

    def fire(self, shot: Shot) -> None:
        """Sends it now, on a connection that is free or on a new one."""
        self.open += 1
        self._answered.clear()
        while self.idle:
            line = self.idle.pop()
            if line.usable:
                line.send(shot)
                return
            line.close()
        task = asyncio.ensure_future(self._connect(shot))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def finished(self, shot: Shot) -> None:
        """A line tells that it has an answer, or that there will be none."""
        self.open -= 1
        self._on_end(shot)
        if not self.open:
            self._answered.set()

    async def answered(self) -> None:
        """Waits until nothing is out."""
        if self.open:
            await self._answered.wait()

    def close(self) -> None:
        """Closes every connection, those that still wait for an answer, too."""
        for line in tuple(self.lines):
            line.close()

    async def _connect(self, shot: Shot) -> None:
        try:
            _, line = await asyncio.get_running_loop().create_connection(lambda: _Line(self), *self.address)
        except OSError:
            shot.code = "cut"
            shot.end = asyncio.get_running_loop().time()
            self.finished(shot)
            return
        line.send(shot)


# --- loops ------------------------------------------------------------------------------------------------------------


async def open_loop(url: str, shots: Sequence[Shot], *, patience: float = 60.0) -> None:
    """Fires every shot when it is due (``due`` counts from now and is then set to the loop's clock).

    Waits up to ``patience`` seconds for the last answers; who has none then "hung".
    """
    loop = asyncio.get_running_loop()
    client = Client(url)
    begin = loop.time()
    for shot in shots:
        shot.due += begin
    for shot in sorted(shots, key=lambda shot: shot.due):
        if (wait := shot.due - loop.time()) > 0:
            await asyncio.sleep(wait)
        client.fire(shot)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience):
            await client.answered()
    for shot in shots:
        if math.isnan(shot.end):
            shot.code, shot.end = "hung", loop.time()
    client.close()


async def closed_loop(url: str, streams: int, seconds: float, make: Callable[[], bytes]) -> list[Shot]:
    """``streams`` clients, each of which asks again as soon as it is answered; measures what the server can do."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    shots: list[Shot] = []

    def fire() -> None:
        shots.append(Shot(loop.time(), make()))
        client.fire(shots[-1])

    def again(shot: Shot) -> None:
        if loop.time() < end:
            loop.call_later(0.05 if shot.refused else 0.0, fire)

    client = Client(url, again)
    for _ in range(streams):
        fire()
    await asyncio.sleep(seconds)
    await client.answered()
    client.close()
    return shots


# --- what was seen ----------------------------------------------------------------------------------------------------


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that ``share`` of all do not exceed; NaN of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


Stretch = tuple[Sequence[Shot], float, float]  # shots, and the two moments between which they count


def summary(*stretches: Stretch) -> dict[str, float]:
    """Figures of the shots that were due in one of some stretches; goodput by what was completed in them.

    Times are in seconds and count from when a request was due, so that a slow client is the server's fault as well:
    ``lag`` says how much it can have been.
    """
    due = [shot for shots, begin, end in stretches for shot in shots if begin <= shot.due < end]
    tokens = sum(
        shot.tokens for shots, begin, end in stretches for shot in shots if shot.served and begin <= shot.end < end
    )
    served = [shot for shot in due if shot.served]
    refused = [shot for shot in due if shot.refused]
    first = [shot.first - shot.due for shot in served]
    return {
        "sent": len(due),
        "served": len(served),
        "refused": len(refused),
        "hasty": sum(not shot.retry_after for shot in refused),
        "failed": sum(not shot.served and not shot.refused for shot in due),
        "goodput": tokens / sum(end - begin for _, begin, end in stretches),
        "ttft_p50": quantile(first, 0.5),
        "ttft_p99": quantile(first, 0.99),
        "refusal_p50": quantile([shot.end - shot.due for shot in refused], 0.5),
        "refusal_p99": quantile([shot.end - shot.due for shot in refused], 0.99),
        "lag_p99": quantile([shot.sent - shot.due for shot in due], 0.99),
    }


def main() -> None:
    """Fires at a server and prints what came back."""
    parser = argparse.ArgumentParser(description="Open-loop load: Poisson arrivals of streamed completions.")
    parser.add_argument("url")
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--key", default="", help="an API key")
    options = parser.parse_args()
    dice = random.Random(options.seed)
    host = urlsplit(options.url).netloc
    moments = poisson(options.rate, options.seconds, dice)
    shots = [Shot(moment, completion(dice, host, key=options.key)) for moment in moments]
    uvloop.run(open_loop(options.url, shots))
    begin = min(shot.due for shot in shots)
    for name, value in summary((shots, begin, begin + options.seconds)).items():
        print(f"{name:>12} {value:.4g}")
    codes = sorted({shot.code for shot in shots if not shot.served})
    print(f"{'codes':>12} {', '.join(codes) or '-'}")


if __name__ == "__main__":
    main()
