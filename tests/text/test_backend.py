from __future__ import annotations

import pytest

from jaxserve.text.backend import fallback_byte


@pytest.mark.parametrize(
    ("spelling", "byte"),
    [("<0x00>", b"\x00"), ("<0xE2>", b"\xe2"), ("<0xff>", b"\xff"), ("<0xE>", None), ("<0xE2>x", None), ("a", None)],
)
def test_fallback_byte(spelling, byte):
    assert fallback_byte(spelling) == byte
