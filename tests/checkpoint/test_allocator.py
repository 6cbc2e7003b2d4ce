"""Large buffers go back while a checkpoint is read, and are kept again behind it."""

from __future__ import annotations

import ctypes
import platform

import pytest

from jaxserve.checkpoint import allocator


class Library:
    """A C library that remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []

    def mallopt(self, name: int, value: int) -> int:
        self.told.append((name, value))
        return 1


def test_it_is_told_and_told_back_whatever_happens(monkeypatch):
    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    inside = allocator.returned_at_once()
    inside.__enter__()
    assert library.told == [(-3, 4 << 20)]
    assert not inside.__exit__(ValueError, ValueError("x"), None)
    assert library.told[1:] == [(-3, 32 << 20), (-1, 64 << 20)]


def test_another_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    with allocator.returned_at_once():
        pass


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_the_real_one_takes_it():
    assert ctypes.CDLL(None).mallopt(-3, 32 << 20) == 1
    with allocator.returned_at_once():
        pass
