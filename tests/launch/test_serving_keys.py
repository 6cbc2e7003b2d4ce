"""Keys, the audit log and TLS in the process that an operator starts."""

from __future__ import annotations

import json
import signal
import ssl
import time

import httpx2
import pytest
import trustme

from jaxserve.server.keys import Scope, changing, create
from tests.rigs.served import Served, started


@pytest.fixture(scope="module")
def issued(tmp_path_factory):
    """A key file, and two keys in it by client."""
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    shown = {}
    for client in ("one", "two"):
        key, shown[client] = create(client, (Scope.INFER, Scope.METRICS))
        with changing(path) as keys:
            keys.append(key)
    return path, shown


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def server(issued, authority, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    certificate.private_key_and_cert_chain_pem.write_to_path(folder / "tls.pem")
    flags = ["--auth.keys", str(issued[0]), "--tls.certificate", str(folder / "tls.pem")]
    with started(*flags, "--engine.pools", "4x128", "--audit.file", str(folder / "audit")) as server:
        server.audit = folder / "audit"
        end = time.monotonic() + 240
        while httpx2.get(server.probe_url + "/readyz").status_code != 200:
            assert time.monotonic() < end
            time.sleep(0.1)
        yield server


@pytest.fixture
def client(server: Served, authority, issued):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.configure_trust(context)
    headers = {"x-api-key": issued[1]["one"]}
    with httpx2.Client(base_url=server.url, verify=context, headers=headers, timeout=60) as client:
        yield client


def wait_for(condition) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_key_opens_it_over_tls(client, server):
    assert server.url.startswith("https://")
    assert client.post("/generate", json={"prompt": "a", "max_tokens": 3}).status_code == 200
    assert client.get("/v1/models", headers={"x-api-key": "jx_none_x"}).status_code == 401
    assert client.get("/v1/models", headers={"host": "evil.example.com"}).status_code == 403


def test_keys_change_while_it_runs(client, server, issued):
    path, shown = issued
    other = {"x-api-key": shown["two"]}
    assert client.get("/v1/models", headers=other).status_code == 200
    with changing(path) as keys:
        keys.pop()
    wait_for(lambda: client.get("/v1/models", headers=other).status_code == 401)
    good = path.read_text()
    path.write_text("- {")
    failures = 'jaxserve_config_reload_failures_total{file="keys"} 1.0'
    wait_for(lambda: failures in client.get("/metrics").text)
    assert client.get("/v1/models").status_code == 200
    path.write_text(good)
    server.process.send_signal(signal.SIGHUP)
    assert client.get("/v1/models").status_code == 200


def test_every_line_is_there_when_it_has_ended(client, server, issued):
    asked = client.get("/v1/models", headers={"x-request-id": "the-last"}).status_code
    assert server.stop() == 0
    entries = [json.loads(line) for line in server.audit.read_text().splitlines()]
    assert (entries[-1]["request_id"], entries[-1]["status"], entries[-1]["client"]) == ("the-last", asked, "one")
    written = server.audit.read_text() + "".join(server.lines)
    assert not any(shown.rpartition("_")[2] in written for shown in issued[1].values())
