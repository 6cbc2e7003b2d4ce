"""Who may ask for what. Everything is denied but what a route declares: its scope, or that it is public.

The gate stands before everything that reads a request, and decides by the route that the router would take, never by
the URL's text or its ``Host``. Knows keys, scopes and lists of addresses. Knows no model and reads no body.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
from collections.abc import Callable, Iterable, Mapping

from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.config import AuthConfig
from jaxserve.errors import Forbidden, JaxserveError, Unauthenticated
from jaxserve.server import keys, peers
from jaxserve.server.keys import Key, KeyRing
from jaxserve.server.openai import error_response
from jaxserve.server.ratelimit import Charge, RateLimits
from jaxserve.server.watched import Watcher

logger = logging.getLogger(__name__)


class Access:
    """The keys that are valid now, what each may still use, and the lists of who may come at all.

    Args:
        config: the section ``auth``.
        host: the address that is listened on.

    Attributes:
        ring: the keys; ``None`` without a key file, and then whoever reaches the port may ask.
        limits: their accounts.
        on_revoked: called on the event loop with the id of a key whose running requests have to end.

    Raises:
        ConfigError: the key file or a list is not what it should be.
    """

    def __init__(self, config: AuthConfig | None = None, host: str = "127.0.0.1") -> None:
        self.config = config or AuthConfig()
        self.ring: KeyRing | None = None
        self.limits = RateLimits()
        self.on_revoked: Callable[[str], None] = lambda _: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loopback = peers.is_loopback(host)
        allow, hosts = self.config.allow, self.config.hosts
        self._allow = None if allow is None else peers.networks(allow, "auth.allow")
        self._proxies = peers.networks(self.config.proxies or (), "auth.proxies")
        self._hosts = peers.HostNames(() if self._loopback and hosts == "auto" else None, loopback=True)
        if isinstance(hosts, tuple):
            self._hosts = peers.HostNames(hosts)
        if self.config.keys is not None:
            self._install(keys.read_ring(self.config.keys))

    def announce(self) -> None:
        """Says in the log who may ask."""
        if self.ring is not None:
            logger.info("keys", extra={"fields": {"file": str(self.config.keys), "keys": len(self.ring.keys)}})
        elif not self._loopback:
            logger.warning("open to everybody who reaches the port: no key file is set (`auth.keys`)")

    def watch(self, watcher: Watcher) -> None:
        """Has the key file read anew when it changes."""
        if self.config.keys is not None:
            watcher.watch("keys", [self.config.keys], self.reload)
            self.reload()  # what has changed between the first reading and now

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on keys change on this loop only, between two steps of any request."""
        self._loop = loop

    def reload(self) -> None:
        """Reads the key file anew; from any thread.

        Raises:
            ConfigError: it is of no use, and the keys stay as they are.
        """
        if self.config.keys is None:
            return
        ring = keys.read_ring(self.config.keys)
        if self._loop is None:
            self._install(ring)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks any more
                self._loop.call_soon_threadsafe(self._install, ring)

    def _install(self, ring: KeyRing) -> None:
        now = datetime.datetime.now(datetime.UTC)
        before = {} if self.ring is None else self.ring.keys
        revoked = [key.id for key in before.values() if _is_revoked(key, ring.keys.get(key.id), now)]
        self.ring = ring
        self.limits.renew(ring.keys.values(), revoked)
        for name in revoked:
            logger.info("key revoked", extra={"fields": {"key": name}})
            if self.config.revoked_streams == "end":
                self.on_revoked(name)

    # --- one request --------------------------------------------------------------------------------------------------

    def check_peer(self, scope: Scope) -> None:
        """Raises ``Forbidden`` if the address it comes from, or the name it asks for, is not on the list."""
        if self._allow is not None and not peers.within(peers.client_address(scope, self._proxies), self._allow):
            raise Forbidden("Requests from this address are not served.", code="address_not_allowed")
        if not self._hosts.allow(scope):
            raise Forbidden("This server does not go by the name in the header Host.", code="host_not_allowed")

    def address(self, scope: Scope) -> str:
        """The client's address as text, for the audit log; empty if it is not known."""
        return str(peers.client_address(scope, self._proxies) or "")

    def authenticate(self, scope: Scope) -> Key | None:
        """The key of a request; ``None`` if none is needed because there is no key file.

        Raises:
            Unauthenticated: there is not exactly one key, or it is not valid.
        """
        if self.ring is None:
            return None
        shown = list(_shown(scope))
        if len(shown) != 1:
            message = "Give exactly one API key: 'Authorization: Bearer KEY', or 'x-api-key: KEY'."
            raise Unauthenticated(message)
        return self.ring.authenticate(shown[0], datetime.datetime.now(datetime.UTC))

    def enter(self, scope: Scope) -> Charge:
        """Lets an admitted request in by its key's limits; the gate settles what it takes.

        Raises:
            RateLimited: the key has used up its share.
            Unauthenticated: the key was revoked meanwhile.
        """
        charge: Charge = self.limits.enter(scope["state"]["key"])
        scope["state"]["charge"] = charge
        return charge


