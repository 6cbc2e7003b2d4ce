"""Chunks that never pass the end of a slot, and are the same whenever a text is read again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.config import Pool
from tests.plan.toys import SHAPE, planned


@given(length=st.integers(2, 5000), data=st.data(), buckets=st.sampled_from(["auto", (16, 64), (8,), (32, 64, 1024)]))
def test_chunks_cover_the_prompt_and_stay_inside_the_slot(length, data, buckets):
    pool = planned(Pool(1, length), prefill_buckets=buckets).pools[0]
    assert pool.positions >= length
    assert pool.positions % min(SHAPE.key_block, pool.positions) == 0
    count = data.draw(st.integers(0, length - 1))
    at = 0
    for chunk in pool.chunks(count):
        assert chunk.start == at
        assert 1 <= chunk.count <= chunk.bucket
        assert chunk.bucket in pool.buckets
        assert chunk.start + chunk.bucket <= pool.positions
        at += chunk.count
    assert at == count
    padding = sum(chunk.bucket - chunk.count for chunk in pool.chunks(count))
    assert padding < max(count, pool.buckets[0]) + 1


def test_chunks_by_hand():
    pool = planned(Pool(1, 2048)).pools[0]
    sizes = {count: [chunk.bucket for chunk in pool.chunks(count)] for count in (0, 1, 32, 33, 128, 130, 300, 1100)}
    assert sizes == {
        0: [],
        1: [32],
        32: [32],
        33: [32, 32],
        128: [128],
        130: [128, 32],
        300: [512],
        1100: [512, 512, 128],
    }


@given(st.integers(1, 300), st.data())
def test_a_text_that_is_read_again_is_all_there_and_its_prompt_as_before(prompt, data):
    pool = planned(Pool(2, 512)).pools[0]
    known = data.draw(st.integers(prompt, 512))
    chunks, own = pool.chunks_again(prompt, known), pool.chunks(prompt - 1)
    assert chunks[len(chunks) - len(own) :] == own
    assert all(chunk.start + chunk.bucket <= pool.positions for chunk in chunks)
    if known > prompt:
        read = {at for chunk in chunks for at in range(chunk.start, chunk.start + chunk.bucket)}
        assert read >= set(range(known))
