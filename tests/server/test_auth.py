"""Who may ask for what: every route, method and spelling of a path without a key, and every way to show one wrongly."""

from __future__ import annotations

import asyncio
import datetime
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Iterator
from urllib.parse import unquote

import httpx2
import msgspec
import openai
import pytest
from starlette.responses import Response
from starlette.routing import Mount, Route

from jaxserve.config import AuthConfig
from jaxserve.errors import ConfigError, Overloaded
from jaxserve.server import app
from jaxserve.server.app import SCOPES, create_app
from jaxserve.server.auth import Access, Gate
from jaxserve.server.keys import Key, KeyLimits, Scope, changing, create, read_ring
from jaxserve.server.logs import JSONFormatter
from jaxserve.server.probes import probe_routes
from jaxserve.server.service import Service
from jaxserve.server.watched import Watcher

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW")
GENERATE = {"prompt": "x", "max_tokens": 4, "ignore_eos": True}


class Issued:
    """A key file and the keys in it."""

    def __init__(self, path) -> None:
        self.path = path
        self.path.write_text("[]")
        self.shown: dict[str, str] = {}
        self.keys: dict[str, Key] = {}

    def issue(self, name: str, *scopes: Scope, **limits: int) -> str:
        """A new key by a name of the test's own."""
        key, shown = create(name, scopes or (Scope.INFER,), None, KeyLimits(**limits))
        with changing(self.path) as keys:
            keys.append(key)
        self.shown[name], self.keys[name] = shown, key
        return shown

    def revoke(self, name: str) -> None:
        with changing(self.path) as keys:
            keys[:] = [key for key in keys if key.id != self.keys[name].id]

    def load(self, service: Service) -> None:
        """Has a running service read the file now, and waits until it counts."""
        service.access.reload()
        end = time.monotonic() + 5
        while set(service.access.ring.keys) != set(read_ring(self.path).keys):
            assert time.monotonic() < end
            time.sleep(0.005)

    def bearer(self, name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.shown[name]}"}


@pytest.fixture
def issued(tmp_path) -> Issued:
    issued = Issued(tmp_path / "keys.yaml")
    issued.issue("user")
    issued.issue("scraper", Scope.METRICS)
    issued.issue("chief", *(scope for scope in Scope if scope is not Scope.PUBLIC))
    return issued


@pytest.fixture
def auth(issued) -> AuthConfig:
    """The section of this module's service; a test overrides it by ``indirect`` parameters of its own."""
    return AuthConfig(keys=issued.path, hosts=None)


@pytest.fixture
def service(config, model, auth) -> Service:
    """A service with keys."""
    return guarded(config, model, auth)


def guarded(config, model, auth: AuthConfig) -> Service:
    service = Service(config=config, model=model, access=Access(auth, config.host))
    service.readiness.ready()
    return service


@pytest.fixture
def watcher(service) -> Iterator[Watcher]:
    """Looks at the key file, as often as it does in earnest."""
    watcher = Watcher()
    service.access.watch(watcher)
    watcher.start()
    yield watcher
    watcher.stop()


# --- every way in without a key ---------------------------------------------------------------------------------------


def spellings(path: str) -> list[str]:
    """Ways to write a path that some router, proxy or gate has taken for the path itself, or for another one."""
    first, rest = path[1], path[2:]
    return [
        path,
        "/" + path,
        path + "/",
        path + "//",
        path.upper(),
        f"/%{ord(first):02x}{rest}",
        f"/%25{ord(first):02x}{rest}",
        "/." + path,
        "/x/.." + path,
        "/x/..;" + path,
        "/livez/.." + path,
        "/livez/%2e%2e" + path,
        path + "/..;/",
        path + ".",
        path + "%00",
        path + "%20",
        path + ";a=b",
        path + ".json",
        path + "?key=x",
        path + "?/livez",
        path.replace("/", "/./", 1),
        "\\" + path[1:],
    ]


PUBLIC = (
    r"/(livez|startupz|readyz|health|ping|openapi\.json)",
    r"/v2/health/(live|ready)",
    r"/v2/models/.*/ready",
)


