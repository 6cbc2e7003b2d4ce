"""The plan's programs, all of them and nothing else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxserve.engine.programs import CompileWatch, Programs
from jaxserve.errors import DeviceFault


def test_the_watch_counts_from_the_moment_it_is_armed():
    heard = []
    watch = CompileWatch()
    jax.jit(lambda x: x * 3 + 1)(jnp.arange(11))
    assert watch.count == 0
    watch.arm(lambda: heard.append(1))
    jax.jit(lambda x: x * 5 + 1)(jnp.arange(12))
    assert watch.count == len(heard) >= 1
    watch.close()
    count = watch.count
    jax.jit(lambda x: x * 7 + 1)(jnp.arange(13))
    assert watch.count == count


def test_exactly_the_plan_is_compiled(tiny):
    programs = tiny.device.programs
    assert tuple(programs._executables) == tiny.plan.programs()
    assert set(programs.workspace_bytes()) == set(tiny.plan.programs())
    assert max(programs.workspace_bytes().values()) <= tiny.plan.workspace_bytes


def test_a_program_that_cannot_be_compiled_is_named(tiny, monkeypatch):
    def refuse(self, program):
        raise RuntimeError(f"no room\nfor {program}")

    monkeypatch.setattr(Programs, "_trace", refuse)
    with pytest.raises(DeviceFault, match=r"`prefill pool 0 bucket 32` cannot be compiled: no room$"):
        tiny.device.programs.compile(lambda phase, done, total: None)
