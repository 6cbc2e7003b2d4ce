"""The key file and the ring: what is valid gets in, what is not is told nothing, and half a file changes nothing."""

from __future__ import annotations

import ast
import contextlib
import datetime
import hashlib
import hmac
import inspect
import json
import multiprocessing
import os
import time

import msgspec
import pytest
import yaml

from jaxserve.errors import ConfigError, Unauthenticated
from jaxserve.server import keys
from jaxserve.server.keys import Key, KeyLimits, KeyRing, Scope, changing, create, read_ring

NOW = datetime.datetime(2027, 5, 1, tzinfo=datetime.UTC)
DAY = datetime.timedelta(days=1)
DIGEST = hashlib.sha256(b"secret").hexdigest()
ENTRY = f"- id: a1\n  client: one\n  sha256: {DIGEST}\n"


@pytest.fixture
def file(tmp_path):
    def write(text: str | bytes, name: str = "keys.yaml"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


# --- the ring ---------------------------------------------------------------------------------------------------------


def test_a_key_is_its_own(file):
    first, one = create("one", (Scope.INFER,))
    second, two = create("two", (Scope.METRICS, Scope.ADMIN))
    ring = KeyRing.of([first, second])
    assert ring.authenticate(one.encode(), NOW) is first
    assert ring.authenticate(two.encode(), NOW) is second
    assert len({first.id, second.id, first.sha256, second.sha256}) == 4
    assert len(one.rpartition("_")[2]) == 64  # 256 bits


def hostile(secret: str) -> list[bytes]:
    name = secret.split("_")[1]
    return [
        b"",
        b"_",
        b"__",
        b"jx",
        b"jx_",
        b"jx__",
        f"jx_{name}_".encode(),
        f"jx_{name}".encode(),
        secret[:-1].encode(),
        secret.encode() + b"0",
        secret.encode() + b"\x00",
        secret.upper().encode(),
        secret.replace("jx", "sk").encode(),
        f"jx_ _{secret[-64:]}".encode(),
        f"jx_{'0' * 8}_{secret[-64:]}".encode(),
        f"jx_{name}_{DIGEST}".encode(),
        b"jx_" + name.encode() + b"_" + b"0" * 2**20,
        b"x" * 2**20,
        b"_" * 2**20,
        b"jx_' OR '1'='1_x",
        b'jx_"a"_x',
        b"jx_a\x00b_x",
        b"jx_a\r\nX-Admin: 1_x",
        "jx_ключ_😀".encode(),
        b"jx_\xff\xfe_\xff",
    ]


def test_anything_else_is_refused_in_the_same_words():
    entry, secret = create("one", (Scope.INFER,))
    ring = KeyRing.of([entry])
    for shown in hostile(secret):
        with pytest.raises(Unauthenticated) as caught:
            ring.authenticate(shown, NOW)
        assert caught.value.message == "This API key is not valid."


def test_a_megabyte_is_refused_at_once():
    entry, _ = create("one", (Scope.INFER,))
    ring = KeyRing.of([entry])
    shown = f"jx_{entry.id}_".encode() + b"0" * 2**20
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        with pytest.raises(Unauthenticated):
            ring.authenticate(shown, NOW)
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.005


@pytest.mark.parametrize("whose", ["known", "unknown", "wrong secret", "nothing"])
def test_every_look_up_takes_the_same_steps(whose, monkeypatch):
    entry, secret = create("one", (Scope.INFER,))
    shown = {"known": secret, "unknown": "jx_nobody_" + secret[-64:], "wrong secret": secret[:-1], "nothing": ""}[whose]
    counted: list[tuple[str, tuple]] = []

    def counting(name, real):
        def count(*args):
            counted.append((name, args))
            return real(*args)

        return count

    monkeypatch.setattr(keys.hashlib, "sha256", counting("digest", hashlib.sha256))
    monkeypatch.setattr(keys.hmac, "compare_digest", counting("compare", hmac.compare_digest))
    try:
        KeyRing.of([entry]).authenticate(shown.encode(), NOW)
    except Unauthenticated:
        assert whose != "known"
    assert [name for name, _ in counted] == ["digest", "compare"]
    assert [len(side) for side in counted[1][1]] == [64, 64]


def plain_comparisons(source: str) -> list[int]:
    """Lines on which something called a digest or a secret is compared by ``==``, ``!=``, ``in`` or ``startswith``."""
    telling = ("sha256", "secret", "digest", "shown")
    found = []
    for node in ast.walk(ast.parse(source)):
        names = ""
        if isinstance(node, ast.Compare) and not all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
            names = ast.unparse(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            names = ast.unparse(node) if node.func.attr in ("startswith", "endswith", "find", "index") else ""
        if any(word in names for word in telling):
            found.append(node.lineno)
    return found


def test_no_secret_is_compared_byte_by_byte():
    assert plain_comparisons(inspect.getsource(keys)) == []
    assert plain_comparisons("a = key.sha256 == digest\nb = secret.startswith(x)\nc = shown in ring\n") == [1, 2, 3]


@pytest.mark.parametrize(
    ("not_before", "expires", "says"),
    [
        (None, NOW + DAY, None),
        (NOW, None, None),
        (NOW - DAY, NOW + DAY, None),
        (NOW + DAY, None, "not valid yet"),
        (None, NOW, "has expired"),
        (NOW - 2 * DAY, NOW - DAY, "has expired"),
    ],
)
def test_a_key_has_its_time(not_before, expires, says):
    entry, secret = create("one", (Scope.INFER,))
    entry = msgspec.structs.replace(entry, not_before=not_before, expires=expires)
    ring = KeyRing.of([entry])
    if says is None:
        assert ring.authenticate(secret.encode(), NOW) is entry
    else:
        with pytest.raises(Unauthenticated, match=says):
            ring.authenticate(secret.encode(), NOW)
        with pytest.raises(Unauthenticated, match="is not valid\\."):  # only who has the secret hears why
            ring.authenticate(secret[:-1].encode(), NOW)


def test_a_ring_does_not_change():
    ring = KeyRing.of([create("one", (Scope.INFER,))[0]])
    with pytest.raises(TypeError):
        ring.keys["x"] = None
    with pytest.raises(AttributeError):
        ring.keys = {}


# --- the file ---------------------------------------------------------------------------------------------------------

WHOLE = f"""
# a comment
- id: a1
  client: one
  sha256: {DIGEST}
  scopes: [infer, metrics]
  not_before: 2027-01-01
  expires: 2027-12-31T12:00:00+02:00
  limits:
    requests_per_minute: 60
    output_tokens_per_minute: 1_000
    concurrency: 4
- {{id: a2, client: one, sha256: {DIGEST}, expires: null}}
"""


def test_yaml_is_read(file):
    first, second = read_ring(file(WHOLE.replace("1_000", "1000"))).keys.values()
    assert first.scopes == (Scope.INFER, Scope.METRICS)
    assert first.not_before == datetime.datetime(2027, 1, 1, tzinfo=datetime.UTC)
    assert first.expires == datetime.datetime(2027, 12, 31, 10, tzinfo=datetime.UTC)
    assert first.limits == KeyLimits(requests_per_minute=60, output_tokens_per_minute=1000, concurrency=4)
    assert second == Key(id="a2", client="one", sha256=DIGEST)


@pytest.mark.parametrize("indent", [None, 2, "\t"])
def test_json_is_read(indent, file):
    entries = [{"id": "a1", "client": "one", "sha256": DIGEST, "limits": {"concurrency": 4}, "scopes": ["batch"]}]
    ring = read_ring(file(json.dumps(entries, indent=indent), "keys.json"))
    assert ring.keys["a1"].limits.concurrency == 4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "keys.yaml: a key file is a list of keys; `[]` is one without any."),
        ("# nothing", "a key file is a list of keys"),
        ("keys: []", "a key file is a list of keys"),
        ("- [", ": neither YAML nor JSON."),
        ("- a\n- {", "keys.yaml:"),
        ("[" * 100_000, "neither YAML nor JSON"),
        (b"\xff", "not UTF-8 at byte 0"),
        ("- \x00", "neither YAML nor JSON"),
        (b"#" * (2**20 + 1), "larger than 1,048,576 bytes"),
        ("- 7", "keys.yaml:1: expected `object`, got `str`."),
        (ENTRY + "- id: b\n", "keys.yaml:4: object missing required field `client`."),
        (ENTRY + "\n" + ENTRY, "keys.yaml:5: the id `a1` is given twice."),
        (ENTRY + "  limit: 1\n", "keys.yaml:1: object contains unknown field `limit`."),
        (ENTRY + "  client: two\n", "keys.yaml:1: a field is given twice"),
        (ENTRY + "  limits: {concurrency: 0}\n", "keys.yaml:1: `limits.concurrency`: expected `int` >= 1."),
        (ENTRY + "  limits: {concurrency: 1.5}\n", "`limits.concurrency`"),
        (ENTRY + "  scopes: [all]\n", "`scopes[0]`: no such scope."),
        (ENTRY + "  scopes: [public]\n", "what is public needs no key"),
        (ENTRY + "  scopes: infer\n", "`scopes`"),
        (ENTRY + "  expires: tomorrow\n", "`expires`: invalid RFC3339"),
        (ENTRY + "  expires: 2027-01-01T00:00:00\n", "`expires`: expected `datetime` with a timezone"),
        (ENTRY + "  not_before: 2027-01-02\n  expires: 2027-01-01\n", "it expires before it is valid"),
        (ENTRY.replace("a1", "a_1"), "`id`: expected `str` matching"),
        (ENTRY.replace("a1", '"a1\\n"'), "`id`: expected `str` matching"),
        (ENTRY.replace("one", '"one\\n"'), "`client`: expected `str` matching"),
        (ENTRY.replace("one", "'one\u202e'"), "`client`: expected `str` matching"),
        (ENTRY.replace(DIGEST, "jx_a1_secret"), "`sha256`: expected `str` matching"),
        (ENTRY.replace(DIGEST, DIGEST.upper()), "`sha256`: expected `str` matching"),
        ("- &x {id: a1, client: one, sha256: y, scopes: &y [infer]}\n- *x", "keys.yaml:1: `sha256`"),
        ("- {id: a1, client: &x [one], sha256: *x}", "aliases are not taken"),
        ("- {<<: {id: a}}", "unknown field `<<`"),
        ("- {? [a] : 1}", "a field is given twice, or is none"),
        (ENTRY + "  client2: " + "[" * 900 + "]" * 900, "keys.yaml:1: "),
    ],
)
def test_a_bad_file_is_one_sentence_with_a_place(text, says, file):
    path = file(text)
    with pytest.raises(ConfigError) as caught:
        read_ring(path)
    assert says in caught.value.message
    assert caught.value.message.startswith(str(path))
    assert "\n" not in caught.value.message
    assert "secret" not in caught.value.message
    assert (caught.value.exit_code, caught.value.param) == (78, "auth.keys")