def is_public(target: str) -> bool:
    path = unquote(target.partition("?")[0])
    return any(re.fullmatch(pattern, path) for pattern in PUBLIC)


def questions(service: Service) -> list[tuple[str, str]]:
    """Every method with every spelling of every route's path, and with what is no route at all."""
    paths = [route.path.replace("{model:path}", "toy") for route in create_app(service).routes]
    paths += ["/v1", "/admin", "/docs", "/metrics/x", "/v1/models/livez", "/v1/chat/completions/livez"]
    return [(method, target) for path in paths for target in spellings(path) for method in METHODS]


def leaks(answers: list[tuple[str, str, int]], refusals: tuple[int, ...] = (401,)) -> list[tuple[str, str, int]]:
    """Answers that somebody without a key should not have had."""
    wrong = []
    for method, target, status in answers:
        allowed = (200, 404, 503) if method in ("GET", "HEAD") else (405,)
        if status not in refusals and not (is_public(target) and status in allowed):
            wrong.append((method, target, status))
    return wrong


def walk(service: Service, methods: tuple[str, ...] = METHODS) -> list[tuple[str, str, int]]:
    """Asks everything without a key, on bare ASGI."""
    app = create_app(service)

    async def ask(method: str, target: str) -> int:
        path, _, query = target.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
            "state": {},
        }
        status = 0

        async def receive():
            return {"type": "http.request", "body": b"{}", "more_body": False}

        async def send(message):
            nonlocal status
            status = message.get("status", status)

        await app(scope, receive, send)
        return status

    async def run() -> list[tuple[str, str, int]]:
        return [
            (method, target, await ask(method, target)) for method, target in questions(service) if method in methods
        ]

    return asyncio.run(run())


def test_nobody_gets_in_without_a_key(service):
    answers = walk(service)
    assert len(answers) > 3000
    assert leaks(answers) == []
    assert ("GET", "/livez", 200) in answers


def test_nor_over_a_socket(service, served):
    """uvicorn has a part in it: it parses the target, decodes the path and may refuse what is none."""
    answers = []
    connection = None
    for method, target in [q for q in questions(service) if q[0] in ("GET", "POST", "OPTIONS")]:
        if connection is None:
            connection = socket.create_connection(served.address, timeout=5)
            reader = connection.makefile("rb")
        head = f"{method} {target} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        connection.sendall(head.encode() + b"content-length: 2\r\n\r\n{}")
        status = int(reader.readline().split()[1])
        length, keep = 0, True
        while line := reader.readline().strip().lower():
            length = int(line.partition(b":")[2]) if line.startswith(b"content-length") else length
            keep = keep and line != b"connection: close"
        reader.read(length)
        answers.append((method, target, status))
        if not keep:
            reader.close()
            connection.close()
            connection = None
    if connection is not None:
        reader.close()
        connection.close()
    assert leaks(answers, (401, 400)) == []
    assert sum(status == 401 for *_, status in answers) > 0.9 * sum(not is_public(target) for _, target, _ in answers)


@pytest.mark.parametrize(
    "lines",
    [
        b"GET http://localhost/v1/models HTTP/1.1\r\nhost: localhost\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost: localhost/livez\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost: localhost/livez?x=\r\n",
        b"GET /v1/models HTTP/1.0\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nx-original-url: /livez\r\nx-forwarded-prefix: /livez\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n",
        b"GET /v1/models#/livez HTTP/1.1\r\nhost: localhost\r\n",
        b"GET /livez/../v1/models HTTP/1.1\r\nhost: localhost\r\n",
        b"GET //livez HTTP/1.1\r\nhost: localhost\r\n",
    ],
)
def test_what_a_host_or_a_proxy_says_does_not_matter(lines, served):
    with socket.create_connection(served.address, timeout=5) as connection:
        connection.sendall(lines + b"connection: close\r\n\r\n")
        assert connection.recv(65536).split()[1] in (b"401", b"400")


