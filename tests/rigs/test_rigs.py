"""The rigs in their short sizes; those that stage faults share a server, and each must find a planted mistake."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.rigs import cancels, faults, poison, soak
from tests.rigs.served import Served, served
from tests.rigs.stage import Stage
from tests.rigs.tiny import ROOT

pytestmark = [pytest.mark.rig, pytest.mark.slow]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """One that can be told to fail; each test leaves it as it was."""
    with served(faulty=True) as started:
        yield started
        assert started.metric("jaxserve_recompiles_total") == 0
        assert started.metric("jaxserve_requests_running") == 0
        assert started.stop() == 0


@pytest.fixture
def careless(server: Served) -> Iterator[None]:
    """A recovery that blames the wrong request."""
    server.control("blame_last")
    yield
    server.control("blame_last", wrongly=False)


def test_soak(server: Served):
    server.control("clear")
    result = asyncio.run(soak.run(server, seconds=3.0, seed=0, limit=soak.QUICK_SLOPE_LIMIT))
    assert result["held"], result


def test_soak_finds_a_leak(server: Served):
    server.control("leak", what="bytes", size=10 * soak.LEAK)
    result = asyncio.run(soak.run(server, seconds=3.0, seed=0, limit=soak.QUICK_SLOPE_LIMIT))
    server.control("clear")
    assert result["grown"], result


def test_the_slope_is_that_of_most_pairs():
    def samples(*sizes: int) -> list[soak.Sample]:
        return [soak.Sample(1000 * number, size * 2**20, 0, 0) for number, size in enumerate(sizes)]

    assert soak.slope(samples(300, 300, 300, 300, 300)) == 0
    assert soak.slope(samples(300, 302, 304, 306, 308)) == 2
    assert soak.slope(samples(300, 300, 900, 300, 300)) == 0


def test_poison(server: Served):
    results = asyncio.run(poison.run(server, poison.QUICK, (True,)))
    assert [result["wrong"] for result in results] == [[]] * len(poison.QUICK)


def test_poison_finds_a_careless_recovery(server: Served, careless):
    (result, *_) = asyncio.run(poison.run(server, poison.STEP[4:5], (True,), first=90))
    assert any(wrong.startswith("other ") for wrong in result["wrong"]), result


def test_faults(server: Served):
    outcomes = asyncio.run(_play(server))
    assert {outcome.how for outcome in outcomes} == {"survived"}, list(map(str, outcomes))


def test_faults_find_a_careless_recovery(server: Served, careless):
    outcomes = asyncio.run(_play(server, 10))
    assert [outcome.how for outcome in outcomes] == ["NOT SURVIVED"]


def test_cancels_and_their_leaks(server: Served):
    result, found = asyncio.run(cancels.storm_and_controls(server, cancels.QUICK_COUNT, seed=0))
    assert result["held"], result
    assert found == dict.fromkeys(cancels.PLANTED, True)


def test_nothing_of_blocks_stays_behind():
    result = cancels.of_blocks(cancels.QUICK_COUNT // cancels.BLOCKS_SHARE, seed=0)
    assert result["held"], result


async def _play(server: Served, *only: int) -> list[faults.Outcome]:
    """The short run's rows, on a server that runs already."""
    stage = Stage(server)
    await stage.prepare()
    rows = [row for row in faults.ROWS if row.quick and (not only or set(only) & set(row.faults))]
    return [await faults.play(row, stage) for row in rows]


@pytest.mark.parametrize("rig", ["drain", "overload", "probes", "simulate", "slow"])
def test_the_rigs_in_short(rig):
    """On the real server; what depends on how busy this machine is isn't judged then."""
    command = [sys.executable, "-m", f"tests.rigs.{rig}", "--quick"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.splitlines()[-1].startswith(f"held: {rig}: ")
