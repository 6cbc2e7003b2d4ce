"""The simulated world as hypothesis' state machine: which order of events goes wrong, and the shortest that does."""

from __future__ import annotations

import random

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from jaxserve.testing import HashDevice
from tests.rigs.simulate import RARE, USUAL, Leaky, Short, Violation, World


class Machine(RuleBasedStateMachine):
    """Any order of events; the world checks itself after each, and at the end."""

    world: World | None = None
    device = HashDevice

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed):
        self.world = World(random.Random(seed), self.device)
        self.world.breaks = True

    @rule(kind=st.sampled_from(sorted(USUAL)), times=st.integers(1, 5))
    def usual(self, kind, times):
        for _ in range(times):
            self.world.happen(kind)

    @rule(kind=st.sampled_from(sorted(RARE)))
    def rare(self, kind):
        self.world.happen(kind)

    def teardown(self):
        if self.world is not None:
            self.world.settle()


Machine.TestCase.settings = hypothesis.settings(
    max_examples=60, stateful_step_count=60, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
test_any_order_of_events = Machine.TestCase


@pytest.mark.parametrize("wrong", [Leaky, Short])
def test_a_planted_leak_is_found(wrong):
    class Planted(Machine):
        device = wrong

    settings = hypothesis.settings(Machine.TestCase.settings, phases=[hypothesis.Phase.generate], derandomize=True)
    with pytest.raises(Violation):
        run_state_machine_as_test(Planted, settings=settings)
