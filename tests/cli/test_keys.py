"""``jaxserve keys``: what is printed opens a server, what is written does not."""

from __future__ import annotations

import datetime
import subprocess
import sys

import pytest

from jaxserve import cli
from jaxserve.errors import Unauthenticated
from jaxserve.server.keys import KeyLimits, Scope, read_ring


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSERVE_AUTH__KEYS", str(tmp_path / "keys.yaml"))
    return tmp_path / "keys.yaml"


@pytest.fixture
def run(capsys):
    def run(*arguments: str, code: int = 0) -> tuple[str, str]:
        assert cli.run(["keys", *arguments]) == code
        output = capsys.readouterr()
        return output.out, output.err

    return run


def test_what_is_printed_opens_the_server(path, run):
    shown, told = run("create", "one")
    now = datetime.datetime.now(datetime.UTC)
    key = read_ring(path).authenticate(shown.strip().encode(), now)
    assert (key.client, key.scopes, key.expires, key.limits) == ("one", (Scope.INFER,), None, KeyLimits())
    assert key.id in told
    assert shown.strip() not in told
    assert shown.strip().rpartition("_")[2] not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600


def test_everything_that_an_entry_takes(path, run):
    run(
        *("create", "two words", "--scope", "infer", "--scope", "metrics", "--days", "30"),
        *("--requests-per-minute", "60", "--input-tokens-per-minute", "1000"),
        *("--output-tokens-per-minute", "2000", "--concurrency", "4"),
    )
    (key,) = read_ring(path).keys.values()
    assert key.scopes == (Scope.INFER, Scope.METRICS)
    assert 29 <= (key.expires - datetime.datetime.now(datetime.UTC)).days <= 30
    assert key.limits == KeyLimits(
        requests_per_minute=60, input_tokens_per_minute=1000, output_tokens_per_minute=2000, concurrency=4
    )
    listed, _ = run("list")
    header, row = listed.splitlines()
    assert header.split() == ["ID", "CLIENT", "SCOPES", "VALID", "LIMITS"]
    assert row.startswith(f"{key.id}  two words  infer,metrics  until {key.expires:%Y-%m-%d}")
    assert row.endswith("60 requests/min, 1,000 input tokens/min, 2,000 output tokens/min, 4 at once")


def test_a_list_tells_what_has_passed(path, run):
    path.write_text(
        f"- {{id: a, client: x, sha256: {'0' * 64}, expires: 2020-01-01}}\n"
        f"- {{id: b, client: x, sha256: {'0' * 64}, not_before: 2999-01-01, expires: 2999-02-01}}\n"
        f"- {{id: c, client: x, sha256: {'0' * 64}}}\n"
    )
    listed, _ = run("list")
    rows = listed.splitlines()
    assert "expired 2020-01-01" in rows[1]
    assert "from 2999-01-01 until 2999-02-01" in rows[2]
    assert "always" in rows[3]
    assert "0000" not in listed


def test_a_revoked_key_opens_nothing(path, run):
    first, _ = run("create", "one")
    second, _ = run("create", "one")
    now = datetime.datetime.now(datetime.UTC)
    gone = read_ring(path).authenticate(first.strip().encode(), now).id
    said, _ = run("revoke", gone)
    assert said == f"{gone}: revoked.\n"
    ring = read_ring(path)
    ring.authenticate(second.strip().encode(), now)
    with pytest.raises(Unauthenticated):
        ring.authenticate(first.strip().encode(), now)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["revoke", "nobody"], 78, "no key has the id `nobody`"),
        (["create", ""], 78, "`client`"),
        (["create", "one", "--scope", "public"], 2, "public"),
        (["create", "one", "--days", "0"], 2, "--days"),
        (["list", "--auth.keys", "/no/such/keys.yaml"], 78, "cannot be read"),
        (["create", "one", "--auth.keys", "/no/such/keys.yaml"], 78, "cannot be read"),
        (["list", "--auth.keys", "off"], 78, "name one by `--auth.keys`"),
    ],
)
def test_a_mistake_is_one_sentence_and_changes_nothing(path, run, arguments, code, says):
    path.write_text("[]")
    out, err = run(*arguments, code=code)
    assert out == ""
    assert says in err
    assert err.count("\n") == 1
    assert path.read_text() == "[]"


def test_a_bad_file_is_left_as_it_is(path, run):
    path.write_text("- {")
    _, err = run("create", "one", code=78)
    assert str(path) in err
    assert path.read_text() == "- {"


def test_it_does_not_wait_for_jax(tmp_path):
    script = (
        "import sys; from jaxserve.cli import run; "
        f"code = run(['keys', 'create', 'one', '--auth.keys', {str(tmp_path / 'k.yaml')!r}]); "
        "print(code, 'jax' in sys.modules, 'starlette' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.split()[1:] == ["0", "False", "False"]
