"""Checkpoints: from foreign files to an immutable, verified folder, and from there into sharded arrays."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called as (phase, done, total); the unit is bytes unless the phase says otherwise. Returns at once."""


def silent(phase: str, done: int, total: int) -> None:
    """The progress nobody watches."""
