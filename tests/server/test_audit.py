"""The audit log: every line whole and in order, no request held up by it, and no secret in it."""

from __future__ import annotations

import hashlib
import json
import os
import threading

import pytest

from jaxserve.config import AuditConfig, AuthConfig
from jaxserve.errors import ConfigError
from jaxserve.server import audit
from jaxserve.server.audit import AuditLog, audit_log
from jaxserve.server.auth import Access
from jaxserve.server.keys import Scope, changing, create
from jaxserve.server.service import Service


@pytest.fixture
def path(tmp_path):
    return tmp_path / "audit.log"


@pytest.fixture
def dropped():
    return []


@pytest.fixture
def log(path, dropped):
    log = AuditLog(path, dropped=lambda: dropped.append(1))
    yield log
    log.close()


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_are_appended_in_order(path, log):
    for number in range(1000):
        log.write({"number": number})
    log.close()
    assert [line["number"] for line in lines(path)] == list(range(1000))
    assert all(line["time"].endswith("+00:00") for line in lines(path))
    assert path.stat().st_mode & 0o777 == 0o600
    again = AuditLog(path)
    again.write({"number": 1000})
    again.close()
    assert [line["number"] for line in lines(path)] == list(range(1001))


def test_two_processes_may_share_a_file(path, log):
    other = AuditLog(path)
    threads = [
        threading.Thread(target=lambda log=log: [log.write({"pad": "x" * 500}) for _ in range(500)])
        for log in (log, other)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    other.close()
    log.close()
    assert len(lines(path)) == 1000


def test_a_line_stays_a_line(path, log):
    log.write({"route": "a\nb\x1b[31m\u202e\u2028"})
    log.close()
    assert len(path.read_bytes().splitlines()) == 1
    assert lines(path)[0]["route"] == "a\nb\x1b[31m\u202e\u2028"


def test_a_file_that_is_moved_away_is_followed_by_a_new_one(path, log, wait_for):
    log.write({"number": 1})
    wait_for(path.read_text)
    moved = path.rename(path.with_suffix(".1"))
    log.write({"number": 2})
    wait_for(path.exists)
    log.close()
    assert [line["number"] for line in lines(moved)] == [1]
    assert [line["number"] for line in lines(path)] == [2]


def test_a_full_disk_holds_nobody_up_and_is_told_once(path, log, dropped, caplog, monkeypatch, wait_for):
    def full(file: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(audit.os, "write", full)
        for number in range(10):
            log.write({"number": number})
        wait_for(lambda: len(dropped) == 10)
    log.write({"number": 10})
    log.close()
    assert [line["number"] for line in lines(path)] == [10]
    assert [record.fields["reason"] for record in caplog.records] == ["No space left on device"]


def test_half_a_line_is_ended_before_the_next(path, log, dropped, monkeypatch, wait_for):
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(audit.os, "write", lambda file, data: write(file, data[:7]))
        log.write({"number": 0})
        wait_for(lambda: dropped)
    log.write({"number": 1})
    log.close()
    first, second = path.read_text().splitlines()
    assert len(first) == 7
    assert json.loads(second)["number"] == 1


def test_a_disk_that_hangs_fills_the_queue_and_no_more(path, dropped, monkeypatch, wait_for):
    monkeypatch.setattr(audit, "_WAITING", 5)
    release, begun = threading.Event(), threading.Event()
    write = os.write

    def slow(file: int, data: bytes) -> int:
        begun.set()
        release.wait(10)
        return write(file, data)

    log = AuditLog(path, dropped=lambda: dropped.append(1))
    monkeypatch.setattr(audit.os, "write", slow)
    log.write({"number": 0})
    assert begun.wait(5)
    for number in range(1, 9):
        log.write({"number": number})  # would hang here
    assert len(dropped) == 3
    log.close(0.1)
    release.set()
    wait_for(lambda: len(lines(path)) == 6)
    log.close()


def test_fsync(path, monkeypatch):
    synced = []
    monkeypatch.setattr(audit.os, "fsync", synced.append)
    log = AuditLog(path, fsync=True)
    log.write({})
    log.close()
    assert synced


@pytest.mark.parametrize("name", [".", "no/such/folder/log", "pipe"])
def test_a_file_that_cannot_be_written(name, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="cannot be written") as caught:
        audit_log(AuditConfig(file=tmp_path / name), lambda: None)
    assert caught.value.param == "audit.file"


def test_none_is_kept_where_none_is_wanted():
    assert audit_log(AuditConfig(), lambda: None) is None


# --- what is noted ----------------------------------------------------------------------------------------------------


@pytest.fixture
def made():
    """A key's entry, and the key."""
    return create("one", (Scope.INFER,))


@pytest.fixture
def service(config, model, log, made, tmp_path):
    """A service with that key and an audit log."""
    with changing(tmp_path / "keys.yaml") as keys:
        keys.append(made[0])
    access = Access(AuthConfig(keys=tmp_path / "keys.yaml", hosts=None))
    service = Service(config=config, model=model, access=access, audit=log)
    service.readiness.ready()
    return service


def test_who_asked_for_what(path, log, made, ask, engine):
    key, shown = made
    engine.answer = b"a secret answer"
    log.body_digest = True
    body = json.dumps({"prompt": "a secret question", "seed": 1}).encode()
    ask("POST", "/generate", body, {"x-api-key": shown, "x-request-id": "r-1"})
    ask("POST", "/generate", body, {"x-api-key": shown[:-1] + "x"})
    ask("GET", "/metrics", None, {"authorization": f"Bearer {shown}"})
    ask("GET", "/livez")
    log.close()
    done, wrong, beyond = lines(path)
    assert done | {"time": 0, "ms": 0} == {
        "time": 0,
        "key": key.id,
        "client": "one",
        "address": "127.0.0.1",
        "model": "toy",
        "body_sha256": hashlib.sha256(body).hexdigest(),
        "method": "POST",
        "route": "/generate",
        "status": 200,
        "ms": 0,
        "prompt_tokens": 17,
        "completion_tokens": 16,
        "request_id": "r-1",
    }
    assert (wrong["key"], wrong["status"], wrong["error"], wrong["route"]) == (
        None,
        401,
        "invalid_api_key",
        "/generate",
    )
    assert (beyond["key"], beyond["status"], beyond["route"]) == (key.id, 403, "/metrics")
    text = path.read_text()
    assert "secret" not in text
    assert shown.rpartition("_")[2] not in text
