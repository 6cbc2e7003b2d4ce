"""What does not fit is refused with the numbers and the nearest that does; and that one does fit."""

from __future__ import annotations

import dataclasses
import re

import pytest

from jaxserve.axes import MeshShape
from jaxserve.config import Pool
from jaxserve.errors import PlanError
from jaxserve.plan import CacheShape, WeightShape, best_mesh, fits_where
from tests.plan.toys import MIXED, SHAPE, planned

WIDE = dataclasses.replace(SHAPE, cache=(CacheShape(per_position=4096),))


def refused(*pools: Pool, **rest) -> str:
    with pytest.raises(PlanError) as caught:
        planned(*pools, **rest)
    return caught.value.message


def test_what_does_not_fit_is_refused_with_the_numbers():
    small = planned(Pool(8, 2048), shape=WIDE).total_bytes
    message = refused(Pool(8, 2048), shape=WIDE, memory=small)
    assert re.search(r"needs .* GiB \(weights .* but .* 10% headroom .*: nearest that fits: pools 7x2048", message)
    assert planned(Pool(8, 2048), shape=WIDE, memory=int(small / 0.89)).total_bytes == small
    assert "no number of slots, length or mesh fits" in refused(Pool(1, 2048), memory=10_000)


def test_the_nearest_fits_and_one_slot_more_does_not():
    pools = (Pool(16, 4096), Pool(64, 512))
    memory = int(planned(*pools, shape=WIDE).total_bytes * 0.7)
    fewer, shorter = re.findall(r"pools (\d+)x(\d+),(\d+)x(\d+)", refused(*pools, shape=WIDE, memory=memory))
    long, long_length, short, short_length = map(int, fewer)
    assert (long_length, short_length) == (4096, 512)
    planned(Pool(long, 4096), Pool(short, 512), shape=WIDE, memory=memory)
    refused(Pool(long + 1, 4096), Pool(short + 4, 512), shape=WIDE, memory=memory)
    slots, length, more, less = map(int, shorter)
    assert (slots, more) == (16, 64)
    planned(Pool(slots, length), Pool(more, less), shape=WIDE, memory=memory)


def test_a_larger_mesh_is_named_where_only_that_helps():
    pool = Pool(2, 128)
    heavy = dataclasses.replace(MIXED, weights=(*MIXED.weights, WeightShape("head", (1 << 20, 64), ("vocab", "model"))))
    memory = int(planned(pool, shape=heavy).total_bytes * 0.9)
    message = refused(pool, shape=heavy, memory=memory)
    expert, tensor, devices = map(int, re.search(r"x tensor (\d)x(\d), of (\d) devices", message).groups())
    assert expert * tensor == devices > 1
    planned(pool, shape=heavy, memory=memory, mesh=MeshShape(expert, tensor), devices=devices)
    message = refused(pool, shape=heavy, memory=memory, devices=8)
    assert re.search(r"x tensor \dx\d$", message)  # they are there


def test_a_mesh_of_more_devices_than_there_are_is_refused():
    assert "4x2 takes 8 devices, there are 4" in refused(Pool(2, 128), mesh=MeshShape(4, 2), devices=4)


def test_the_best_mesh_leaves_most_memory():
    plan = planned(Pool(2, 128), shape=MIXED, devices=8)
    mesh = best_mesh(plan)
    assert mesh.devices == 8
    sizes = [dataclasses.replace(plan, mesh=MeshShape(*sides)) for sides in ((1, 8), (2, 4), (4, 2), (8, 1))]
    assert dataclasses.replace(plan, mesh=mesh).total_bytes == min(each.total_bytes for each in sizes)


def test_the_table_of_hardware_says_what_fits_where():
    head, *rows = fits_where(planned(Pool(4, 2048), shape=MIXED))
    assert [row[0] for row in rows] == ["1xh200", "8xh100", "v5e-8", "v6e-8", "v5p-16"]
    assert all(len(row) == len(head) for row in rows)
    assert {row[-1] for row in rows} == {"yes"}
    assert [row[1] for row in rows] == ["1", "8", "8", "8", "8"]