def test_the_walk_would_notice(service, monkeypatch):
    monkeypatch.setattr(app, "SCOPES", {**SCOPES, "/metrics": Scope.PUBLIC})
    assert {(method, target) for method, target, _ in leaks(walk(service, ("GET", "PUT")))} >= {
        ("GET", "/metrics"),
        ("PUT", "/metrics"),
    }
    monkeypatch.setattr(app, "SCOPES", SCOPES)
    by_prefix = lambda self, scope: self.__dict__ if scope["path"].startswith("/v1") else None  # noqa: E731
    monkeypatch.setattr(Gate, "_admit", by_prefix)
    assert ("GET", "/metrics", 200) in leaks(walk(service, ("GET",)))


# --- declared scopes --------------------------------------------------------------------------------------------------


def test_every_route_says_what_it_needs(service):
    paths = {route.path for route in create_app(service).routes}
    assert paths == set(SCOPES) | {route.path for route in probe_routes(service)}


def test_a_probe_route_opens_no_path_that_is_taken(service, config, model, auth):
    config = msgspec.structs.replace(config, health_route="/metrics")
    assert ("GET", "/metrics", 401) in walk(guarded(config, model, auth))


async def fine(_) -> Response:
    return Response("fine")


@pytest.mark.parametrize("keys", ["on", "off"])
@pytest.mark.parametrize(
    "added", [Route("/new", fine), Mount("/new", routes=[Route("/", fine)])], ids=["route", "mount"]
)
def test_a_route_that_says_nothing_is_closed_to_everybody(added, keys, config, model, auth, issued):
    service = guarded(config, model, auth if keys == "on" else AuthConfig(hosts=None))
    application = create_app(service)
    application.router.routes.append(added)

    async def ask() -> list[int]:
        transport = httpx2.ASGITransport(application)
        async with httpx2.AsyncClient(
            transport=transport, base_url="http://x", headers=issued.bearer("chief")
        ) as client:
            return [(await client.get(path)).status_code for path in ("/new", "/new/")]

    statuses = asyncio.run(ask())
    assert 403 in statuses
    assert 200 not in statuses


@pytest.mark.parametrize(
    ("who", "allowed"),
    [
        ("user", {"/v1/models", "/tokenize"}),
        ("scraper", {"/metrics"}),
        ("chief", {"/v1/models", "/tokenize", "/metrics"}),
    ],
)
def test_a_key_opens_what_its_scopes_say(who, allowed, ask, issued):
    for method, path, body in (
        ("GET", "/v1/models", None),
        ("POST", "/tokenize", {"prompt": "x"}),
        ("GET", "/metrics", None),
    ):
        found = ask(method, path, body, issued.bearer(who))
        if path in allowed:
            assert found.status_code == 200
        else:
            assert (found.status_code, found.json()["error"]["code"]) == (403, "insufficient_permissions")
            assert found.json()["error"]["type"] == "invalid_request_error"
    assert ask("GET", "/nowhere", None, issued.bearer(who)).status_code == 404
    assert ask("PUT", "/livez", None, issued.bearer(who)).status_code == 405


def test_metrics_may_be_public(config, model, issued, watcher):
    service = guarded(config, model, AuthConfig(keys=issued.path, public_metrics=True, hosts=None))
    answers = walk(service)
    assert ("GET", "/metrics", 200) in answers
    assert {target.partition("?")[0] for _, target, _ in leaks(answers)} <= {"/metrics", "/%6detrics"}


def test_other_sites_pages_may_not_do_what_admins_do(service, issued, monkeypatch):
    monkeypatch.setattr(app, "SCOPES", {**SCOPES, "/metrics": Scope.ADMIN})
    application = create_app(service)

    async def ask(**headers: str) -> int:
        transport = httpx2.ASGITransport(application)
        async with httpx2.AsyncClient(
            transport=transport, base_url="http://x", headers=issued.bearer("chief")
        ) as client:
            return (await client.get("/metrics", headers=headers)).status_code

    assert asyncio.run(ask()) == 200
    assert asyncio.run(ask(**{"sec-fetch-site": "same-origin"})) == 200
    assert asyncio.run(ask(**{"sec-fetch-site": "cross-site"})) == 403


