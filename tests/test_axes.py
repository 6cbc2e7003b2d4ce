"""What is split over what: every device holds its share, and what stays whole can be named."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.axes import MeshShape, parts, split

MESHES = [MeshShape(1, 8), MeshShape(2, 4), MeshShape(4, 2), MeshShape(8, 1)]
NAMES = ("experts", "heads", "kv_heads", "ffn", "vocab", "model", None)


@given(
    st.lists(st.tuples(st.sampled_from(NAMES), st.integers(1, 48)), max_size=5),
    st.builds(MeshShape, st.integers(1, 8), st.integers(1, 8)),
)
def test_each_mesh_axis_splits_one_axis_at_most_and_evenly(dimensions, mesh):
    axes, shape = [axis for axis, _ in dimensions], [size for _, size in dimensions]
    found = split(axes, shape, mesh)
    assert len(found) == len(axes)
    used = [name for choice in found for name in choice]
    assert len(used) == len(set(used))
    for choice, axis, size in zip(found, axes, shape, strict=True):
        assert size % mesh.size(choice) == 0
        assert all(mesh.size((name,)) > 1 for name in choice)
        assert not choice or axis is not None
    assert parts(axes, shape, mesh) == math.prod(map(mesh.size, found)) <= mesh.devices
    assert parts(axes, shape, MeshShape()) == 1


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        (("experts", None, "ffn", "model"), (256, 2, 512, 2048)),
        (("experts", "model", "ffn"), (256, 2048, 512)),
        (("vocab", "model"), (248_320, 2048)),
        (("vocab", "model"), (259, 64)),  # the width does what the vocabulary cannot
        (("kv_heads", None, None, "model"), (2, 18, 256, 2048)),
        (("model", "heads", None), (2048, 16, 256)),
        ((None, "ffn", "model"), (2, 512, 2048)),
    ],
)
def test_large_weights_fall_into_as_many_parts_as_there_are_devices(axes, shape, mesh):
    assert parts(axes, shape, mesh) == mesh.devices


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_norms_and_routers_stay_whole(mesh):
    assert split((None,), (2048,), mesh) == ((),)
    assert split((None, "model"), (256, 2048), mesh) == ((), ())


def test_experts_and_their_insides_keep_to_their_own_axes():
    axes, shape = ("experts", None, "ffn", "model"), (6, 2, 64, 64)
    assert split(axes, shape, MeshShape(4, 2)) == ((), (), ("tensor",), ())  # 6 experts on 4 devices: each has all
    assert split(axes, shape, MeshShape(2, 4)) == (("expert",), (), ("tensor",), ())
    assert split(axes, (8, 2, 6, 64), MeshShape(2, 4)) == (("expert",), (), (), ())


def test_heads_lie_where_their_key_head_lies():
    mesh = MeshShape(4, 2)
    assert split(("heads",), (16,), mesh) == (("tensor", "expert"),)
    assert split(("kv_heads",), (2,), mesh) == (("tensor",),)
    assert split(("kv_heads",), (3,), mesh) == ((),)