def _is_revoked(before: Key, after: Key | None, now: datetime.datetime) -> bool:
    """Whether the file takes a key back: it is gone, has another secret, or was given an end that has passed."""
    if after is None or after.sha256 != before.sha256:
        return True
    return after.expires is not None and after.expires != before.expires and after.expires <= now


def _shown(scope: Scope) -> Iterable[bytes]:
    """Every key that the headers hold; a header that holds none in the right form gives an empty one."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            yield key.strip() if scheme.lower() == b"bearer" else b""
        elif name == b"x-api-key":
            yield value.strip()


class Gate:
    """Lets in who may ask, and says in the answer what a key has left.

    Args:
        scopes: what each route's path needs; one that is not in here is closed to everybody.
    """

    def __init__(self, app: ASGIApp, access: Access, scopes: Mapping[str, keys.Scope]) -> None:
        self._app = app
        self._access = access
        self._scopes = scopes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sets ``key`` and ``tenant`` in ``scope["state"]``; whatever the request took of its key is settled here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope["state"]
        state["key"], state["tenant"] = None, ""
        try:
            self._admit(scope)
        except JaxserveError as error:
            state["error"] = error.code
            await error_response(error)(scope, receive, send)
            return
        key: Key | None = state["key"]

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *self._access.limits.headers(key)]}
            await send(message)

        try:
            await self._app(scope, receive, send if key is None else send_with_limits)
        finally:
            charge: Charge | None = state.get("charge")
            if charge is not None:
                charge.settle()

    def _admit(self, scope: Scope) -> None:
        """Raises if a request may not go on to its route, or to hear that there is none."""
        route = self._route(scope)
        if route is not None:
            scope["route"] = route  # for the logs, should it get no further
        needs = None if route is None else self._scopes.get(route.path)
        if needs is keys.Scope.PUBLIC:
            scope["state"]["public"] = True
            return
        self._access.check_peer(scope)
        if route is not None and needs is None:
            raise Forbidden("This URL is closed.")
        if needs is keys.Scope.ADMIN and (b"sec-fetch-site", b"cross-site") in scope["headers"]:
            raise Forbidden("Another site's pages may not do this.", code="cross_site")
        if needs is keys.Scope.METRICS and self._access.config.public_metrics:
            return
        key = self._access.authenticate(scope)
        if key is None:
            return
        scope["state"]["key"], scope["state"]["tenant"] = key, key.id
        if needs is not None and needs not in key.scopes:
            raise Forbidden(f"This API key may not do this: it lacks the scope '{needs}'.")

    def _route(self, scope: Scope) -> Route | None:
        """The route that the router will take: what a route needs, its refusal of a method needs, too."""
        found: BaseRoute | None = None
        for route in scope["app"].routes:
            match = route.matches(scope)[0]
            if match is Match.FULL:
                found = route
                break
            if match is Match.PARTIAL:
                found = found or route
        if found is not None and not isinstance(found, Route):
            raise Forbidden("This URL is closed.")
        return found
