"""F5, F16 to F19, F21, F24, F26, F27, F29, F30, F33 and F35: files, descriptors, memory, signals, keys and wires."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import msgspec
import trustme

from jaxserve.checkpoint import manifest
from tests.rigs.clients import Line, ask, ask_all
from tests.rigs.keyring import OPERATOR, keyed
from tests.rigs.served import NAME, served, started, tiny_store
from tests.rigs.stage import Stage, crowd, ended, long, said, speaking, until
from tests.rigs.tiny import ROOT, write_source

REFUSED = 78  # exit code: EX_CONFIG
HOLE = "10.77.77.1"  # this machine's end of a wire that will be cut
FAR = "10.77.77.2"


class NotStaged(Exception):
    """This machine cannot stage the fault."""


# --- checkpoints ------------------------------------------------------------------------------------------------------


async def damaged_checkpoint(kind: str) -> str:
    """F16 to F18 and F35: refused before a weight is on the device, with the file's name, and never served."""
    with _copied_store() as folder:
        named = _DAMAGES[kind](folder)
        with started("--checkpoints.root", str(folder.parents[1]), "--model.version", _version(folder)) as server:
            code = server.wait(60)
            last = server.lines[-1]
            assert code == REFUSED, f"exit {code}: {last}"
            assert named in last, f"{named} is not named: {last}"
            assert not server.records("ready")
            assert not any("Traceback" in line for line in server.lines)
    return f"exit {REFUSED}, names {named}"


@contextlib.contextmanager
def _copied_store() -> Iterator[Path]:
    """The folder of the tiny model's version in a store of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "store"
        shutil.copytree(tiny_store(), root, symlinks=True)
        yield next(path.parent for path in (root / NAME).rglob(manifest.FILE_NAME))


def _version(folder: Path) -> str:
    """What the folder is called now: a manifest that is written anew takes a new name."""
    found = next(path.parent for path in folder.parent.rglob(manifest.FILE_NAME))
    return found.name


def _largest(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def _flip(folder: Path) -> str:
    weights = _largest(folder)
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 16
    weights.write_bytes(bytes(content))
    return str(weights.relative_to(folder))


def _truncate(folder: Path) -> str:
    weights = _largest(folder)
    weights.write_bytes(weights.read_bytes()[:-1])
    return str(weights.relative_to(folder))


def _remove(folder: Path) -> str:
    weights = _largest(folder)
    weights.unlink()
    return str(weights.relative_to(folder))


def _add(folder: Path) -> str:
    (folder / "extra.bin").write_bytes(b"extra")
    return "extra.bin"


def _wrong_list(folder: Path) -> str:
    """Somebody edited the list of digests."""
    path = folder / manifest.FILE_NAME
    path.write_text(path.read_text().replace('"sha256": "', '"sha256": "0', 1))
    return manifest.FILE_NAME


def _other_config(folder: Path) -> str:
    """A configuration of another model, under a list that vouches for it."""
    config = folder / "config.json"
    changed = msgspec.json.decode(config.read_bytes())
    changed["num_hidden_layers"] += 1
    config.write_bytes(msgspec.json.encode(changed))
    _vouch(folder)
    return "layers"


def _other_goldens(folder: Path) -> str:
    """The stored answers are not this model's, and the list vouches for them."""
    goldens = folder / "goldens.json"
    changed = msgspec.json.decode(goldens.read_bytes())
    changed["prompts"][0]["tokens"][0] ^= 1
    goldens.write_bytes(msgspec.json.encode(changed))
    _vouch(folder)
    return "golden"


def _vouch(folder: Path) -> None:
    """Writes the manifest anew for what is there, and names the folder after it."""
    files = manifest.hash_files(folder, "verify")
    config = next(entry.sha256 for entry in files if entry.path == "config.json")
    old = manifest.read(folder)
    digest = manifest.write(folder, msgspec.structs.replace(old, files=files, config_sha256=config))
    folder.rename(folder.with_name(f"{folder.name.split('-')[0]}-{digest[:12]}"))


_DAMAGES: dict[str, Callable[[Path], str]] = {
    "bit": _flip,
    "truncated": _truncate,
    "missing": _remove,
    "extra": _add,
    "list": _wrong_list,
    "config": _other_config,
    "goldens": _other_goldens,
}


# Too small from the start; or with room for bytes but for few files, so that it is full halfway.
_SMALL, _FEW_FILES = "size=120k", "size=200m,nr_inodes=12"