def test_a_file_that_is_none(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_ring(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="not a file"):
        read_ring(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="not a file"):
        read_ring(tmp_path / "pipe")


def test_a_list_of_none_locks_everybody_out(file):
    assert len(read_ring(file("[]")).keys) == 0


# --- changing it ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["keys.yaml", "keys.json"])
def test_what_is_written_is_read_again(name, tmp_path):
    path = tmp_path / name
    limits = KeyLimits(requests_per_minute=60)
    made = [create(client, (Scope.INFER, Scope.BATCH), NOW + DAY, limits)[0] for client in ("one", "zwölf: [2]")]
    for key in made:
        with changing(path) as found:
            found.append(key)
    assert list(read_ring(path).keys.values()) == made
    assert path.stat().st_mode & 0o777 == 0o600
    (yaml.safe_load if name.endswith("yaml") else json.loads)(path.read_text())
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_a_change_that_fails_changes_nothing(file, tmp_path):
    path = file(ENTRY)
    with contextlib.suppress(RuntimeError), changing(path) as found:
        found.clear()
        raise RuntimeError
    assert path.read_text() == ENTRY
    with pytest.raises(ConfigError), changing(file("- {")) as found:
        pass
    assert path.read_text() == "- {"
    with pytest.raises(ConfigError, match="cannot be read"), changing(tmp_path / "no" / "keys.yaml"):
        pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["keys.yaml"]


def test_it_keeps_its_mode_and_its_link(file, tmp_path):
    path = file(ENTRY, "real.yaml")
    path.chmod(0o640)
    link = tmp_path / "link.yaml"
    link.symlink_to(path)
    with changing(link) as found:
        found.append(create("two", (Scope.INFER,))[0])
    assert link.is_symlink()
    assert len(read_ring(path).keys) == 2
    assert path.stat().st_mode & 0o777 == 0o640


def test_nothing_that_no_entry_takes_is_made():
    with pytest.raises(ConfigError, match="`client`"):
        create("", (Scope.INFER,))
    with pytest.raises(ConfigError, match="public"):
        create("one", (Scope.PUBLIC,))


def _add(path, count, start=None):
    if start is not None:
        start.wait()
    for _ in range(count):
        with changing(path) as found:
            found.append(create("one", (Scope.INFER,))[0])


def test_two_that_change_it_take_turns_and_a_reader_never_sees_half(tmp_path):
    path = tmp_path / "keys.yaml"
    _add(path, 1)
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(2)
    writers = [context.Process(target=_add, args=(path, 12, start)) for _ in range(2)]
    for writer in writers:
        writer.start()
    seen = [1]
    while any(writer.is_alive() for writer in writers):
        seen.append(len(read_ring(path).keys))
        time.sleep(0.002)
    for writer in writers:
        writer.join()
    assert seen == sorted(seen)
    assert len(read_ring(path).keys) == 25


def test_a_disk_that_fails_leaves_the_file_and_nothing_else(file, tmp_path, monkeypatch):
    path = file(ENTRY)

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(keys.os, "fsync", fail)
    with pytest.raises(ConfigError, match="cannot be written: No space left"), changing(path) as found:
        found.clear()
    assert path.read_text() == ENTRY
    assert [entry.name for entry in tmp_path.iterdir()] == ["keys.yaml"]
