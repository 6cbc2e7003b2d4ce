"""How much a key may use: requests and tokens a minute, and requests at once.

A request enters before its body is read, reserves tokens once its prompt is known, and settles when it is over, however
it ended: what it reserved and did not use goes back. Knows keys and a monotonic clock. Knows no HTTP, apart from the
names of the headers that say what is left. Used from one event loop.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

from jaxserve.errors import InvalidRequest, RateLimited, Unauthenticated
from jaxserve.server.keys import Key, KeyLimits

_MINUTE = 60.0
_BUSY_SECONDS = 1.0  # nobody knows when a running request ends


class Bucket:
    """``capacity`` units that come back evenly within a minute. Times are seconds of a clock that never goes back."""

    def __init__(self, capacity: int, now: float) -> None:
        self.capacity = capacity
        self._level = float(capacity)
        self._at = now

    def level(self, now: float) -> float:
        """Units that are there."""
        if now > self._at:
            self._level = min(self.capacity, self._level + (now - self._at) * self.capacity / _MINUTE)
            self._at = now
        return self._level

    def wait(self, amount: float, now: float) -> float:
        """Seconds until ``amount`` units are there, if nobody takes any."""
        return max(0.0, amount - self.level(now)) * _MINUTE / self.capacity

    def take(self, amount: float, now: float) -> None:
        """Takes units that ``wait`` has found."""
        self._level = self.level(now) - amount

    def give(self, amount: float, now: float) -> None:
        """Brings units back that were taken and not used; there are never more than ``capacity``."""
        self._level = min(self.capacity, self.level(now) + amount)


class _Account:
    """What a key has left."""

    def __init__(self) -> None:
        self.limits = KeyLimits()
        self.requests: Bucket | None = None
        self.input: Bucket | None = None
        self.output: Bucket | None = None
        self.running = 0
        self.revoked = False

    def adopt(self, limits: KeyLimits, now: float) -> None:
        """Goes on under these limits; what is used up stays used up."""
        if limits == self.limits:
            return
        self.limits = limits
        self.requests = _resized(self.requests, limits.requests_per_minute, now)
        self.input = _resized(self.input, limits.input_tokens_per_minute, now)
        self.output = _resized(self.output, limits.output_tokens_per_minute, now)


class Charge:
    """What one request has taken of its key's limits; a request without a key takes nothing."""

    def __init__(self, account: _Account | None, clock: Callable[[], float]) -> None:
        self._account = account
        self._clock = clock
        self._input = 0
        self._output = 0
        self._spent: Callable[[], int] | None = None
        self._open = True

    def reserve(self, input_tokens: int, output_tokens: int) -> None:
        """Takes the prompt's tokens and as many as may be generated, over all choices; all of it or nothing.

        Raises:
            RateLimited: they are not there yet.
            InvalidRequest: they never will be.
            Unauthenticated: the key was revoked meanwhile.
        """
        account = self._account
        if account is None:
            return
        if account.revoked:
            raise _revoked()
        now = self._clock()
        wanted = _wanted(account, input_tokens, output_tokens)
        for bucket, amount, what in wanted:
            if amount > bucket.capacity:
                raise _beyond(what, amount, bucket.capacity)
        wait, what = max(((bucket.wait(amount, now), what) for bucket, amount, what in wanted), default=(0.0, ""))
        if wait > 0:
            raise RateLimited(f"This key has used up its {what} tokens for now.", kind="tokens", retry_after=wait)
        for bucket, amount, _ in wanted:
            bucket.take(amount, now)
        # Only what was taken can come back: a limit that the key gets meanwhile has lent nothing.
        self._input = 0 if account.input is None else input_tokens
        self._output = 0 if account.output is None else output_tokens

    def begin(self, spent: Callable[[], int]) -> None:
        """The engine has the request; ``spent`` tells at any time how many tokens it has generated."""
        self._spent = spent

    def settle(self) -> None:
        """The request is over: what it did not use goes back. More than once is as good as once."""
        account = self._account
        if account is None or not self._open:
            return
        self._open = False
        account.running -= 1
        now = self._clock()
        if account.output is not None:
            used = 0 if self._spent is None else min(self._spent(), self._output)
            account.output.give(self._output - used, now)
        if account.input is not None and self._spent is None:
            account.input.give(self._input, now)