# --- how a key is shown -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("authorization", "Bearer {}")], 200),
        ([("authorization", "bearer {}")], 200),
        ([("authorization", "Bearer   {} ")], 200),
        ([("x-api-key", "{}")], 200),
        ([], 401),
        ([("authorization", "{}")], 401),
        ([("authorization", "Basic {}")], 401),
        ([("authorization", "Bearer")], 401),
        ([("authorization", "")], 401),
        ([("authorization", "Bearer {}, Bearer {}")], 401),
        ([("authorization", "Bearer {}"), ("authorization", "Bearer {}")], 401),
        ([("authorization", "Bearer {}"), ("x-api-key", "{}")], 401),
        ([("x-api-key", "{}"), ("x-api-key", "{}")], 401),
        ([("authorization", "Basic x"), ("x-api-key", "{}")], 401),
        ([("api-key", "{}")], 401),
        ([("cookie", "authorization=Bearer {}")], 401),
    ],
)
def test_exactly_one_key(headers, status, ask, issued):
    lines = [(name, value.replace("{}", issued.shown["user"])) for name, value in headers]
    found = ask("GET", "/v1/models", None, lines)
    assert found.status_code == status
    if status == 401:
        assert found.headers["www-authenticate"] == "Bearer"
        assert found.json()["error"]["code"] == "invalid_api_key"
        assert found.json()["error"]["type"] == "invalid_request_error"
        assert issued.shown["user"] not in found.text


def test_a_key_in_the_url_is_none(ask, issued):
    assert ask("GET", f"/v1/models?api_key={issued.shown['user']}").status_code == 401


def lines(caplog) -> list[str]:
    """What the server logs; the tests' own clients log, too."""
    records = [r for r in caplog.records if not r.name.startswith(("httpcore", "httpx", "openai"))]
    return [JSONFormatter().format(record) for record in records]


def test_hostile_keys_are_refused_fast_and_written_nowhere(served, issued, caplog):
    caplog.set_level(logging.DEBUG)
    secret = issued.shown["user"]
    marks = [
        secret[:-1].encode() + b"Z",
        b"MARK' OR '1'='1",
        b'MARK"; DROP TABLE keys;--',
        b"MARK" + "ключ😀".encode(),
        b"MARK\xff\xfe",
        b"MARK\xe2\x80\xae",
        b"MARK" + b"k" * 60_000,
        b"jx_MARK_" + b"0" * 64,
    ]
    with socket.create_connection(served.address, timeout=5) as connection:
        times = []
        for mark in marks:
            begin = time.perf_counter()
            connection.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer " + mark + b"\r\n\r\n")
            said = connection.recv(65536)
            times.append(time.perf_counter() - begin)
            assert said.split()[1] == b"401", (mark[:40], said[:200])
            assert b"MARK" not in said
    for broken in (b"MARK\x00", b"MARK\x1b[31m", b"MARK\r\nx-admin: 1\r\n folded", b"MARK" + b"k" * 2**20):
        with socket.create_connection(served.address, timeout=5) as connection:
            connection.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer " + broken + b"\r\n\r\n")
            assert connection.recv(65536).split()[1] in (b"400", b"401", b"431")
    assert min(times) < 0.05
    written = "".join(lines(caplog))
    assert "request" in written
    assert "MARK" not in written
    assert secret.rpartition("_")[2][:20] not in written


def test_no_key_reaches_any_log(served, issued, caplog, watcher, wait_for):
    """Whatever becomes of the request, and of the key."""
    caplog.set_level(logging.DEBUG)
    with httpx2.Client(base_url=served.url, headers=issued.bearer("user")) as client:
        for body in (GENERATE, GENERATE | {"stream": True}, {"prompt": 7}, GENERATE | {"model": issued.shown["user"]}):
            client.post("/generate", json=body)
        client.get("/metrics")
        client.get("/nowhere/" + issued.shown["user"])
        issued.revoke("user")
        wait_for(lambda: client.get("/v1/models").status_code == 401)
    records = lines(caplog)
    assert any(issued.keys["user"].id in record for record in records)
    assert not any(issued.shown["user"].rpartition("_")[2] in record for record in records)
    assert not any(key.sha256 in record for record in records for key in issued.keys.values())


