"""Starts that cannot succeed: each ends soon, in one sentence, with an exit code that says so, and leaves nothing.

Knows what operators get wrong: flags, files, names, ports, keys, certificates, checkpoints. ``corrupt.py`` runs all of
them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.rigs.tiny import NAME, ROOT, tiny_store

COMMAND = [sys.executable, "-c", "from jaxserve.cli import main; main()", "serve"]
EX_CONFIG, USAGE = 78, 2
SOON = 5.0  # seconds that a start may take to fail, on a machine that does nothing else


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """One start.

    Attributes:
        flags: as they are given; ``{here}`` is a folder of its own, ``{port}`` a port that is taken.
        says: what the sentence has to hold.
        files: what lies in the folder: name to content.
        variables: more for the environment.
        code: the exit code.
        early: it fails before the model's libraries are loaded.
        prepare: what else is done to the folder, which has the tiny model's store in it then.
    """

    flags: tuple[str, ...]
    says: str
    files: tuple[tuple[str, str], ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    code: int = EX_CONFIG
    early: bool = True
    prepare: Callable[[Path], None] | None = None


def _file(text: str, says: str) -> Start:
    return Start(("--config", "{here}/a.yaml"), says, files=(("a.yaml", text),))


def _weights(store: Path) -> Path:
    return max(store.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)


def _flip(store: Path) -> None:
    path = _weights(store)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    _replace(path, bytes(data))


def _cut(store: Path) -> None:
    _replace(_weights(store), _weights(store).read_bytes()[:-1])


def _remove(store: Path) -> None:
    _weights(store).unlink()


def _link(store: Path) -> None:
    path = _weights(store)
    path.unlink()
    path.symlink_to("/dev/zero")


def _garble_manifest(store: Path) -> None:
    _replace(next(store.rglob("manifest.json")), b"{")


def _replace(path: Path, data: bytes) -> None:
    path.chmod(0o644)
    path.write_bytes(data)


KEYS, CERTIFICATE = ("--auth.keys", "{here}/keys.yaml"), ("--tls.certificate", "{here}/a.pem")
STARTS: dict[str, Start] = {
    "an unknown flag": Start(("--server.prot", "1"), "No such option '--server.prot'", code=USAGE),
    "a word for a number": Start(("--server.port", "abc"), "takes an integer from 0 to 65,535, not 'abc'"),
    "a number out of range": Start(("--server.port", "70000"), "takes an integer from 0 to 65,535"),
    "pools that are none": Start(("--engine.pools", "4xx"), "pools like"),
    "a path that is none": Start(
        ("--server.health-route", "nope"), "takes text like `^(/[\\w.~-]+)+$` or `off`, not 'nope'"
    ),
    "an unknown variable": Start((), "no such setting", variables=(("JAXSERVE_SERVER__PROT", "1"),)),
    "a bad value in a variable": Start((), "JAXSERVE_LOG__LEVEL", variables=(("JAXSERVE_LOG__LEVEL", "loud"),)),
    "no configuration file": Start(("--config", "{here}/none.yaml"), "none.yaml: cannot be read"),
    "a folder as configuration": Start(("--config", "{here}"), "cannot be read: Is a directory"),
    "no YAML": _file("server: {port: 1\n", "not YAML"),
    "a misspelt setting": _file("server:\n  prot: 1\n", "a.yaml:2: no setting `server.prot`"),
    "a setting given twice": _file("server:\n  port: 1\n  port: 2\n", "given twice"),
    "a bomb of aliases": _file("a: &a [b, b]\nb: &b [*a, *a]\nc: [*b, *b]\n", "alias"),
    "bottomless YAML": _file("[" * 5000, "nested too deeply"),
    "a taken port": Start(("--server.port", "{port}"), "Address already in use", early=False),
    "an address of somebody else": Start(
        ("--server.host", "192.0.2.1"), "Cannot assign requested address", early=False
    ),
    "a name that is none": Start(("--server.host", "no.such.host.invalid"), "Name or service not known", early=False),
    "no key file": Start(KEYS, "keys.yaml: cannot be read", early=False),
    "a key file of something else": Start(KEYS, "keys.yaml", files=(("keys.yaml", "a: 1\n"),), early=False),
    "a key without a digest": Start(KEYS, "keys.yaml:1", files=(("keys.yaml", "- id: abcd\n"),), early=False),
    "no certificate": Start(CERTIFICATE, "a.pem", early=False),
    "a certificate that is none": Start(CERTIFICATE, "not a certificate", files=(("a.pem", "x"),), early=False),
    "a network that is none": Start(("--auth.allow", "300.1.1.1/8"), "auth.allow", early=False),
    "no such model": Start(("--model.id", "nobody"), "'nobody' has no version in use", early=False),
    "no such version": Start(("--model.version", "20200101-000000000000"), "20200101-000000000000", early=False),
    "no checkpoints at all": Start(("--checkpoints.root", "{here}/none"), "models there: none", early=False),
    "a pool beyond the model": Start(("--engine.pools", "4x4096"), "256 positions", early=False),
    "too little memory": Start(("--engine.memory-limit-bytes", "100000"), "headroom", early=False),
    "a wrong bit": Start((), "is damaged: expected SHA-256", early=False, prepare=_flip),
    "a file cut off": Start((), "is damaged: expected", early=False, prepare=_cut),
    "a file too few": Start((), "is missing", early=False, prepare=_remove),
    "a link out": Start((), "is a symbolic link", early=False, prepare=_link),
    "a garbled manifest": Start((), "manifest.json is damaged", early=False, prepare=_garble_manifest),
}


@dataclasses.dataclass(frozen=True, slots=True)
class End:
    """How a start ended: what it wrote, and what lies about that did not before."""

    code: int
    seconds: float
    lines: list[str]
    left: list[str]

    def fault(self, start: Start) -> str:
        """What is wrong with it but its time; empty if nothing is."""
        if self.code != start.code:
            return f"exit code {self.code}, not {start.code}"
        sentences = [line for line in self.lines if line.startswith("jaxserve: ")]
        if len(sentences) != 1 or sentences[0] != self.lines[-1]:
            return f"{len(sentences)} sentences, or not at the end"
        if start.says not in sentences[0]:
            return f"it says something else: {sentences[0]}"
        if len(sentences[0]) > 600 or any("Traceback" in line or 'File "' in line for line in self.lines):
            return "a traceback, or a long story"
        return f"left behind: {self.left}" if self.left else ""


def run(start: Start, scratch: Path) -> End:
    """Starts a server in an empty folder and waits for its end."""
    here, home, cache = scratch / "here", scratch / "home", scratch / "cache"
    for folder in (here, home, cache):
        folder.mkdir(parents=True)
    for name, content in start.files:
        (here / name).write_text(content)
    root = tiny_store()
    if start.prepare is not None:
        root = here / "store"
        shutil.copytree(tiny_store(), root)
        start.prepare(root / NAME)
    with taken_port() as port:
        flags = [flag.format(here=here, port=port) for flag in start.flags]
        common = ["--model.id", NAME, "--model.dtype", "float32", "--checkpoints.root", str(root)]
        common += ["--server.port", "0", "--engine.pools", "2x64", "--engine.compilation-cache", str(cache)]
        before = _listing(here, home)
        begin = time.monotonic()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("JAXSERVE_")}
        environment |= {"HOME": str(home), "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [*COMMAND, *common, *flags],
            cwd=here,
            env=environment | dict(start.variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )
        seconds = time.monotonic() - begin
    return End(done.returncode, seconds, done.stdout.splitlines(), sorted(_listing(here, home) - before))


def _listing(*folders: Path) -> set[str]:
    return {str(path.relative_to(folder)) for folder in folders for path in folder.rglob("*")}


@contextlib.contextmanager
def taken_port() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]