def _wanted(account: _Account, input_tokens: int, output_tokens: int) -> list[tuple[Bucket, int, str]]:
    wanted = [(account.input, input_tokens, "input"), (account.output, output_tokens, "output")]
    return [(bucket, amount, what) for bucket, amount, what in wanted if bucket is not None]


class RateLimits:
    """The accounts of all keys; without a key file there are none, and nothing is limited.

    Args:
        clock: seconds that only go forwards, whatever happens to the wall clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def renew(self, keys: Iterable[Key], revoked: Iterable[str] = ()) -> None:
        """Goes on with these keys; those that were there before keep what they have left.

        ``revoked`` are ids under which nothing may go on, even if a new key has taken the id over.
        """
        for name in revoked:
            account = self._accounts.pop(name, None)
            if account is not None:
                account.revoked = True
        before, self._accounts = self._accounts, {}
        now = self._clock()
        for key in keys:
            account = self._accounts[key.id] = before.get(key.id) or _Account()
            account.adopt(key.limits, now)

    def enter(self, key: Key | None) -> Charge:
        """Lets a request in, before anything of it is read; it must ``settle`` in the end.

        Raises:
            RateLimited: the key has as many requests running as it may, or has used up its minute.
            Unauthenticated: the key was revoked meanwhile.
        """
        if key is None:
            return Charge(None, self._clock)
        account = self._accounts.get(key.id)
        if account is None:
            raise _revoked()
        now = self._clock()
        most = account.limits.concurrency
        if most is not None and account.running >= most:
            message = f"This key has {most} requests running, as many as it may."
            raise RateLimited(message, retry_after=_BUSY_SECONDS)
        if account.requests is not None:
            wait = account.requests.wait(1, now)
            if wait > 0:
                raise RateLimited("This key has used up its requests for now.", retry_after=wait)
            account.requests.take(1, now)
        account.running += 1
        return Charge(account, self._clock)

    def headers(self, key: Key | None) -> list[tuple[bytes, bytes]]:
        """What a key has left, by OpenAI's names; of the two kinds of tokens, the one that is scarcer."""
        account = None if key is None else self._accounts.get(key.id)
        if account is None:
            return []
        now = self._clock()
        tokens = [bucket for bucket in (account.input, account.output) if bucket is not None]
        scarcest = min(tokens, key=lambda bucket: bucket.level(now) / bucket.capacity, default=None)
        shown = [("requests", account.requests), ("tokens", scarcest)]
        return [line for kind, bucket in shown if bucket is not None for line in _lines(kind, bucket, now)]


def _resized(bucket: Bucket | None, capacity: int | None, now: float) -> Bucket | None:
    if capacity is None:
        return None
    resized = Bucket(capacity, now)
    if bucket is not None:
        resized.take(min(capacity, bucket.capacity - bucket.level(now)), now)
    return resized


def _revoked() -> Unauthenticated:
    return Unauthenticated("This API key was revoked.")


def _beyond(what: str, amount: int, capacity: int) -> InvalidRequest:
    """Waiting would not help, so this is no matter of the rate."""
    read = what == "input"
    does = f"has {amount:,} input tokens" if read else f"may generate {amount:,} tokens"
    advice = "shorten the prompt" if read else "set 'max_tokens' or 'n' lower"
    message = f"The request {does}, and this key may use {capacity:,} a minute: {advice}."
    return InvalidRequest(message, param=None if read else "max_tokens", code="exceeds_key_limit")


def _lines(kind: str, bucket: Bucket, now: float) -> list[tuple[bytes, bytes]]:
    left = bucket.level(now)
    values = {
        "limit": str(bucket.capacity),
        "remaining": str(math.floor(left)),
        "reset": _duration(bucket.wait(bucket.capacity, now)),
    }
    return [(f"x-ratelimit-{name}-{kind}".encode(), value.encode()) for name, value in values.items()]


def _duration(seconds: float) -> str:
    """As OpenAI writes it: ``120ms``, ``7.5s``, ``1m0s``."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < _MINUTE:
        return f"{seconds:.3g}s"
    return f"{int(seconds // _MINUTE)}m{int(seconds % _MINUTE)}s"
