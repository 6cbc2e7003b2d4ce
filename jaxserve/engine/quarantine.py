"""Requests that made a step fail are not tried again for a while: clients retry, and each try costs everybody time.

Knows a request by a digest of what is asked. Time comes in as an argument. One thread adds, any thread may check.
"""

from __future__ import annotations

import array
import dataclasses
import hashlib

from jaxserve.engine.request import Request
from jaxserve.errors import Quarantined

CAPACITY = 1024


class Quarantine:
    """The last culprits.

    Args:
        seconds: how long a request is refused; 0 never refuses.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: dict[bytes, float] = {}

    def add(self, request: Request, now: float) -> None:
        """Refuses the like of this request from now on."""
        if self._seconds <= 0:
            return
        until = dict(self._until)  # a copy: the event loop may let one go at any moment
        if len(until) >= CAPACITY:
            del until[next(iter(until))]
        until[_digest(request)] = now + self._seconds
        self._until = until

    def check(self, request: Request, now: float) -> None:
        """Refuses what made a step fail a short while ago.

        Raises:
            Quarantined: this did.
        """
        if not self._until:
            return
        digest = _digest(request)
        until = self._until.get(digest)
        if until is None:
            return
        if now >= until:
            self._until.pop(digest, None)
            return
        raise Quarantined(f"this request made a step fail; it may be tried again in {until - now:.0f} s")


def _digest(request: Request) -> bytes:
    """Of what is asked, whoever asks and whatever the seed: a poisoned prompt stays one."""
    sampling = dataclasses.replace(request.sampling, seed=None)
    digest = hashlib.blake2b(repr(sampling).encode(), digest_size=16)
    digest.update(array.array("q", request.prompt))  # on the event loop, and prompts are long
    return digest.digest()
