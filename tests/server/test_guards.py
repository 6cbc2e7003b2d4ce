"""Nobody comes in when there is nothing left to serve them with."""

from __future__ import annotations

import resource

import pytest

from jaxserve.server.guards import Memory, Room, cgroup_limit, resident_bytes, room_for


@pytest.mark.parametrize(
    ("limit", "last_served", "last_refused"),
    [(1000, 899, 949), (100, 83, 91), (20_000, 17_999, 18_999)],
)
def test_a_tenth_of_the_descriptors_is_kept(monkeypatch, limit, last_served, last_refused):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    found = [room_for(n) for n in (3, last_served, last_served + 1, last_refused, last_refused + 1, limit - 1)]
    assert found == [Room.SERVE, Room.SERVE, Room.REFUSE, Room.REFUSE, Room.CLOSE, Room.CLOSE]


def test_without_a_limit_there_is_room(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert room_for(10**6) is Room.SERVE


def test_memory_is_short_from_its_share_on():
    now, used = 0.0, 899
    memory = Memory(1000, 0.9, resident=lambda: used, clock=lambda: now)
    assert not memory.short()
    used = 900
    assert not memory.short()  # as it was a moment ago
    now += 0.2
    assert memory.short()
    used, now = 500, now + 0.2
    assert not memory.short()


def test_without_a_limit_memory_is_never_read():
    memory = Memory(None, 0.9, resident=lambda: 1 / 0)
    assert not memory.short()
    memory.relieve()


def test_relief_is_sought_when_it_is_short_and_not_all_the_time(monkeypatch):
    trims = []

    class Library:
        def __init__(self, name: None) -> None:
            self.malloc_trim = trims.append

    monkeypatch.setattr("ctypes.CDLL", Library)
    now, used = 0.0, 100
    memory = Memory(1000, 0.9, resident=lambda: used, clock=lambda: now)
    memory.relieve()
    assert trims == []
    used, now = 950, 1.0
    memory.relieve()
    memory.relieve()
    assert trims == [0]
    now = 7.0
    memory.relieve()
    assert trims == [0, 0]


def test_this_process_takes_memory():
    before = resident_bytes()
    ballast = bytearray(b"x" * 50_000_000)
    assert resident_bytes() - before > 40_000_000
    del ballast


V2 = "0::/pods/one/server\n"
V1 = "5:cpu,cpuacct:/a\n4:memory:/docker/abc\n1:name=systemd:/x\n0::/x\n"


@pytest.mark.parametrize(
    ("said", "files", "limit"),
    [
        (V2, {"pods/one/server/memory.max": "max", "pods/one/memory.max": "3000", "pods/memory.max": "9000"}, 3000),
        (V2, {"pods/one/server/memory.max": "max"}, None),
        (V2, {"memory.max": "5000"}, 5000),
        (V1, {"memory/docker/abc/memory.limit_in_bytes": "7000", "a/memory.max": "1"}, 7000),
        (V1, {"memory/memory.limit_in_bytes": "6000"}, 6000),  # the group's own path is another namespace's
        (V1, {"memory/docker/abc/memory.limit_in_bytes": "9223372036854771712"}, None),
        (V1, {"memory/docker/abc/memory.limit_in_bytes": "garbage"}, None),
        ("0::/../../elsewhere\n", {"memory.max": "4000"}, 4000),
        ("", {}, None),
    ],
)
def test_the_least_limit_of_all_groups_around_holds(tmp_path, said, files, limit):
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    proc.write_text(said)
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert cgroup_limit(proc, root) == limit


def test_a_system_without_groups_has_no_limit(tmp_path):
    assert cgroup_limit(tmp_path / "nothing", tmp_path) is None