# --- lists ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("auth", "headers", "code"),
    [
        ({"allow": ("127.0.0.0/8",)}, {}, None),
        ({"allow": ("10.0.0.0/8",)}, {}, "address_not_allowed"),
        ({"allow": ("10.0.0.0/8",)}, {"x-forwarded-for": "10.1.1.1"}, "address_not_allowed"),
        ({"allow": ("10.0.0.0/8",), "proxies": ("127.0.0.1",)}, {"x-forwarded-for": "10.1.1.1"}, None),
        ({"allow": ("10.0.0.0/8",), "proxies": ("127.0.0.1",)}, {"x-forwarded-for": "1.1.1.1"}, "address_not_allowed"),
        ({"hosts": None}, {"host": "evil.example.com"}, None),
        ({"hosts": "auto"}, {"host": "evil.example.com"}, "host_not_allowed"),
        ({"hosts": "auto"}, {"host": "localhost:8000"}, None),
        ({"hosts": ("api.example.com",)}, {"host": "api.example.com"}, None),
        ({"hosts": ("api.example.com",)}, {"host": "localhost"}, "host_not_allowed"),
    ],
)
def test_lists_come_before_keys(auth, headers, code, config, model, issued):
    service = guarded(config, model, AuthConfig(keys=issued.path, **{"hosts": None} | auth))

    async def ask() -> list[httpx2.Response]:
        transport = httpx2.ASGITransport(create_app(service))
        async with httpx2.AsyncClient(transport=transport, base_url="http://x", headers=headers) as client:
            return [await client.get("/v1/models", headers=issued.bearer("user")), await client.get("/livez")]

    answer, probe = asyncio.run(ask())
    assert probe.status_code == 200
    assert answer.status_code == (200 if code is None else 403)
    assert code is None or answer.json()["error"]["code"] == code


def test_on_another_address_any_name_will_do(config, model):
    open_to_all = Access(AuthConfig(), "0.0.0.0")
    open_to_all.check_peer({"client": ("1.2.3.4", 1), "headers": [(b"host", b"anything")]})


@pytest.mark.parametrize("name", ["allow", "proxies"])
def test_a_list_that_is_none(name):
    with pytest.raises(ConfigError) as caught:
        Access(AuthConfig(**{name: ("10.0.0.0/99",)}))
    assert caught.value.param == f"auth.{name}"


@pytest.mark.parametrize(
    ("host", "keys", "says"),
    [
        ("0.0.0.0", False, "open to everybody"),
        ("::", False, "open to everybody"),
        ("10.0.0.7", False, "open to everybody"),
        ("127.0.0.1", False, None),
        ("localhost", False, None),
        ("::1", False, None),
        ("0.0.0.0", True, None),
    ],
)
def test_a_port_that_is_open_to_everybody_is_told_of(host, keys, says, issued, caplog):
    Access(AuthConfig(keys=issued.path if keys else None), host).announce()
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == (says is not None)
    assert says is None or says in warnings[0]


# --- headers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "OPTIONS", "POST"])
@pytest.mark.parametrize("origin", ["https://evil.example.com", "null", "http://localhost:3000"])
def test_no_site_is_invited(method, origin, ask, issued):
    headers = {"origin": origin, "access-control-request-method": "POST"}
    for path in ("/v1/models", "/livez", "/nowhere"):
        for more in ({}, issued.bearer("chief")):
            found = ask(method, path, None, headers | more)
            assert [name for name in found.headers if name.startswith("access-control")] == []


def test_every_answer_is_kept_by_nobody_and_is_what_it_says(served, issued):
    with httpx2.Client(base_url=served.url) as client:
        answers = [
            client.post("/generate", json=GENERATE, headers=issued.bearer("user")),
            client.post("/generate", json=GENERATE | {"stream": True}, headers=issued.bearer("user")),
            client.get("/livez"),
            client.get("/metrics", headers=issued.bearer("scraper")),
            client.get("/nowhere"),
            client.get("/nowhere", headers=issued.bearer("user")),
            client.post("/generate", content=b"{", headers=issued.bearer("user")),
        ]
    for answer in answers:
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "server" not in answer.headers


