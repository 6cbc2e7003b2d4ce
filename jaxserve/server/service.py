"""What the server serves: the model behind it, its settings, and the requests that are running.

Knows which parts there are and what the server asks of each. Knows no route. The composition root fills it in: the
server listens first, and the model appears when the loading thread has it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import anyio
from prometheus_client import CollectorRegistry

from jaxserve.config import ServerConfig
from jaxserve.engine.request import Delta, FinishReason, Limits, Request, SamplingParams
from jaxserve.errors import NotReady
from jaxserve.server.probes import Phase, Readiness
from jaxserve.text.chat import ChatTemplate
from jaxserve.text.tokenizer import Tokenizer


class Stream(Protocol):
    """The deltas of one request; the last one has a finish reason."""

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    def cancel(self, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Frees what the request holds; may be called at any time and more than once.

        ``reason`` is what it counts as: ``STOP`` if its reader has found a stop string.
        """


class Engine(Protocol):
    """What the server needs of an engine."""

    @property
    def limits(self) -> Limits:
        """What a request may ask for."""

    def submit(self, request: Request) -> Stream:
        """Hands a request over, on the event loop; raises ``Overloaded``, ``ShuttingDown`` or ``InvalidRequest``."""


class HTTPMetrics(Protocol):
    """Where finished HTTP requests are counted."""

    def observe_http(self, *, method: str, route: str, status: int, seconds: float) -> None:
        """One request; ``route`` is a route's own path, never the client's."""


def _never_stale() -> float:
    return 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that is ready to be asked.

    Attributes:
        id: its name in requests.
        engine: where its requests go.
        tokenizer, chat_template: its text side; without a template there is no chat.
        created: when this version was made, in seconds of the Unix epoch.
        defaults: what a request gets that says nothing; ``max_tokens`` and ``logprobs`` of it are not used.
        fingerprint: changes whenever the same request could give other tokens.
        heartbeat: seconds for which the engine has had work and made no step; 0 when idle.
    """

    id: str
    engine: Engine
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    created: int
    defaults: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    fingerprint: str | None = None
    heartbeat: Callable[[], float] = _never_stale

    @property
    def max_model_len(self) -> int:
        """The longest context, prompt and output, in tokens."""
        return self.engine.limits.max_length


class Running:
    """The tasks that answer generating requests, so that the last ones can be ended when the server goes."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[object]] = set()
        self.cut = False

    def end(self) -> None:
        """Ends every running request, and from now on every new one at once, with ``ShuttingDown``."""
        self.cut = True
        for task in self.tasks:
            task.cancel()


@dataclasses.dataclass(slots=True, kw_only=True)
class Service:
    """One process's service.

    Attributes:
        config: the section ``server``.
        readiness: the state machine behind the probes.
        registry: what ``/metrics`` shows.
        metrics: where HTTP requests are counted, if anywhere.
        access_log: whether to write a line for each request.
        model: the served model, ``None`` until it is loaded.
        running: the requests being answered.
        threads: how many tokenise at once.
    """

    config: ServerConfig
    readiness: Readiness = dataclasses.field(default_factory=Readiness)
    registry: CollectorRegistry = dataclasses.field(default_factory=CollectorRegistry)
    metrics: HTTPMetrics | None = None
    access_log: bool = True
    model: ServedModel | None = None
    running: Running = dataclasses.field(default_factory=Running)
    threads: anyio.CapacityLimiter = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.threads = anyio.CapacityLimiter(self.config.tokenize_threads)

    def ready_model(self) -> ServedModel:
        """The model, if requests may come.

        Raises:
            NotReady: still starting, or failed.
        """
        status = self.readiness.status
        if self.model is None or status.phase not in (Phase.READY, Phase.DRAINING):
            raise NotReady(f"The server is not ready: {status}.", retry_after=self.config.retry_after_s)
        return self.model

    def stalled(self) -> bool:
        """Whether the engine has had work and made no step for too long."""
        return self.model is not None and self.model.heartbeat() >= self.config.heartbeat_limit_s
