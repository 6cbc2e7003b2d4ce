"""A request whose answer is known: asked when the numbers look wrong, to tell a bad request from a bad device.

Knows how often is too often. Knows no engine; time comes in as an argument.
"""

from __future__ import annotations

import dataclasses
from collections import deque

from jaxserve.engine.request import Delta, Request
from jaxserve.errors import NumericalError

ERRORS, SECONDS = 3, 60.0


class Canary:
    """Watches for non-finite numbers and for the answer to the known request.

    Args:
        request, tokens: the request, and the greedy tokens that it must give; without them nothing is ever asked.

    Attributes:
        sick: the answer was wrong.
    """

    def __init__(self, request: Request | None = None, tokens: tuple[int, ...] = ()) -> None:
        self._request = request
        self._expected = tokens
        self._errors: deque[float] = deque(maxlen=ERRORS)
        self._given: list[int] | None = None
        self._asked = 0
        self.sick = False

    def error(self, now: float) -> Request | None:
        """A request gave a non-finite number; returns what to ask, if that has come too often."""
        self._errors.append(now)
        often = len(self._errors) == ERRORS and now - self._errors[0] <= SECONDS
        if not often or self._request is None or self._given is not None:
            return None
        self._errors.clear()
        self._given = []
        self._asked += 1
        return dataclasses.replace(self._request, id=f"canary-{self._asked}")

    def is_asked(self, request_id: str) -> bool:
        """Whether this is the known request, asked just now."""
        return self._given is not None and request_id == f"canary-{self._asked}"

    def hear(self, delta: Delta) -> None:
        """What the known request was answered. That it had no time, or was ended, says nothing about numbers."""
        if self._given is None:
            return
        self._given += delta.tokens
        if delta.finish_reason is None:
            return
        if delta.error is None or isinstance(delta.error, NumericalError):
            self.sick = self.sick or tuple(self._given) != self._expected
        self._given = None