# --- limits over HTTP -------------------------------------------------------------------------------------------------


def test_a_share_that_is_used_up(client, issued, service):
    issued.issue("frugal", requests_per_minute=2)
    issued.load(service)
    bearer = issued.bearer("frugal")
    statuses = [client.post("/generate", json=GENERATE, headers=bearer) for _ in range(3)]
    assert [answer.status_code for answer in statuses] == [200, 200, 429]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in statuses] == ["1", "0", "0"]
    refused = statuses[-1]
    error = refused.json()["error"]
    assert (error["code"], error["type"], error["param"]) == ("rate_limit_exceeded", "requests", None)
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert 0 < int(refused.headers["retry-after-ms"]) <= 30_000
    assert client.post("/generate", json=GENERATE, headers=issued.bearer("user")).status_code == 200
    assert client.get("/v1/models", headers=bearer).status_code == 200  # what costs nothing is not counted


def test_refused_before_a_byte_of_the_body_is_read(served, issued, service):
    issued.issue("frugal", requests_per_minute=1)
    issued.load(service)
    service.access.limits.enter(issued.keys["frugal"])
    with socket.create_connection(served.address, timeout=5) as connection:
        connection.sendall(
            b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nx-api-key: "
            + issued.shown["frugal"].encode()
            + b"\r\ncontent-length: 100000\r\n\r\n"
        )
        assert connection.recv(65536).split()[1] == b"429"


@pytest.mark.parametrize("stream", [True, False])
def test_tokens_are_reserved_and_brought_back(stream, client, issued, service, engine):
    issued.issue("frugal", output_tokens_per_minute=100, input_tokens_per_minute=1000)
    issued.load(service)
    bearer = issued.bearer("frugal")
    engine.answer = b"abc"
    answer = client.post("/generate", json={"prompt": "x", "max_tokens": 80, "stream": stream}, headers=bearer)
    assert answer.status_code == 200
    again = client.post("/generate", json={"prompt": "x", "max_tokens": 90, "ignore_eos": True}, headers=bearer)
    assert again.status_code == 200
    assert again.headers["x-ratelimit-limit-tokens"] == "100"
    refused = client.post("/generate", json={"prompt": "x", "max_tokens": 99}, headers=bearer)
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "tokens")
    never = client.post("/generate", json={"prompt": "x", "max_tokens": 101}, headers=bearer)
    assert (never.status_code, never.json()["error"]["param"]) == (400, "max_tokens")


def test_what_was_generated_before_a_client_hung_up_is_paid_for(served, issued, service, engine, wait_for):
    issued.issue("frugal", output_tokens_per_minute=200)
    issued.load(service)
    engine.answer, engine.delay, engine.widest = b"x" * 200, 0.01, 1
    body = json.dumps({"prompt": "x", "max_tokens": 200}).encode()
    with socket.create_connection(served.address, timeout=5) as connection:
        connection.sendall(
            b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nx-api-key: "
            + issued.shown["frugal"].encode()
            + b"\r\ncontent-length: %d\r\n\r\n" % len(body)
            + body
        )
        wait_for(lambda: engine.active)
        time.sleep(0.3)
    wait_for(lambda: not engine.active)
    left = dict(service.access.limits.headers(issued.keys["frugal"]))[b"x-ratelimit-remaining-tokens"]
    assert 0 < int(left) < 199


def test_a_refusal_of_the_engine_costs_no_tokens(client, issued, service, engine):
    issued.issue("frugal", output_tokens_per_minute=100, input_tokens_per_minute=100)
    issued.load(service)
    submit, engine.submit = engine.submit, lambda request: (_ for _ in ()).throw(Overloaded("The queue is full."))
    for _ in range(3):
        assert (
            client.post(
                "/generate", json={"prompt": "x", "max_tokens": 80}, headers=issued.bearer("frugal")
            ).status_code
            == 503
        )
    engine.submit = submit
    assert (
        client.post("/generate", json={"prompt": "x", "max_tokens": 80}, headers=issued.bearer("frugal")).status_code
        == 200
    )


