"""Addresses and names: proxies are believed only where they are configured, and a page's own name opens nothing."""

from __future__ import annotations

import pytest

from jaxserve.errors import ConfigError
from jaxserve.server.peers import HostNames, client_address, is_loopback, networks, within


def scope(peer: str | None = "10.0.0.1", **headers: str | list[str]) -> dict:
    lines = [
        (name.replace("_", "-").encode(), value.encode("latin-1"))
        for name, values in headers.items()
        for value in ([values] if isinstance(values, str) else values)
    ]
    return {"client": (peer, 1) if peer else None, "headers": lines}


@pytest.mark.parametrize(
    ("name", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        ("a.localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("127.0.0.1.example.com", False),
        ("localhost.example.com", False),
        ("notlocalhost", False),
        ("2130706433", False),
        ("127.1", False),
        ("", False),
    ],
)
def test_loopback(name, loopback):
    assert is_loopback(name) is loopback


PROXIES = networks(["10.0.0.0/8", "fd00::/8"], "auth.proxies")


@pytest.mark.parametrize(
    ("peer", "forwarded", "address"),
    [
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", ["1.2.3.4"], "1.2.3.4"),
        ("10.0.0.1", ["6.6.6.6, 1.2.3.4"], "1.2.3.4"),
        ("10.0.0.1", ["6.6.6.6", "1.2.3.4"], "1.2.3.4"),
        ("10.0.0.1", ["1.2.3.4, 10.9.9.9"], "1.2.3.4"),
        ("10.0.0.1", ["10.9.9.9"], "10.9.9.9"),
        ("10.0.0.1", ["1.2.3.4:567"], "1.2.3.4"),
        ("10.0.0.1", ["[2001:db8::1]:567"], "2001:db8::1"),
        ("fd00::1", ["2001:db8::1"], "2001:db8::1"),
        ("::ffff:10.0.0.1", ["1.2.3.4"], "1.2.3.4"),
        ("10.0.0.1", ["nonsense"], None),
        ("10.0.0.1", [""], None),
        ("10.0.0.1", ["1.2.3.4, nonsense"], None),
        ("5.5.5.5", ["1.2.3.4"], "5.5.5.5"),
        ("5.5.5.5", ["10.0.0.1"], "5.5.5.5"),
        (None, ["1.2.3.4"], None),
    ],
)
def test_who_asks(peer, forwarded, address):
    found = client_address(scope(peer, x_forwarded_for=forwarded), PROXIES)
    assert (None if found is None else str(found)) == address


def test_without_proxies_nobody_speaks_for_others():
    assert str(client_address(scope("10.0.0.1", x_forwarded_for="1.2.3.4"), ())) == "10.0.0.1"


def test_a_network_holds_its_addresses():
    allowed = networks(["192.168.1.0/24", "2001:db8::/32", "8.8.8.8"], "auth.allow")
    inside = ["192.168.1.7", "8.8.8.8", "2001:db8::7"]
    outside = ["192.168.2.7", "8.8.8.9", "2001:db9::7"]
    assert [within(client_address(scope(peer), ()), allowed) for peer in inside + outside] == [True] * 3 + [False] * 3
    assert not within(None, allowed)


@pytest.mark.parametrize("text", ["", "x", "10.0.0.0/33", "10.0.0.1/8", "10.0.0", "*"])
def test_what_is_no_network(text):
    with pytest.raises(ConfigError, match=r"`auth\.allow` takes addresses and networks") as caught:
        networks([text], "auth.allow")
    assert caught.value.param == "auth.allow"


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost", True),
        ("LOCALHOST:8000", True),
        ("localhost.", True),
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        ("[::1]", True),
        ("evil.example.com", False),
        ("127.0.0.1.evil.example.com", False),
        ("localhost.evil.example.com:80", False),
        ("evil.example.com:127.0.0.1", False),
        ("0.0.0.0", False),
        ("", False),
        ("localhost:80:90", False),
        ("user@localhost", False),
        ("loc\xe4lhost", False),
    ],
)
def test_names_on_loopback(host, allowed):
    assert HostNames((), loopback=True).allow(scope(host=host)) is allowed


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("api.example.com", True),
        ("API.example.com.:443", True),
        ("a.models.example.com", True),
        ("models.example.com", False),
        ("a.b.models.example.com", False),
        ("example.com", False),
        ("localhost", False),
        ("api.example.com.evil.com", False),
    ],
)
def test_names_on_a_list(host, allowed):
    assert HostNames(["api.Example.com", "*.models.example.com"]).allow(scope(host=host)) is allowed


def test_there_is_exactly_one_name():
    names = HostNames(["a"])
    assert names.allow(scope(host="a"))
    assert not names.allow(scope())
    assert not names.allow(scope(host=["a", "a"]))
    assert HostNames(None).allow(scope(host=["a", "b"]))
