"""Every metric's name, once; dashboards and alerts are tested against this file."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from jaxserve.engine.request import FinishReason

# From 1 ms: a small model on a fast device answers in less than the 0.3 s where others' buckets begin.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The process's metrics in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.running = Gauge("jaxserve_requests_running", "Requests that hold a slot.", registry=registry)
        self.waiting = Gauge("jaxserve_requests_waiting", "Requests that wait for a slot.", registry=registry)
        self.cache_usage = Gauge(
            "jaxserve_cache_usage_ratio", "Share of cache positions that hold a token.", registry=registry
        )
        self.recompiles = Counter(
            "jaxserve_recompiles_total", "Compilations after the engine was ready; must stay 0.", registry=registry
        )
        self.refused = Counter(
            "jaxserve_requests_refused_total", "Requests refused because the queue was full.", registry=registry
        )
        self.finished = Counter(
            "jaxserve_requests_finished_total", "Requests that ended, by reason.", ["reason"], registry=registry
        )
        for reason in FinishReason:
            self.finished.labels(reason.value)
        self.prompt_tokens = Counter("jaxserve_prompt_tokens_total", "Prompt tokens read.", registry=registry)
        self.generated_tokens = Counter("jaxserve_generated_tokens_total", "Tokens generated.", registry=registry)
        self.queue_time = self._seconds("jaxserve_queue_time_seconds", "From arrival to a slot.")
        self.first_token = self._seconds("jaxserve_time_to_first_token_seconds", "From arrival to the first token.")
        self.inter_token = self._seconds(
            "jaxserve_inter_token_latency_seconds", "Between tokens; a dispatch of several counts once each."
        )
        self.request_time = self._seconds("jaxserve_request_seconds", "From arrival to the last token.")
        self.dispatches = Counter("jaxserve_dispatches_total", "Programs started.", ["kind"], registry=registry)
        for kind in ("prefill", "run"):
            self.dispatches.labels(kind)
        self.http = Histogram(
            "jaxserve_http_request_seconds",
            "HTTP requests by method, route and status.",
            ["method", "route", "status"],
            buckets=SECONDS,
            registry=registry,
        )

    def observe_http(self, *, method: str, route: str, status: int, seconds: float) -> None:
        """One HTTP request; ``route`` is a route's own path, never what a client sent."""
        self.http.labels(method, route, str(status)).observe(seconds)

    def _seconds(self, name: str, meaning: str) -> Histogram:
        return Histogram(name, meaning, buckets=SECONDS, registry=self.registry)