def test_running_at_once(served, issued, service, engine, wait_for):
    issued.issue("narrow", concurrency=1)
    issued.load(service)
    engine.answer, engine.delay = b"x" * 100, 0.01
    found = []
    with httpx2.Client(base_url=served.url, headers=issued.bearer("narrow"), timeout=10) as client:
        with client.stream("POST", "/generate", json=GENERATE | {"stream": True, "max_tokens": 100}) as stream:
            wait_for(lambda: engine.active)
            found.append(client.post("/generate", json=GENERATE))
            stream.read()
        found.append(client.post("/generate", json=GENERATE))
    assert [answer.status_code for answer in found] == [429, 200]


def test_openais_client_understands(served, issued, service):
    issued.issue("frugal", requests_per_minute=1)
    issued.load(service)
    with openai.OpenAI(base_url=served.url + "/v1", api_key=issued.shown["frugal"], max_retries=0) as sdk:
        sdk.completions.create(model="toy", prompt="x", max_tokens=2)
        with pytest.raises(openai.RateLimitError) as caught:
            sdk.completions.create(model="toy", prompt="x", max_tokens=2)
        assert caught.value.code == "rate_limit_exceeded"
    for key, error in (("sk-x", openai.AuthenticationError), (issued.shown["scraper"], openai.PermissionDeniedError)):
        with openai.OpenAI(base_url=served.url + "/v1", api_key=key, max_retries=0) as sdk, pytest.raises(error):
            sdk.models.list()


def test_requests_run_on_behalf_of_their_key(ask, issued, engine):
    ask("POST", "/generate", GENERATE, issued.bearer("user"))
    ask("POST", "/generate", GENERATE, issued.bearer("chief"))
    assert [request.tenant for request in engine.submitted] == [issued.keys["user"].id, issued.keys["chief"].id]


# --- while it runs ----------------------------------------------------------------------------------------------------


def test_a_revoked_key_is_refused_and_its_streams_end(served, issued, service, engine, events, watcher, wait_for):
    engine.answer, engine.delay, engine.widest = b"x" * 100, 0.02, 1
    body = {"prompt": "x", "max_tokens": 100, "stream": True}
    found: dict[str, list] = {}

    def run(name: str) -> None:
        with httpx2.stream(
            "POST", served.url + "/generate", json=body, headers=issued.bearer(name), timeout=30
        ) as answer:
            found[name] = events(answer)

    threads = [threading.Thread(target=run, args=(name,)) for name in ("user", "chief")]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(engine.active) == 2)
    begin = time.monotonic()
    issued.revoke("user")
    with httpx2.Client(base_url=served.url, headers=issued.bearer("user")) as client:
        wait_for(lambda: client.get("/v1/models").status_code == 401)
    threads[0].join(10)
    took = time.monotonic() - begin
    threads[1].join(20)
    assert took < 4  # one second where nothing else runs
    assert found["user"][-1]["error"]["code"] == "invalid_api_key"
    assert "[DONE]" not in found["user"]
    assert len(found["user"]) < 100
    assert found["chief"][-1] == "[DONE]"


@pytest.mark.parametrize("how", ["gone", "another secret", "an end that has passed"])
def test_ways_to_revoke(how, service, issued):
    ended: list[str] = []
    service.access.on_revoked = ended.append
    with changing(issued.path) as keys:
        (at,) = [at for at, key in enumerate(keys) if key.id == issued.keys["user"].id]
        if how == "gone":
            del keys[at]
        elif how == "another secret":
            keys[at] = msgspec.structs.replace(keys[at], sha256="0" * 64)
        else:
            keys[at] = msgspec.structs.replace(keys[at], expires=datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC))
    service.access.reload()
    service.access.reload()
    assert ended == [issued.keys["user"].id]


def test_a_key_that_runs_out_by_itself_ends_nothing(service, issued):
    """Its requests were let in while it was valid; a jump of the clock must not end them all."""
    ended: list[str] = []
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=0.2)
    with changing(issued.path) as keys:
        keys[:] = [msgspec.structs.replace(key, expires=soon) for key in keys]
    service.access.reload()
    service.access.on_revoked = ended.append
    time.sleep(0.3)
    service.access.reload()
    assert ended == []


