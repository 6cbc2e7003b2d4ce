from __future__ import annotations

from prometheus_client import generate_latest

from jaxserve.engine.metrics import COUNTED, KINDS, Metrics
from jaxserve.engine.request import NOTHING, Account

PROMISED = (
    "jaxserve_requests_running",
    "jaxserve_requests_waiting",
    "jaxserve_cache_usage_ratio",
    "jaxserve_native_kernels",
    "jaxserve_recompiles_total",
    "jaxserve_requests_refused_total",
    "jaxserve_requests_finished_total",
    "jaxserve_prompt_tokens_total",
    "jaxserve_generated_tokens_total",
    "jaxserve_queue_time_seconds",
    "jaxserve_time_to_first_token_seconds",
    "jaxserve_inter_token_latency_seconds",
    "jaxserve_request_seconds",
    "jaxserve_tokens_per_pass",
    *(name for name, _ in COUNTED.values()),
)


def test_every_promised_name_is_there_from_the_start():
    text = generate_latest(Metrics().registry).decode()
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert set(PROMISED) <= names
    assert 'jaxserve_time_to_first_token_seconds_bucket{le="0.001"}' in text
    assert 'jaxserve_requests_finished_total{reason="stop"} 0.0' in text


def test_http_requests_are_counted_by_route():
    metrics = Metrics()
    metrics.observe_http(method="POST", route="/generate", status=200, seconds=0.2)
    text = generate_latest(metrics.registry).decode()
    assert 'jaxserve_http_request_seconds_count{method="POST",route="/generate",status="200"} 1.0' in text


def test_what_passes_did_is_counted_by_how_tokens_are_decided():
    metrics = Metrics()
    metrics.count_passes("block", [Account(passes=3, drafted=8, accepted=7, rejected=1), Account(passes=1, wasted=2)])
    metrics.count_passes("canvas", [Account(passes=5)])
    metrics.count_passes("block", [])

    def value(count: str, kind: str) -> float | None:
        return metrics.registry.get_sample_value(COUNTED[count][0], {"kind": kind})

    assert [value(name, "block") for name in ("passes", "drafted", "accepted", "rejected", "wasted")] == [4, 8, 7, 1, 2]
    assert [value("passes", kind) for kind in KINDS] == [0, 0, 4, 5]


def test_every_count_but_the_callers_own_has_a_metric():
    """Whether a draft was a caller's is told to that caller."""
    assert set(NOTHING.counts()) - set(COUNTED) == {"predicted_accepted", "predicted_rejected"}
