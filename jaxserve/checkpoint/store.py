"""The store: models, their immutable versions, and which one is in use.

It knows folders, pointer files and locks. It does not know what a version holds beyond its manifest's name.

Layout, below one root::

    <model>/<version>/          written once, never changed; the name ends in the manifest's digest
    <model>/CURRENT, PREVIOUS   one line each: a version; replaced as a whole, so that a crash leaves the old or the new
    <model>/.tmp-*/             work in progress; whoever made it holds a lock on the file `lock` in it
    .lock                       held for the moment in which anything appears, goes or is chosen
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from jaxserve.checkpoint import manifest
from jaxserve.checkpoint.files import fsync_path, fsync_tree, read_regular, replace_text
from jaxserve.errors import CheckpointError

_MODEL_NAME: Final = re.compile(r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_CURRENT: Final = "CURRENT"
_PREVIOUS: Final = "PREVIOUS"
_TEMPORARY: Final = ".tmp-"


@dataclasses.dataclass(frozen=True, slots=True)
class Workspace:
    """A temporary folder in a model's own folder, on the same disk as its versions.

    Attributes:
        content: becomes the version when it is published.
        scratch: everything else.
    """

    content: Path
    scratch: Path


class Store:
    """Versions of models below one folder. Safe among processes: every change is made under the store's lock.

    Every method that takes a model or a version raises :class:`CheckpointError` when the name is malformed.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def models(self) -> list[str]:
        """Names of the models that have at least one version."""
        if not self.root.is_dir():
            return []
        names = sorted(entry.name for entry in self.root.iterdir() if _MODEL_NAME.fullmatch(entry.name))
        return [name for name in names if self.versions(name)]

    def versions(self, model: str) -> list[str]:
        """Versions of a model, oldest first; empty if it has none."""
        folder = self._folder(model)
        if not folder.is_dir():
            return []
        found = []
        for entry in folder.iterdir():
            if manifest.VERSION_NAME.fullmatch(entry.name) and (entry / manifest.FILE_NAME).is_file():
                found.append((entry.name[:8], (entry / manifest.FILE_NAME).stat().st_mtime_ns, entry.name))
        return [name for _, _, name in sorted(found)]

    def current(self, model: str) -> str | None:
        """The version in use, ``None`` if there is none."""
        return self._pointer(model, _CURRENT)

    def previous(self, model: str) -> str | None:
        """The version that was in use before, ``None`` if there is none."""
        return self._pointer(model, _PREVIOUS)

    def path(self, model: str, version: str | None = None) -> Path:
        """The folder of a version, by default of the one in use.

        Raises:
            CheckpointError: there is no such model or version; the message lists what there is.
        """
        version = self.current(model) if version is None else version
        if version is None:
            known = ", ".join(self.models()) or "none"
            raise CheckpointError(f"Model {model!r} has no version in use in {self.root}; models there: {known}.")
        if not manifest.VERSION_NAME.fullmatch(version) or version not in self.versions(model):
            lost = self._folder(model) / version / manifest.FILE_NAME
            if manifest.VERSION_NAME.fullmatch(version) and lost.parent.is_dir():
                raise CheckpointError(f"{lost} is missing.")
            known = ", ".join(self.versions(model)) or "none"
            raise CheckpointError(f"Model {model!r} has no version {version[:40]!r}; versions there: {known}.")
        return self._folder(model) / version

    def use(self, model: str, version: str) -> None:
        """Makes ``version`` the one in use; what was in use becomes the previous one."""
        with self._locked():
            self._use(model, version)

    def rollback(self, model: str) -> str:
        """Exchanges the version in use with the previous one and returns the new one in use."""
        with self._locked():
            current, previous = self.current(model), self.previous(model)
            if previous is None or previous == current:
                raise CheckpointError(f"Model {model!r} has no previous version; choose one of {self.versions(model)}.")
            self.path(model, previous)
            # CURRENT first: a crash in between leaves the roll-back done, not half done.
            replace_text(self._folder(model) / _CURRENT, previous + "\n")
            if current is not None:
                replace_text(self._folder(model) / _PREVIOUS, current + "\n")
            return previous

    def gc(self, model: str, keep: int) -> list[str]:
        """Removes what nobody needs: abandoned work, and all but the ``keep`` newest versions.

        The version in use and the previous one always stay. Returns the versions removed.
        """
        if keep < 0:
            raise CheckpointError(f"gc cannot keep {keep} versions.")
        if not self._folder(model).is_dir():
            raise CheckpointError(f"There is no model {model!r} in {self.root}.")
        with self._locked():
            for entry in self._folder(model).glob(f"{_TEMPORARY}*"):
                self._remove_abandoned(entry)
            versions = self.versions(model)
            kept = {self.current(model), self.previous(model), *versions[max(0, len(versions) - keep) :]}
            removed = [version for version in versions if version not in kept]
            for version in removed:
                # Renamed first: a crash in between leaves an abandoned folder, never a version with files missing.
                doomed = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=self._folder(model)))
                (self._folder(model) / version).rename(doomed / version)
                shutil.rmtree(doomed)
            return removed

    @contextlib.contextmanager
    def workspace(self, model: str) -> Iterator[Workspace]:
        """A temporary folder that is gone afterwards, whatever happens; after a crash :meth:`gc` removes it."""
        folder = self._folder(model)
        with contextlib.ExitStack() as held:
            with self._locked():  # gc must not meet the folder before its lock is held
                folder.mkdir(exist_ok=True)
                root = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=folder))
                held.enter_context(_exclusive(root / "lock"))
            held.callback(self._discard, root)
            work = Workspace(root / "content", root / "scratch")
            work.content.mkdir()
            work.scratch.mkdir()
            yield work

    def publish(self, model: str, content: Path, today: datetime.date | None = None) -> str:
        """Turns a finished folder with a manifest into a version and makes it the one in use.

        Everything is on the disk before the version's name appears. A version that is there already stays as it is.

        Args:
            model: the model's name.
            content: a folder on the same file system; it is moved, not copied.
            today: the date in the version's name, by default that of now in UTC.

        Returns:
            The version's name.
        """
        digest = hashlib.sha256(read_regular(content / manifest.FILE_NAME, 1 << 30)).hexdigest()
        day = datetime.datetime.now(datetime.UTC).date() if today is None else today
        version = f"{day:%Y%m%d}-{digest[:12]}"
        for parent, _, names in os.walk(content):
            for name in names:
                Path(parent, name).chmod(0o444)
        fsync_tree(content)
        with self._locked():
            if version not in self.versions(model):
                content.rename(self._folder(model) / version)
                fsync_path(self._folder(model))
            self._use(model, version)
        return version

    def _use(self, model: str, version: str) -> None:
        self.path(model, version)
        current = self.current(model)
        if current == version:
            return
        # PREVIOUS first: a crash in between leaves the old version in use and nothing to roll back to.
        if current is not None:
            replace_text(self._folder(model) / _PREVIOUS, current + "\n")
        replace_text(self._folder(model) / _CURRENT, version + "\n")

    def _folder(self, model: str) -> Path:
        if not _MODEL_NAME.fullmatch(model):
            raise CheckpointError(f"{model[:100]!r} is not a model's name: letters, digits, '.', '_' and '-' only.")
        return self.root / model

    def _pointer(self, model: str, name: str) -> str | None:
        path = self._folder(model) / name
        if not path.exists() and not path.is_symlink():
            return None
        version = read_regular(path, 100).decode("ascii", "replace").strip()
        if not manifest.VERSION_NAME.fullmatch(version):
            raise CheckpointError(f"{path} holds {version!r}, which is no version.")
        return version

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            lock = _exclusive(self.root / ".lock")
            lock.__enter__()
        except OSError as error:
            raise CheckpointError(f"The checkpoints' folder {self.root} cannot be written: {error.strerror}.") from None
        with contextlib.ExitStack() as held:
            held.push(lock)
            yield

    def _discard(self, folder: Path) -> None:
        with self._locked():
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                folder.parent.rmdir()  # succeeds only when nothing else is in it

    @staticmethod
    def _remove_abandoned(entry: Path) -> None:
        if not entry.is_dir():
            entry.unlink()  # a pointer file that did not get its name
            return
        try:
            with _exclusive(entry / "lock", wait=False):
                pass
        except BlockingIOError:
            return  # its maker is alive
        shutil.rmtree(entry, ignore_errors=True)


@contextlib.contextmanager
def _exclusive(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Holds a file's lock; the kernel lets go of it when the process dies, however it dies."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(descriptor)
