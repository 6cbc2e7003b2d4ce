"""Who shares a prompt: one reads it, the others wait and get a copy of its slot when all of it is read.

The copy is made before the reader's first step. Rings and recurrent layers hold the end of the prompt then, and of
nothing else; so a copy is what reading would have given, bit for bit. Who comes later reads for itself.

Knows no slot's number and no device.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxserve.engine.work import ForkWork, Running


def reader(running: Running, held: Iterable[Running]) -> Running | None:
    """Who of those that hold a slot reads the same prompt just now."""
    return next((one for one in held if one.source is None and not one.decoding and _alike(running, one)), None)


def due(held: Iterable[Running]) -> tuple[ForkWork, ...]:
    """Copies of prompts that are read now; who gets one is ready."""
    works = []
    for one in held:
        if one.source is not None and one.source.ready:
            works.append(ForkWork(one.source, one))
            one.source = None
    return tuple(works)


def heir(gone: Running, held: Iterable[Running]) -> Running | None:
    """Who has to read now, because somebody has gone in the middle of it; the others wait for that one."""
    left = sorted((one for one in held if one.source is gone), key=lambda one: one.arrived)
    if not left:
        return None
    first, *others = left
    first.source = None
    for one in others:
        one.source = first
    return first


def _alike(one: Running, other: Running) -> bool:
    """Nobody learns by timing what others ask: only who says so shares, and only within a tenant."""
    mine, its = one.request, other.request
    related = (mine.group, mine.tenant, one.pool) == (its.group, its.tenant, other.pool)
    return bool(mine.group) and related and mine.prompt == its.prompt
