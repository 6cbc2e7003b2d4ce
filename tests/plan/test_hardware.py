"""Names of machines and slices as people say them."""

from __future__ import annotations

import pytest

from jaxserve.errors import ConfigError
from jaxserve.plan.hardware import COMMON, DEVICES, Hardware, hardware


@pytest.mark.parametrize(
    ("name", "devices", "gigabytes"),
    [
        ("h200", 1, 105.75),
        ("1xH200", 1, 105.75),
        ("8xh100", 8, 60),
        ("v5e-8", 8, 16),
        ("v6e-8", 8, 32),
        ("v5p-16", 8, 95),
    ],
)
def test_known_ones(name, devices, gigabytes):
    found = hardware(name)
    assert (found.devices, found.memory) == (devices, gigabytes * 1e9)
    assert found.platform == ("tpu" if "v" in name else "gpu")
    assert Hardware("cpu", 1, 1).platform == "cpu"


@pytest.mark.parametrize("name", ["", "a100", "8x", "h100-8x", "2xv5e-8", "v5p-1", "h100; rm"])
def test_unknown_ones_are_refused_with_what_there_is(name):
    with pytest.raises(ConfigError, match=r"known are h100|has no device"):
        hardware(name)


def test_all_common_ones_are_known():
    assert all(hardware(name).devices for name in (*COMMON, *DEVICES))
