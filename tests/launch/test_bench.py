from __future__ import annotations

from jaxserve.launch.bench import bench
from jaxserve.launch.loading import LoadedModel


def test_the_figures_are_about_what_ran(loaded: LoadedModel):
    before = loaded.engine.metrics.generated_tokens._value.get()
    figures = bench(loaded, streams=3, prompt_tokens=5, output_tokens=7)
    assert loaded.engine.metrics.generated_tokens._value.get() - before == 21
    assert figures["streams"] == 3
    assert abs(figures["tokens/s"] * figures["seconds"] - 21) < 1e-6
    assert 0 < figures["ttft p50 ms"] <= 1000 * figures["seconds"]
