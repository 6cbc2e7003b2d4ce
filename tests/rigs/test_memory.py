"""A checkpoint of a few hundred megabytes is converted and restored in little memory."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tests.rigs.memory import MIB, PLACES, QUICK, measure, watched


@pytest.mark.slow
def test_the_largest_tensor_twice_is_enough(tmp_path):
    found = measure(tmp_path, QUICK)
    assert set(found) == {"convert", *PLACES}
    for one in found.values():
        assert one["beside"] <= one["allowed"] < 150 * MIB
    assert found["restore on 1"]["stays"] > 150 * MIB  # a second copy would show


def test_what_is_taken_shows():
    def take() -> int:
        taken = np.ones(64 * MIB, np.uint8)
        time.sleep(0.05)
        return taken.nbytes

    taken, peak = watched(take)
    assert peak >= 0.9 * taken
