"""What the server serves: the model behind it, its settings, and the requests that are running.

Knows which parts there are and what the server asks of each. Knows no route. The composition root fills it in: the
server listens first, and the model appears when the loading thread has it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from prometheus_client import CollectorRegistry

from jaxserve.config import AuthConfig, ServerConfig
from jaxserve.engine.request import Delta, FinishReason, Limits, Request, SamplingParams
from jaxserve.errors import JaxserveError, NotReady, Overloaded, ShuttingDown, Unauthenticated
from jaxserve.models.decoding import Decoding
from jaxserve.server.admission import Admission
from jaxserve.server.audit import AuditLog
from jaxserve.server.auth import Access
from jaxserve.server.guards import Memory, cgroup_limit
from jaxserve.server.readiness import Phase, Readiness
from jaxserve.server.vitals import Vitals
from jaxserve.text.chat import ChatTemplate
from jaxserve.text.tokenizer import Tokenizer


class Stream(Protocol):
    """The deltas of one request; the last one has a finish reason."""

    @property
    def generated(self) -> int:
        """Tokens that have come, read or not, until it ended."""

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

    def submit(self, request: Request, *, patient: bool = False) -> Stream:
        """Hands a request over, on the event loop; raises ``Overloaded``, ``ShuttingDown`` or ``InvalidRequest``.

        One that is ``patient`` comes again when there is no room, so that it does not count as refused.
        """

    def room(self, tenant: str = "") -> None:
        """Raises what ``submit`` would raise now for a request of this tenant, whatever is in it."""

    def cancel_tenant(self, tenant: str, error: JaxserveError) -> int:
        """Ends every request of a tenant with an error; returns how many there were."""


class HTTPMetrics(Protocol):
    """Where finished HTTP requests are counted."""

    def observe_http(self, *, method: str, route: str, status: int, seconds: float) -> None:
        """One request; ``route`` is a route's own path, never the client's."""

    def observe_stall(self, part: str) -> None:
        """The engine or the event loop stood still for longer than it may."""

    def observe_shortage(self, resource: str) -> None:
        """Somebody was refused because descriptors or memory ran short."""


def _never_stale() -> float:
    return 0.0


def _no_limit() -> float:
    return math.inf


def _no_failure() -> JaxserveError | None:
    return None


def _never_degraded() -> bool:
    return False


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
        heartbeat: seconds for which the engine has had work and made no step; 0 when idle, without end when it is gone.
        step_limit: seconds without a step from which on requests should go elsewhere.
        failure: why the engine has given up, if it has.
        degraded: whether its numbers can't be trusted any more.
        native_kernels: whether products in C++ compute a part of it.
        decoding: how it fills in text; ``None`` where it continues it token by token.
        drafts: most tokens that are drafted ahead in a pass; 0 where none are.
    """

    id: str
    engine: Engine
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    created: int
    defaults: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    fingerprint: str | None = None
    heartbeat: Callable[[], float] = _never_stale
    step_limit: Callable[[], float] = _no_limit
    failure: Callable[[], JaxserveError | None] = _no_failure
    degraded: Callable[[], bool] = _never_degraded
    native_kernels: bool = False
    decoding: Decoding | None = None
    drafts: int = 0

    @property
    def max_model_len(self) -> int:
        """The longest context, prompt and output, in tokens."""
        return self.engine.limits.max_length


class Running:
    """The tasks that answer generating requests, so that the last ones can be ended when the server goes."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[object]] = set()
        self.cut: JaxserveError | None = None

    def end(self, error: JaxserveError) -> None:
        """Ends every running request, and from now on every new one at once, with ``error``."""
        self.cut = error
        for task in self.tasks:
            task.cancel()

    def why(self) -> JaxserveError:
        """What a request is told that was ended here."""
        return self.cut or ShuttingDown("The server is shutting down.")


@dataclasses.dataclass(slots=True, kw_only=True)
class Service:
    """One process's service.

    Attributes:
        config: the section ``server``.
        readiness: the state machine behind the probes.
        registry: what ``/metrics`` shows.
        metrics: where HTTP requests are counted, if anywhere.
        access_log: whether to write a line for each request.
        access: who may ask, and how much.
        audit: where it is noted who asked for what, if anywhere.
        model: the served model, ``None`` until it is loaded.
        running: the requests being answered.
        vitals: what is true of it.
        memory: whether there is enough.
        admission: the requests being received and tokenised.
        counting: those that only want tokens; theirs may be long texts, so they have a thread of their own.
    """

    config: ServerConfig
    readiness: Readiness = dataclasses.field(default_factory=Readiness)
    registry: CollectorRegistry = dataclasses.field(default_factory=CollectorRegistry)
    metrics: HTTPMetrics | None = None
    access_log: bool = True
    access: Access = dataclasses.field(default_factory=lambda: Access(AuthConfig(hosts=None)))
    audit: AuditLog | None = None
    model: ServedModel | None = None
    running: Running = dataclasses.field(default_factory=Running)
    vitals: Vitals = dataclasses.field(init=False)
    memory: Memory = dataclasses.field(init=False)
    admission: Admission = dataclasses.field(init=False)
    counting: Admission = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        config = self.config
        limit = cgroup_limit() if config.rss_limit_bytes == "auto" else config.rss_limit_bytes
        self.vitals = Vitals(self)
        self.access.on_revoked = self._end_revoked
        self.memory = Memory(limit, config.rss_share)
        self.admission = Admission(config.max_preparing, config.tokenize_threads, config.retry_after_s)
        self.counting = Admission(config.max_preparing, 1, config.retry_after_s)

    def count_refusal(self, status: int) -> None:
        """Counts an answer to what was no request, so that no route has seen it."""
        if self.metrics is not None:
            self.metrics.observe_http(method="other", route="unmatched", status=status, seconds=0.0)

    def ready_model(self) -> ServedModel:
        """The model, if requests may come.

        Raises:
            NotReady: still starting, or failed.
        """
        status = self.readiness.status
        if self.model is None or status.phase not in (Phase.READY, Phase.DRAINING):
            raise NotReady(f"The server is not ready: {status}.", retry_after=self.config.retry_after_s)
        return self.model

    def admit(self) -> ServedModel:
        """The model, if it may be asked to generate now; costs next to nothing.

        Raises:
            NotReady: still starting, or failed.
            ShuttingDown: it drains, and is set to take no more.
            Overloaded: memory runs short.
        """
        model = self.ready_model()
        if self.config.drain_reject and self.readiness.status.phase is Phase.DRAINING:
            raise ShuttingDown("The server is shutting down.", retry_after=self.config.retry_after_s)
        if self.memory.short():
            if self.metrics is not None:
                self.metrics.observe_shortage("memory")
            raise Overloaded("The server is short of memory.", retry_after=self.config.retry_after_s)
        return model

    def _end_revoked(self, key: str) -> None:
        """Ends what still runs for a key that is valid no more."""
        if self.model is not None:
            self.model.engine.cancel_tenant(key, Unauthenticated("This API key was revoked."))
