"""The plan: its pools, its programs, and a table that tells everything."""

from __future__ import annotations

import dataclasses

import pytest

from jaxserve.axes import MeshShape
from jaxserve.config import Pool
from jaxserve.errors import PlanError
from jaxserve.plan.exchange import exchanged_from
from tests.plan.toys import MIXED, planned


def test_the_request_alone_decides_its_pool():
    pools = planned(Pool(4, 1024), Pool(1, 64), Pool(2, 256))
    assert [pools.pool_for(length) for length in (1, 64, 65, 256, 257, 1024, 1025)] == [1, 1, 2, 2, 0, 0, None]


def test_a_program_has_two_rows_at_least():
    assert [pool.rows for pool in planned(Pool(1, 64), Pool(3, 64)).pools] == [2, 3]


def test_it_lists_every_program():
    programs = planned(Pool(2, 64), Pool(1, 2048)).programs()
    assert [str(program) for program in programs] == [
        "prefill pool 0 bucket 32",
        "run pool 0",
        "fork pool 0",
        "scrub pool 0",
        "prefill pool 1 bucket 32",
        "prefill pool 1 bucket 128",
        "prefill pool 1 bucket 512",
        "run pool 1",
        "scrub pool 1",
    ]


def test_wrong_shapes_are_named():
    with pytest.raises(PlanError, match="longer than the 1048576 positions"):
        planned(Pool(1, 2**20 + 1))
    with pytest.raises(PlanError, match="at least one"):
        planned(prefill_buckets=())
    with pytest.raises(PlanError, match="48 and 100"):
        planned(prefill_buckets=(48, 100))


def test_the_table_tells_everything():
    text = planned(Pool(2, 64)).describe()
    assert "cache, pool 2x64" in text
    assert "2 rows x 64 positions" in text
    assert "programs: 4" in text
    assert "unsplit" not in text
    text = planned(Pool(2, 64), shape=MIXED, mesh=MeshShape(4, 2), devices=8).describe()
    assert "on each of 8 devices (expert x tensor 4x2)" in text
    assert "  experts " in text
    assert "of it unsplit" in text


def test_the_plan_says_when_tokens_travel_to_their_experts():
    shape = dataclasses.replace(MIXED, width=64, chosen=2)
    mesh = {"shape": shape, "mesh": MeshShape(4, 2), "devices": 8}
    assert planned(Pool(2, 2048)).exchange_tokens is None
    assert planned(Pool(2, 2048), shape=shape).exchange_tokens is None
    by_bytes = planned(Pool(2, 2048), **mesh)
    assert by_bytes.exchange_tokens == exchanged_from(64, 2, 4) > 512
    assert "tokens: to all devices\n" in by_bytes.describe()
    told = dataclasses.replace(by_bytes, exchange=128, multiplies="abacus")
    assert "tokens: to all devices, in passes of 128, 512 to their experts' only\n" in told.describe()
    assert "experts: multiplied by abacus\n" in told.describe()
    assert dataclasses.replace(by_bytes, exchange=None).exchange_tokens is None
    assert "tokens:" not in planned(Pool(2, 64), shape=MIXED, mesh=MeshShape(4, 2), devices=8).describe()