def test_running_requests_of_a_revoked_key_may_finish(config, model, issued, engine, serve_it, events, wait_for):
    service = guarded(config, model, AuthConfig(keys=issued.path, revoked_streams="finish", hosts=None))
    engine.answer, engine.delay = b"x" * 100, 0.01
    body = {"prompt": "x", "max_tokens": 100, "stream": True}
    with serve_it(service) as served:
        with httpx2.stream("POST", served.url + "/generate", json=body, headers=issued.bearer("user")) as answer:
            issued.revoke("user")
            issued.load(service)
            found = events(answer)
        assert httpx2.get(served.url + "/v1/models", headers=issued.bearer("user")).status_code == 401
    assert found[-1] == "[DONE]"


def test_a_request_that_was_being_read_when_its_key_went_goes_no_further(served, issued, service, engine, wait_for):
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nx-api-key: "
    body = json.dumps(GENERATE).encode()
    with socket.create_connection(served.address, timeout=5) as connection:
        connection.sendall(head + issued.shown["user"].encode() + b"\r\ncontent-length: %d\r\n\r\n" % len(body))
        wait_for(lambda: len(service.admission) == 1)
        issued.revoke("user")
        issued.load(service)
        connection.sendall(body)
        assert connection.recv(65536).split()[1] == b"401"
    assert engine.submitted == []


def test_rotation_without_a_gap(served, issued, service, watcher, wait_for):
    """A new key beside the old one, then the clients change over, then the old one goes: nobody is ever refused."""
    names = ["user"]
    statuses: list[int] = []
    stop = threading.Event()

    def ask_on() -> None:
        with httpx2.Client(base_url=served.url) as client:
            while not stop.is_set():
                statuses.append(client.get("/v1/models", headers=issued.bearer(names[-1])).status_code)

    thread = threading.Thread(target=ask_on)
    thread.start()
    try:
        for turn in range(2):
            name = f"turn {turn}"
            issued.issue(name)
            wait_for(lambda name=name: issued.keys[name].id in service.access.ring.keys)
            names.append(name)
            count = len(statuses)
            wait_for(lambda count=count: len(statuses) > count + 2)
            issued.revoke(names[-2])
            wait_for(lambda: issued.keys[names[-2]].id not in service.access.ring.keys)
    finally:
        stop.set()
        thread.join()
    assert set(statuses) == {200}
    assert len(statuses) > 20


def test_a_bad_file_changes_nothing(served, issued, service, wait_for, caplog):
    failures: list[str] = []
    watcher = Watcher(failures.append)
    service.access.watch(watcher)
    good = issued.path.read_text()
    with httpx2.Client(base_url=served.url, headers=issued.bearer("user")) as client:
        for bad in ("", good + "- {", good + good, good.replace("client", "klient"), "[]x"):
            issued.path.write_text(bad)
            watcher.look()
            assert client.get("/v1/models").status_code == 200
        issued.path.unlink()
        watcher.look()
        assert client.get("/v1/models").status_code == 200
        issued.path.write_text("[]")
        watcher.look()
        wait_for(lambda: client.get("/v1/models").status_code == 401)
    assert failures == ["keys"] * 6
    errors = [record.fields for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 6
    assert all(str(issued.path) in error["reason"] for error in errors)


def test_without_a_key_file_whoever_comes_may_ask(config, model):
    service = guarded(config, model, AuthConfig(hosts=None))
    answers = walk(service, ("GET",))
    assert ("GET", "/v1/models", 200) in answers
    assert ("GET", "/metrics", 200) in answers
    assert 401 not in {status for *_, status in answers}


@pytest.mark.parametrize("jump", [-3600, 3600])
def test_a_jump_of_the_wall_clock_ends_no_session(jump, issued, ask, monkeypatch):
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + jump)
    assert ask("POST", "/generate", GENERATE, issued.bearer("user")).status_code == 200