async def full_disk() -> str:
    """F19: an import that finds the disk full, at once or halfway, says so and leaves nothing behind."""
    return f"{await _import_onto_disk(_SMALL)}; halfway: {await _import_onto_disk(_FEW_FILES)}"


async def _import_onto_disk(options: str) -> str:
    with tempfile.TemporaryDirectory() as scratch, _disk(Path(scratch) / "disk", options) as disk:
        source = write_source(Path(scratch) / "source")
        flags = ["--checkpoints.root", str(disk), "--checkpoints.catalog", str(ROOT / "checkpoints" / "catalog.yaml")]
        command = [sys.executable, "-c", "from jaxserve.cli import main; main()", "pull", str(source), *flags]
        done = await asyncio.to_thread(subprocess.run, command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        last = done.stderr.strip().splitlines()[-1]
        assert done.returncode != 0
        assert "Traceback" not in done.stderr
        assert any(word in last.lower() for word in ("space", "free", "full")), last
        left = [path.name for path in disk.rglob("*") if path.is_file() and path.stat().st_size]
        assert not left, left
    return f"exit {done.returncode}, {last.removeprefix('jaxserve: ')[:100]}"


@contextlib.contextmanager
def _disk(folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        raise NotStaged("needs to mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


# --- signals, descriptors, memory, logs -------------------------------------------------------------------------------


async def terminated() -> str:
    """F21: unready but serving, then no new connections, streams to their end; what is left is told."""
    with served("--server.lame-duck-s", "1", "--server.drain-s", "20", faulty=True) as server:
        expected = await ask_all(server.url, crowd())
        async with speaking(server, 0.05) as streams:
            server.process.send_signal(signal.SIGTERM)
            await until(lambda: httpx2.get(server.probe_url + "/readyz").status_code == 503, what="/readyz is 503")
            late = await ask(server.url, long(max_tokens=4))
            assert late.complete, "it did not serve on while it said that it is not ready"
            answers = await asyncio.gather(*streams)
        code = await asyncio.to_thread(server.wait, 20)
    assert code == 0
    assert all(answer.done and answer.said == whole.said for answer, whole in zip(answers, expected, strict=True))
    with served("--server.lame-duck-s", "0", "--server.drain-s", "0.5", faulty=True) as server:
        async with speaking(server, 0.2, long()) as streams:
            server.process.send_signal(signal.SIGTERM)
            *cut, unary = await asyncio.gather(*streams)
        code = await asyncio.to_thread(server.wait, 20)
    assert code == 0
    assert all(answer.error == "server_shutdown" and not answer.done for answer in cut), [one.error for one in cut]
    assert (unary.status, unary.error) == (503, "server_shutdown")
    return "6 of 6 streams finished, 7 of 7 that could not were told; exit 0"


async def no_descriptors(stage: Stage) -> str:
    """F26: newcomers are told, the probes answer, and it is over when there are descriptors again."""
    server = stage.server
    before = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    idle: list[Line] = []

    async def connect(count: int) -> None:
        for _ in range(count):
            line = Line(server.url)
            with contextlib.suppress(OSError):
                await line.__aenter__()
                idle.append(line)

    async with stage.unharmed(slow=0.05), stage.noted("jaxserve_shortages_total", None, resource="descriptors"):
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (server.fds() + 40, before[1]))
        try:
            await connect(27)
            told = await ask(server.url, long(max_tokens=2))
            assert (told.status, told.error) == (503, "server_is_overloaded"), (told.status, told.error)
            await connect(40)
            closed = await ask(server.url, long(max_tokens=2))
            assert closed.status in (0, 503), closed.status
            for path in ("/livez", "/readyz"):
                assert (await ask(server.probe_url, None, path=path)).status == 200
            for line in idle:
                await line.__aexit__()
            await asyncio.sleep(0.2)
            assert (await ask(server.url, long(max_tokens=2))).complete, "it did not recover"
        finally:
            resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, before)
    await stage.normal()
    return f"{len(idle)} connections where 40 fit: told, then closed, then served again; probes answered throughout"


async def no_memory() -> str:
    """F33: new generations are refused below the limit, running ones go on; over when there is memory again."""
    limit = 2 * 2**30
    with served("--server.rss-limit-bytes", str(limit), faulty=True) as server:
        stage = Stage(server)
        await stage.prepare()
        async with stage.unharmed(slow=0.05), stage.noted("jaxserve_shortages_total", None, resource="memory"):
            await asyncio.to_thread(server.control, "ballast", size=int(0.93 * limit) - server.rss())
            refused = await ask(server.url, long(max_tokens=2))
            assert (refused.status, refused.error) == (503, "server_is_overloaded"), (refused.status, refused.error)
            assert float(refused.headers["retry-after"]) > 0
            assert (await ask(server.probe_url, None, path="/livez")).status == 200
            server.control("ballast", size=0)
            await asyncio.sleep(0.3)
            assert (await ask(server.url, long(max_tokens=2))).complete, "it did not recover"
        await stage.normal()
    return "refused at 90 %, served again below"


async def blocked_log(stage: Stage) -> str:
    """F27: nobody reads what it writes; requests do not wait, lines are dropped and counted."""
    server = stage.server
    server.reading.clear()
    try:
        async with stage.unharmed():
            await asyncio.to_thread(server.control, "log", lines=20_000, size=200)
            answers = await ask_all(server.url, [long(number, max_tokens=8) for number in range(12)])
            assert all(answer.complete for answer in answers)
            dropped = server.metric("jaxserve_log_lines_dropped_total")
            assert dropped > 0, "nothing was dropped, or nothing was counted"
            server.reading.set()
    finally:
        server.reading.set()
    lines = len(server.lines)
    await ask(server.url, long(max_tokens=2))
    await until(lambda: any(ended(status=200)(one) for one in server.records()[lines:]), what="lines are written again")
    await stage.normal()
    return f"{dropped:,.0f} lines dropped, 12 of 12 requests served"


# --- keys and certificates --------------------------------------------------------------------------------------------


async def key_revoked() -> str:
    """F24 and F30: a new list holds within a second, a broken one never does, and the revoked key's streams end."""
    with tempfile.TemporaryDirectory() as scratch:
        ring = keyed(Path(scratch), "stays", "goes")
        with served("--auth.keys", str(ring.file), faulty=True) as server:
            server.headers = ring.headers(OPERATOR)
            server.control("slow", seconds=0.1)
            streams = [
                asyncio.create_task(ask(server.url, long(stream=True, logprobs=0), headers=ring.headers(client)))
                for client in ("stays", "goes")
            ]
            await until(lambda: server.metric("jaxserve_requests_running") == 2, what="both streams run")
            ring.write("stays", OPERATOR)

            async def status() -> int:
                return (await ask(server.url, long(max_tokens=1), headers=ring.headers("goes"))).status

            began = time.monotonic()
            while await status() != 401:
                assert time.monotonic() - began < 5
                assert (await ask(server.url, long(max_tokens=1), headers=ring.headers("stays"))).complete
            revoked = time.monotonic() - began
            gone = await streams[1]
            assert gone.error, "the revoked key's stream went on"
            assert not gone.done

            failures = {"metric": "jaxserve_config_reload_failures_total", "file": "keys"}
            stage = Stage(server)
            async with stage.noted(line=said("reload failed; what was before holds"), **failures):
                ring.file.write_text("- id: half a ke")
            assert (await ask(server.url, long(max_tokens=1), headers=ring.headers("stays"))).complete
            assert await status() == 401
            server.control("slow", seconds=0)
            assert (await streams[0]).complete, "another key's stream was harmed"
            ring.file.unlink()
            ring.write("stays", "goes", OPERATOR)
            await asyncio.sleep(1.2)
            assert await status() == 200
    return f"revoked after {revoked:.2f} s; the broken file changed nothing"


async def certificate_rotated() -> str:
    """F29: new handshakes get the new certificate, a broken file changes nothing, running streams go on."""
    authority = trustme.CA()
    context = ssl.create_default_context()
    authority.configure_trust(context)
    with tempfile.TemporaryDirectory() as scratch:
        files = [Path(scratch) / name for name in ("certificate.pem", "key.pem")]

        def issue() -> int:
            """Writes a new certificate; its serial number."""
            leaf = authority.issue_cert("127.0.0.1")
            leaf.private_key_pem.write_to_path(str(files[1]))
            files[0].write_bytes(b"".join(pem.bytes() for pem in leaf.cert_chain_pems))
            return _serial(ssl.PEM_cert_to_DER_cert(leaf.cert_chain_pems[0].bytes().decode()))

        async def shown(port: int) -> int:
            reader_writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            der = reader_writer[1].get_extra_info("ssl_object").getpeercert(binary_form=True)
            reader_writer[1].close()
            return _serial(der)

        first = issue()
        flags = ["--tls.certificate", str(files[0]), "--tls.private-key", str(files[1])]
        with started(*flags, faulty=True) as server:
            await until(lambda: httpx2.get(server.probe_url + "/readyz").status_code == 200, 120, "ready")
            server.control("slow", seconds=0.1)
            assert await shown(server.port) == first
            stream = asyncio.create_task(ask(server.url, long(stream=True, logprobs=0), tls=context))
            await asyncio.sleep(0.3)
            second, began = issue(), time.monotonic()
            while await shown(server.port) != second:
                assert time.monotonic() - began < 5
                await asyncio.sleep(0.05)
            renewed = time.monotonic() - began
            files[0].write_text("-----BEGIN CERTIFICATE-----\nnonsense\n")
            await until(lambda: bool(server.records("reload failed; what was before holds")), what="a line says it")
            assert await shown(server.port) == second
            assert (await stream).complete
    return f"new certificate after {renewed:.2f} s; the broken one was never shown"


def _serial(der: bytes | None) -> int:
    from cryptography import x509

    assert der
    return x509.load_der_x509_certificate(der).serial_number


# --- wires ------------------------------------------------------------------------------------------------------------

_VANISHING = f"""
import socket, sys, time
line = socket.create_connection(("{HOLE}", int(sys.argv[1])))
body = sys.argv[2].encode()
head = ["POST /v1/completions HTTP/1.1", "host: {HOLE}", "content-type: application/json"]
line.sendall("\\r\\n".join([*head, f"content-length: {{len(body)}}", "", ""]).encode() + body)
line.recv(100)
print("reading", flush=True)
time.sleep(300)
"""


async def vanished_peer() -> str:
    """F5: the wire is cut without a word; the slot is free within a minute. Takes half of one."""
    flags = ("--server.host", HOLE, "--engine.pools", "4x256", "--engine.steps-per-dispatch", "1")
    with _wire() as (enter, cut), served(*flags, faulty=True) as server:
        stage = Stage(server)
        server.control("slow", seconds=0.4)
        body = msgspec.json.encode(long(max_tokens=240, stream=True, n=4)).decode()
        command = [*enter, sys.executable, "-c", _VANISHING, str(server.port), body]
        far = await asyncio.to_thread(subprocess.Popen, command, stdout=subprocess.PIPE, text=True)
        try:
            assert far.stdout
            assert (await asyncio.to_thread(far.stdout.readline)).strip() == "reading"
            assert server.metric("jaxserve_requests_running") == 4
            await asyncio.to_thread(subprocess.run, cut, check=True)
            began = time.monotonic()
            async with stage.noted(None, ended(status=499)):
                await until(lambda: server.metric("jaxserve_requests_running") == 0, 60, "the slots are free")
            seconds = time.monotonic() - began
            assert server.metric("jaxserve_requests_finished_total", reason="cancelled") == 4
        finally:
            far.kill()
            far.wait()
            assert far.stdout
            far.stdout.close()
    return f"slots free {seconds:.0f} s after the wire was cut"


@contextlib.contextmanager
def _wire() -> Iterator[tuple[list[str], list[str]]]:
    """A wire to another network namespace: how a command gets there, and the command that cuts it."""
    space, near, far = "rig-far", "rig-near0", "rig-far0"
    enter = ["ip", "netns", "exec", space]
    commands = [
        ["ip", "netns", "add", space],
        ["ip", "link", "add", near, "type", "veth", "peer", "name", far],
        ["ip", "link", "set", far, "netns", space],
        ["ip", "address", "add", f"{HOLE}/30", "dev", near],
        ["ip", "link", "set", near, "up"],
        [*enter, "ip", "address", "add", f"{FAR}/30", "dev", far],
        [*enter, "ip", "link", "set", far, "up"],
    ]
    if os.geteuid() or shutil.which("ip") is None:
        raise NotStaged("needs a network namespace")
    try:
        for command in commands:
            if subprocess.run(command, capture_output=True, check=False).returncode:
                raise NotStaged("needs a network namespace")
        yield enter, [*enter, "ip", "link", "set", far, "down"]
    finally:
        for command in (["ip", "link", "delete", near], ["ip", "netns", "delete", space]):
            subprocess.run(command, capture_output=True, check=False)
