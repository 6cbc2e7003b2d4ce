"""The types that are this server's own: strict, and silent about what is not there."""

from __future__ import annotations

import msgspec
import pytest

from jaxserve.server.extensions import BlockUpdate, Parallel, TracedPass


def test_types_are_strict():
    for wrong in (b'{"draft_tokens": true}', b'{"mask_threshold": "1"}', b'{"mode": 3}', b"[]"):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(wrong, type=Parallel)
    assert msgspec.json.decode(b'{"new": 1, "mask_threshold": 1}', type=Parallel) == Parallel(mask_threshold=1.0)


def test_what_did_not_happen_is_left_out():
    assert msgspec.to_builtins(TracedPass(choice=0, step=3, committed=2, masks=0)) == {
        "choice": 0,
        "step": 3,
        "committed": 2,
        "masks": 0,
    }


def test_an_update_is_a_chunk_without_choices():
    found = msgspec.to_builtins(BlockUpdate(choice=1, block_index=0, text="a", tokens=["a"], changed=[0]))
    assert (found["choices"], found["object"], found["choice"]) == ([], "block.update", 1)
    assert "id" not in found
