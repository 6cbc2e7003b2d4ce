"""The process listens where it was told to, and nowhere else; and it speaks to nobody who has not spoken first."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import httpx2
import psutil
import pytest

from tests.rigs.served import Served, started

# Runs before anything else in the server and in whatever it starts: every way out is written down.
WATCH = """
import json, os, sys
def watch(event, given):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto", "os.system", "subprocess.Popen"):
        line = json.dumps([event, repr(given[1:])]) + chr(10)
        with open(os.environ["WATCHED"], "a") as file:
            file.write(line)
sys.addaudithook(watch)
"""
LINKS = (
    {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}},
    {"type": "file", "file_url": "http://127.0.0.1:9/x"},
    {"type": "text", "text": "see http://127.0.0.1:9/x"},
)


@pytest.fixture(scope="module")
def watched(tmp_path_factory) -> Path:
    """A folder that puts the watch into every Python, and the file it writes."""
    folder = tmp_path_factory.mktemp("watch")
    (folder / "sitecustomize.py").write_text(WATCH)
    (folder / "seen").touch()
    return folder


@pytest.fixture(scope="module")
def server(watched):
    environment = {"PYTHONPATH": str(watched), "WATCHED": str(watched / "seen"), "JAX_PLATFORMS": "cpu"}
    with started(environment=environment) as server:
        server.wait_until_ready()
        yield server


def sockets(server: Served) -> list[tuple[str, tuple[str, int]]]:
    """State and own address of every internet socket of the process and its children."""
    parent = psutil.Process(server.process.pid)
    return [
        (connection.status, (connection.laddr.ip, connection.laddr.port))
        for process in (parent, *parent.children(recursive=True))
        for connection in process.net_connections(kind="inet")
    ]


def address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return host, int(port)


def test_it_listens_where_it_was_told_to(server: Served):
    wanted = sorted([address(server.url), address(server.probe_url)])
    found = sorted(own for state, own in sockets(server) if state == psutil.CONN_LISTEN)
    assert found == wanted
    with httpx2.Client(base_url=server.url) as client:
        client.get("/livez")
        assert {own for _, own in sockets(server)} <= set(wanted)  # what is connected came in by one of them


def test_it_speaks_to_nobody_who_has_not_spoken_first(server: Served, watched):
    for part in LINKS:
        body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 2}
        assert httpx2.post(server.url + "/v1/chat/completions", json=body, timeout=60).status_code in (200, 400)
    headers = {"x-forwarded-for": "127.0.0.1", "x-request-id": "http://127.0.0.1:9/", "referer": "http://127.0.0.1:9/"}
    assert httpx2.get(server.url + "/v1/models", headers=headers).status_code == 200
    seen = [json.loads(line) for line in (watched / "seen").read_text().splitlines()]
    # The listener's own name is looked up once, before it listens.
    assert [event for event in seen if event[0] != "socket.getaddrinfo"] == []
    assert all("127.0.0.1" in given or "None" in given for _, given in seen)


def test_control_the_watch_would_see(watched, tmp_path):
    import os
    import subprocess
    import sys

    code = "import socket; s = socket.socket(); s.connect_ex(('127.0.0.1', 9))"
    environment = os.environ | {"PYTHONPATH": str(watched), "WATCHED": str(tmp_path / "seen")}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert "socket.connect" in (tmp_path / "seen").read_text()


def test_control_another_listener_would_show():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        mine = psutil.Process().net_connections(kind="inet")
        assert listener.getsockname() in [tuple(connection.laddr) for connection in mine]
