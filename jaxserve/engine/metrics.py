"""Every metric's name, once; dashboards and alerts are tested against this file."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from jaxserve.engine.request import Account, FinishReason

# From 1 ms: a small model on a fast device answers in less than the 0.3 s where others' buckets begin.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

KINDS = ("autoregressive", "speculative", "block", "canvas")
# Of an account's counts: the name of its metric, and what it says.
COUNTED = {
    "passes": ("jaxserve_passes_total", "Passes of the model over a row that decodes."),
    "drafted": ("jaxserve_drafted_tokens_total", "Tokens that were proposed for a place."),
    "accepted": ("jaxserve_accepted_tokens_total", "Proposed tokens that stand in the text."),
    "rejected": ("jaxserve_rejected_tokens_total", "Proposed tokens in whose place others stand."),
    "edited": ("jaxserve_edited_tokens_total", "Decided tokens that were overwritten."),
    "inserted": ("jaxserve_inserted_tokens_total", "Places that were put in between decided tokens."),
    "deleted": ("jaxserve_deleted_tokens_total", "Decided tokens that were taken out."),
    "wasted": ("jaxserve_wasted_tokens_total", "Tokens that were decided behind the end of a text."),
    "blocks": ("jaxserve_blocks_total", "Blocks that were finished."),
    "post_steps": ("jaxserve_post_steps_total", "Passes over a block in which nothing was open any more."),
}
TOKENS_PER_PASS = (0.25, 0.5, 0.75, 0.95, 1, 1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 32, 64, 256)

PARTS = ("engine", "event_loop")
RESOURCES = ("descriptors", "memory", "unread")
FILES = ("keys", "tls")


class Metrics:
    """The process's metrics in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.running = Gauge("jaxserve_requests_running", "Requests that hold a slot.", registry=registry)
        self.waiting = Gauge("jaxserve_requests_waiting", "Requests that wait for a slot.", registry=registry)
        self.cache_usage = Gauge(
            "jaxserve_cache_usage_ratio", "Share of cache positions that hold a token.", registry=registry
        )
        self.native_kernels = Gauge(
            "jaxserve_native_kernels", "1 while products in C++ compute a part of the model.", registry=registry
        )
        self.recompiles = self._counter(
            "jaxserve_recompiles_total", "Compilations after the engine was ready; must stay 0."
        )
        self.refused = self._counter("jaxserve_requests_refused_total", "Requests refused because the queue was full.")
        self.step_failures = self._counter("jaxserve_step_failures_total", "Steps that failed and were recovered from.")
        self.restored = self._counter("jaxserve_requests_restored_total", "Requests that went on after a failed step.")
        self.numerical_errors = self._counter(
            "jaxserve_numerical_errors_total", "Requests ended by a number that is not finite."
        )
        self.finished = self._counter(
            "jaxserve_requests_finished_total", "Requests that ended, by reason.", reason=tuple(FinishReason)
        )
        self.prompt_tokens = self._counter("jaxserve_prompt_tokens_total", "Prompt tokens read.")
        self.shared_tokens = self._counter(
            "jaxserve_prompt_tokens_shared_total", "Prompt tokens not read because another request had read them."
        )
        self.generated_tokens = self._counter("jaxserve_generated_tokens_total", "Tokens generated.")
        self.queue_time = self._seconds("jaxserve_queue_time_seconds", "From arrival to a slot.")
        self.first_token = self._seconds("jaxserve_time_to_first_token_seconds", "From arrival to the first token.")
        self.inter_token = self._seconds(
            "jaxserve_inter_token_latency_seconds", "Between tokens; a dispatch of several counts once each."
        )
        self.request_time = self._seconds("jaxserve_request_seconds", "From arrival to the last token.")
        self.dispatches = self._counter(
            "jaxserve_dispatches_total", "Programs started.", kind=("prefill", "fork", "run")
        )
        self.heartbeat = Gauge(
            "jaxserve_engine_heartbeat_seconds", "Since the engine's last step while it has work.", registry=registry
        )
        self.loop_lag = Gauge(
            "jaxserve_event_loop_lag_seconds", "Longest delay of the event loop in 15 seconds.", registry=registry
        )
        self._count_decoding()
        self._count_serving()

    def _count_decoding(self) -> None:
        self._counted = {
            count: [counter.labels(kind) for kind in KINDS]
            for count, (name, meaning) in COUNTED.items()
            for counter in (self._counter(name, meaning, kind=KINDS),)
        }
        self.tokens_per_pass = Histogram(
            "jaxserve_tokens_per_pass",
            "Of each request that ended by itself.",
            ["kind"],
            buckets=TOKENS_PER_PASS,
            registry=self.registry,
        )
        for kind in KINDS:
            self.tokens_per_pass.labels(kind)

    def _count_serving(self) -> None:
        self.stalls = self._counter("jaxserve_stalls_total", "Times that a part stood still.", part=PARTS)
        self.shortages = self._counter(
            "jaxserve_shortages_total", "Refusals because a resource ran short.", resource=RESOURCES
        )
        self.log_lines_dropped = self._counter(
            "jaxserve_log_lines_dropped_total", "Log lines that could not be written."
        )
        self.audit_lines_dropped = self._counter(
            "jaxserve_audit_lines_dropped_total", "Audit lines that could not be written."
        )
        self.reload_failures = self._counter(
            "jaxserve_config_reload_failures_total", "Times that a file in use became one of no use.", file=FILES
        )
        self.http = Histogram(
            "jaxserve_http_request_seconds",
            "HTTP requests by method, route and status.",
            ["method", "route", "status"],
            buckets=SECONDS,
            registry=self.registry,
        )

    def observe_http(self, *, method: str, route: str, status: int, seconds: float) -> None:
        """One HTTP request; ``route`` is a route's own path, never what a client sent."""
        self.http.labels(method, route, str(status)).observe(seconds)

    def count_passes(self, kind: str, accounts: Iterable[Account]) -> None:
        """What a dispatch did to its rows; ``kind`` says how they are decoded."""
        place = KINDS.index(kind)
        for name, count in Account.of(accounts).counts().items():
            if count and name in self._counted:
                self._counted[name][place].inc(count)

    def observe_stall(self, part: str) -> None:
        """The engine or the event loop stood still for longer than it may."""
        self.stalls.labels(part).inc()

    def observe_shortage(self, resource: str) -> None:
        """Somebody was refused because descriptors or memory ran short."""
        self.shortages.labels(resource).inc()

    def _counter(self, name: str, meaning: str, **labels: Iterable[str]) -> Counter:
        """A counter with at most one label, all of whose values are shown from the start."""
        counter = Counter(name, meaning, tuple(labels), registry=self.registry)
        for value in next(iter(labels.values()), ()):
            counter.labels(value)
        return counter

    def _seconds(self, name: str, meaning: str) -> Histogram:
        return Histogram(name, meaning, buckets=SECONDS, registry=self.registry)
