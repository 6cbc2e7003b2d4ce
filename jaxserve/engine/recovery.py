"""After a failed step: whose request made it fail?

A failed step has eaten the donated cache, so everybody has to be read again anyway. Before that, halves of those who
were in it are tried on an empty device until one request is left that fails alone: at most log2(n) + 4 trials. Trials
read all known tokens as a prompt and decode a few steps; what they write is thrown away. Who is blamed has failed
alone twice: another fault may have come in between.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from jaxserve.engine.device import Admission, Device
from jaxserve.engine.request import Request, SamplingParams
from jaxserve.engine.work import Running
from jaxserve.errors import DeviceFault, EngineError, JaxserveError, NumericalError

logger = logging.getLogger(__name__)

# A request that does nothing out of the way: if even this fails, no request is to blame. One chunk and two steps: were
# it as long as the culprit, a length that does not work would end the process, and the next one when it is asked again.
PROBE = Request("probe", (0, 0), SamplingParams(max_tokens=2, temperature=0.0))


class NothingFinite(Exception):
    """All rows of a dispatch, and there were several, hold non-finite numbers: a fault of the device, not of a row."""


class Recovery:
    """Trials on a device whose slots are lost.

    Args:
        stop_ids: the tokens that end a request.
        beat: called before each trial: a recovery is slow, but it moves.
    """

    def __init__(self, device: Device, stop_ids: Callable[[Request], Sequence[int]], beat: Callable[[], None]) -> None:
        self._device = device
        self._stop_ids = stop_ids
        self._beat = beat

    def culprit(self, suspects: Sequence[Running]) -> tuple[Running, JaxserveError] | None:
        """Who fails alone, and with what, or ``None`` if the fault does not come again. Leaves the device to be reset.

        Raises:
            DeviceFault: a harmless request fails as well.
        """
        group = list(suspects)
        while len(group) > 1:
            half = group[: len(group) // 2]
            group = half if self._fault(half) else group[len(half) :]
        error = self._fault_twice(group) if group else None
        if error is None:
            return None
        # In the culprit's own pool: each pool has programs of its own, and one of them may be what is broken.
        fault = self._fault_twice([Running(PROBE, pool=group[0].pool, arrived=0.0, seed=0, slot=0)])
        if fault is not None:
            raise DeviceFault(f"steps fail whoever is in them: {fault.message}")
        return group[0], error

    def _fault_twice(self, group: Sequence[Running]) -> JaxserveError | None:
        return self._fault(group) and self._fault(group)

    def _fault(self, group: Sequence[Running]) -> JaxserveError | None:
        """What happens when a group is read and decodes for as long as two dispatches, with nobody beside it."""
        self._beat()
        try:
            return self._try(group)
        except Exception as fault:  # noqa: BLE001 - that it fails is the answer
            logger.info("a trial failed", extra={"fields": {"requests": len(group), "error": type(fault).__name__}})
            return EngineError("the step failed again with this request alone")

    def _try(self, group: Sequence[Running]) -> JaxserveError | None:
        device = self._device
        device.reset()
        for one in group:
            tokens, pool = one.tokens, device.plan.pools[one.pool]
            read = pool.read(len(tokens))
            for chunk in pool.chunks(read):
                device.prefill(one.pool, one.slot, chunk, tokens)
            admission = Admission(one.request, tokens, self._stop_ids(one.request), one.seed, read)
            device.admit(one.pool, one.slot, admission)
        finite = [
            self._decode(pool, [one.slot for one in group if one.pool == pool])
            for pool in sorted({one.pool for one in group})
        ]
        return None if all(finite) else NumericalError("the model produced a number that is not finite")

    def _decode(self, pool: int, slots: Sequence[int]) -> bool:
        steps = self._device.plan.steps_per_dispatch
        logs = [self._device.run(pool, slots, steps).read() for _ in range(2)]
        return any(all(log.of(slot, None).finite for log in logs) for slot in slots)
