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
        self.step_failures = Counter(
            "jaxserve_step_failures_total", "Steps that failed and were recovered from.", registry=registry
        )
        self.restored = Counter(
            "jaxserve_requests_restored_total", "Requests that went on after a failed step.", registry=registry
        )
        self.numerical_errors = Counter(
            "jaxserve_numerical_errors_total", "Requests ended by a number that is not finite.", registry=registry
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
        self.heartbeat = Gauge(
            "jaxserve_engine_heartbeat_seconds", "Since the engine's last step while it has work.", registry=registry
        )
        self.loop_lag = Gauge(
            "jaxserve_event_loop_lag_seconds", "Longest delay of the event loop in 15 seconds.", registry=registry
        )
        self.stalls = Counter(
            "jaxserve_stalls_total",
            "Times that a part stood still for longer than it may.",
            ["part"],
            registry=registry,
        )
        for part in ("engine", "event_loop"):
            self.stalls.labels(part)
        self.shortages = Counter(
            "jaxserve_shortages_total", "Refusals because a resource ran short.", ["resource"], registry=registry
        )
        for resource in ("descriptors", "memory"):
            self.shortages.labels(resource)
        self.log_lines_dropped = Counter(
            "jaxserve_log_lines_dropped_total", "Log lines that could not be written.", registry=registry
        )
        self.audit_lines_dropped = Counter(
            "jaxserve_audit_lines_dropped_total", "Audit lines that could not be written.", registry=registry
        )
        self.reload_failures = Counter(
            "jaxserve_config_reload_failures_total",
            "Times that a file in use had changed into one of no use.",
            ["file"],
            registry=registry,
        )
        for file in ("keys", "tls"):
            self.reload_failures.labels(file)
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

    def observe_stall(self, part: str) -> None:
        """The engine or the event loop stood still for longer than it may."""
        self.stalls.labels(part).inc()

    def observe_shortage(self, resource: str) -> None:
        """Somebody was refused because descriptors or memory ran short."""
        self.shortages.labels(resource).inc()

    def _seconds(self, name: str, meaning: str) -> Histogram:
        return Histogram(name, meaning, buckets=SECONDS, registry=self.registry)
