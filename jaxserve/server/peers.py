"""Where a request comes from, and which server it believes to ask: addresses, proxies and the header ``Host``.

Knows networks and names. Knows no key and no route.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from starlette.types import Scope

from jaxserve.errors import ConfigError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def is_loopback(name: str) -> bool:
    """Whether ``name``, an address or a host's name, can only mean this machine."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    address = _address(name)
    return address is not None and address.is_loopback


def networks(given: Sequence[str], setting: str) -> tuple[Network, ...]:
    """Addresses and networks of a setting.

    Raises:
        ConfigError: one is neither.
    """
    found = []
    for text in given:
        try:
            found.append(ipaddress.ip_network(text.strip()))
        except ValueError:
            message = f"`{setting}` takes addresses and networks like 10.0.0.0/8, not {text[:60]!r}."
            raise ConfigError(message, param=setting) from None
    return tuple(found)


def within(address: Address | None, allowed: Sequence[Network]) -> bool:
    """Whether an address lies in one of the networks; one that is not known lies in none."""
    return address is not None and any(address in network for network in allowed)


def client_address(scope: Scope, proxies: Sequence[Network]) -> Address | None:
    """Who asks: the peer or, if it is one of ``proxies``, the nearest address before them in ``X-Forwarded-For``."""
    peer = scope.get("client")
    address = _address(peer[0]) if peer else None
    lines = [value.decode("latin-1") for name, value in scope["headers"] if name == b"x-forwarded-for"]
    hops = [hop for line in lines for hop in line.split(",")]
    while hops and within(address, proxies):
        address = _address(_without_port(hops.pop().strip()))
    return address


class HostNames:
    """The names that ``Host`` may give; against pages whose own name was made to mean this machine.

    Args:
        names: host names without ports, ``*.example.com`` for those below one; ``None`` for any.
        loopback: whether the names and addresses of this machine are allowed, too.
    """

    def __init__(self, names: Sequence[str] | None, *, loopback: bool = False) -> None:
        self._any = names is None
        self._names = frozenset(name.lower() for name in names or ())
        self._loopback = loopback

    def allow(self, scope: Scope) -> bool:
        """Whether there is exactly one ``Host``, and a name on the list in it."""
        if self._any:
            return True
        given = [value for name, value in scope["headers"] if name == b"host"]
        if len(given) != 1:
            return False
        name = _without_port(given[0].decode("latin-1").strip().lower()).removesuffix(".")
        below = "*" + name[name.find(".") :] if "." in name else ""
        return name in self._names or below in self._names or (self._loopback and is_loopback(name))


def _without_port(text: str) -> str:
    """``[::1]:80``, ``::1``, ``1.2.3.4:80`` or ``name:80`` without brackets and port."""
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0] if text.count(":") == 1 else text


def _address(text: str) -> Address | None:
    """An address; one of IPv4 that is written as IPv6 becomes what it is."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
