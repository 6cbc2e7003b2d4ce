"""Every parser on its seeds and on a little damage; and the fuzzer finds what is planted."""

from __future__ import annotations

import itertools
import time

import pytest

from jaxserve.errors import CheckpointError, JaxserveError
from tests.rigs import fuzz_parsers, parsers
from tests.rigs.fuzz_parsers import Crash, attempt, damaged

pytestmark = pytest.mark.rig


@pytest.fixture(autouse=True, scope="module")
def _scratch():
    yield
    parsers.leave()


@pytest.mark.parametrize("name", parsers.TARGETS)
def test_seeds_are_taken_or_refused(name):
    target = parsers.TARGETS[name]
    taken = [attempt(target.read, target.refusal, data) for data in target.seeds()]
    assert any(taken), "no seed is good: what is read first hides the rest"


@pytest.mark.parametrize("name", parsers.TARGETS)
def test_a_little_damage(name):
    target = parsers.TARGETS[name]
    for _, data in zip(range(60), damaged(5, target.seeds(), tree=target.tree), strict=False):
        attempt(target.read, target.refusal, data)


def test_what_crashed_once_does_not_crash_again():
    for name, path in parsers.found_before():
        target = parsers.TARGETS[name]
        attempt(target.read, target.refusal, path.read_bytes())


def search(read, seeds: list[bytes], count: int = 3000) -> str:
    """What is found first."""
    for _, data in zip(range(count), damaged(1, seeds, tree=True), strict=False):
        try:
            attempt(read, JaxserveError, data)
        except Crash as crash:
            return str(crash)
    return ""


def test_control_a_planted_mistake_is_found():
    def careless(data: bytes) -> None:
        if not data.startswith(b"{"):
            raise CheckpointError("This is no object.")
        if b'"size": -1' in data:
            raise IndexError("planted")

    assert search(careless, [b'{"size": 5, "name": "a"}']) == "IndexError: planted"


def test_control_greed_is_found(monkeypatch):
    def greedy(data: bytes) -> None:
        end = time.process_time() + (0.2 if len(data) > 30 else 0.0)
        while time.process_time() < end:
            pass

    monkeypatch.setattr(fuzz_parsers, "MOST_SECONDS", 0.1)
    assert "processor time" in search(greedy, [b'{"size": 5, "name": "a"}'])
    peaks = itertools.count(0, 300 << 20)
    monkeypatch.setattr(fuzz_parsers, "_peak", lambda: next(peaks))
    assert search(lambda data: None, [b"{}"]) == "took 300 MB"


def test_control_a_panic_is_found():
    def panicking(data: bytes) -> None:
        raise type("PanicException", (BaseException,), {})("planted")

    assert search(panicking, [b"{}"]) == "PanicException: planted"
