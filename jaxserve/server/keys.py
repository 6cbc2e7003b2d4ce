"""API keys: the file that lists them, the ring that is made of it, and whether a key that somebody shows is in there.

A key reads ``jx_<id>_<secret>``. The file holds the SHA-256 of the secret and never the secret: 256 random bits need no
slow hash, which would let anybody keep this process busy. Knows no HTTP, no clock of its own and no request.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import enum
import fcntl
import hashlib
import hmac
import os
import re
import secrets
import tempfile
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml
from msgspec import Meta

from jaxserve.errors import ConfigError, Unauthenticated

MAX_FILE_BYTES = 2**20
_LONGEST_SECRET = 512  # bytes that are hashed, whatever comes
_NOBODY = "0" * 64  # stands in for the digest of an unknown id, so that every look-up takes the same steps
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast where libyaml is there

_Count = Annotated[int, Meta(ge=1, le=10**12)]
_Id = Annotated[str, Meta(pattern=r"^[A-Za-z0-9-]{1,64}\Z")]
_Client = Annotated[str, Meta(pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]{1,128}\Z")]
_Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
_Moment = Annotated[datetime.datetime, Meta(tz=True)]


class Scope(enum.StrEnum):
    """What a key may be used for. ``PUBLIC`` is what needs no key."""

    PUBLIC = "public"
    INFER = "infer"
    BATCH = "batch"
    METRICS = "metrics"
    ADMIN = "admin"


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How much a key may use; what is not given is not limited.

    Attributes:
        requests_per_minute, input_tokens_per_minute, output_tokens_per_minute: as much at once, then at this rate.
        concurrency: HTTP requests that run at once.
    """

    requests_per_minute: _Count | None = None
    input_tokens_per_minute: _Count | None = None
    output_tokens_per_minute: _Count | None = None
    concurrency: _Count | None = None


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One entry of the key file.

    Attributes:
        id: its public part; logs and metrics name keys by it.
        client: whose it is; a client has two while one is being replaced.
        sha256: SHA-256 of the secret's bytes, in lower-case hex.
        scopes: what it may be used for.
        not_before, expires: when it is valid, if not always.
    """

    id: _Id
    client: _Client
    sha256: _Digest
    scopes: tuple[Scope, ...] = (Scope.INFER,)
    not_before: _Moment | None = None
    expires: _Moment | None = None
    limits: KeyLimits = KeyLimits()

    def __post_init__(self) -> None:
        if Scope.PUBLIC in self.scopes:
            raise ValueError("What is public needs no key")
        if self.not_before and self.expires and self.not_before >= self.expires:
            raise ValueError("It expires before it is valid")


@dataclasses.dataclass(frozen=True, slots=True)
class KeyRing:
    """All keys of a file, by id; made anew when the file changes, never changed."""

    keys: Mapping[str, Key]

    @classmethod
    def of(cls, keys: Iterable[Key]) -> KeyRing:
        """A ring of ``keys``, whose ids differ."""
        return cls(types.MappingProxyType({key.id: key for key in keys}))

    def authenticate(self, shown: bytes, now: datetime.datetime) -> Key:
        """The key that ``shown`` is; takes one digest and one comparison whatever is shown.

        Raises:
            Unauthenticated: it is none, or not valid at ``now``. The message says nothing of what was shown.
        """
        prefix, _, rest = shown.partition(b"_")
        name, _, secret = rest.partition(b"_")
        key = self.keys.get(name.decode("latin-1"))
        digest = hashlib.sha256(secret[:_LONGEST_SECRET]).hexdigest()
        same = hmac.compare_digest(digest, _NOBODY if key is None else key.sha256)
        if key is None or not same or prefix != b"jx":
            raise Unauthenticated("This API key is not valid.")
        if key.not_before is not None and now < key.not_before:
            raise Unauthenticated("This API key is not valid yet.")
        if key.expires is not None and now >= key.expires:
            raise Unauthenticated("This API key has expired.")
        return key


def create(
    client: str, scopes: tuple[Scope, ...], expires: datetime.datetime | None = None, limits: KeyLimits | None = None
) -> tuple[Key, str]:
    """A new key for ``client``: its entry for the file, and the whole key, which nobody can tell from the entry.

    Raises:
        ConfigError: one of them is not what an entry takes.
    """
    name, secret = secrets.token_hex(4), secrets.token_hex(32)
    digest = hashlib.sha256(secret.encode()).hexdigest()
    entry = {"id": name, "client": client, "sha256": digest, "scopes": scopes, "expires": expires, "limits": limits}
    try:
        key = msgspec.convert({k: v for k, v in entry.items() if v is not None}, Key, from_attributes=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"No such key can be made: {_reason(error)}.") from None
    return key, f"jx_{name}_{secret}"


# --- the file ---------------------------------------------------------------------------------------------------------


def read_ring(path: Path) -> KeyRing:
    """The ring of a file.

    Raises:
        ConfigError: one sentence with file and line.
    """
    try:
        if path.exists() and not path.is_file():
            raise _wrong(f"{path}: not a file.")  # a pipe would be waited for
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.", param="auth.keys") from None
    return parse_ring(content, path)


def parse_ring(content: bytes, path: Path) -> KeyRing:
    """The ring of what a file holds: a list of entries in YAML or JSON; ``path`` is for messages.

    Raises:
        ConfigError: one sentence with file and line. It quotes names of fields, never a value.
    """
    keys: dict[str, Key] = {}
    for node in _entries(content, path):
        place = f"{path}:{node.start_mark.line + 1}"
        try:
            key = msgspec.convert(_plain(node, set()), Key, strict=False)
        except (msgspec.ValidationError, RecursionError) as error:
            raise _wrong(f"{place}: {_reason(error)}.") from None
        if key.id in keys:
            raise _wrong(f"{place}: the id `{key.id}` is given twice.")
        keys[key.id] = key
    return KeyRing.of(keys.values())


def _entries(content: bytes, path: Path) -> list[yaml.Node]:
    if len(content) > MAX_FILE_BYTES:
        raise _wrong(f"{path}: larger than {MAX_FILE_BYTES:,} bytes.")
    try:
        root = yaml.compose(content.decode("utf-8"), Loader=_LOADER)
    except UnicodeDecodeError as error:
        raise _wrong(f"{path}: not UTF-8 at byte {error.start}.") from None
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise _wrong(f"{path}{line}: neither YAML nor JSON.") from None
    except (yaml.YAMLError, RecursionError):
        raise _wrong(f"{path}: neither YAML nor JSON.") from None
    if not isinstance(root, yaml.SequenceNode):
        # An empty file is one that is being written: taken for a list of none, it would lock everybody out.
        raise _wrong(f"{path}: a key file is a list of keys; `[]` is one without any.")
    return list(root.value)


def _plain(node: yaml.Node, seen: set[int]) -> Any:
    """A node as lists, mappings and text; numbers and dates are read from the text, by the type that is wanted."""
    if id(node) in seen:
        raise msgspec.ValidationError("Aliases are not taken")
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, seen) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        items = [(_plain(key, seen), _plain(value, seen)) for key, value in node.value]
        names = [name for name, _ in items]
        if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
            raise msgspec.ValidationError("A field is given twice, or is none")
        return dict(items)
    if node.tag == "tag:yaml.org,2002:null":
        return None
    return node.value + "T00:00:00Z" if re.fullmatch(r"\d{4}-\d\d-\d\d", node.value) else node.value


def _reason(error: Exception) -> str:
    """What msgspec found, with the field and without its value."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    text, _, where = str(error).partition(" - at `$")
    field = where.rstrip("`").lstrip(".")
    if text.startswith("Invalid enum value"):
        text = "No such scope"
    said = text[:1].lower() + text[1:]
    return f"`{field}`: {said}" if field else said


def _wrong(message: str) -> ConfigError:
    return ConfigError(message, param="auth.keys")


@contextlib.contextmanager
def changing(path: Path) -> Iterator[list[Key]]:
    """The keys of a file, as a list to change; written back whole when the block is left, unless by an error.

    Whoever reads the file meanwhile sees it as it was before or as it is after. Two that change it take turns. A file
    that is not there is one without keys. Comments are not kept.

    Raises:
        ConfigError: it cannot be read or written.
    """
    path = Path(os.path.realpath(path))
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise _wrong(f"{path.parent}: cannot be read: {error.strerror}.") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        keys = list(read_ring(path).keys.values()) if path.exists() else []
        yield keys
        try:
            _replace(path, keys)
            os.fsync(folder)
        except OSError as error:
            raise _wrong(f"{path}: cannot be written: {error.strerror}.") from None
    finally:
        os.close(folder)


def _replace(path: Path, keys: list[Key]) -> None:
    entries = msgspec.to_builtins(keys)
    if path.suffix == ".json":
        content = msgspec.json.format(msgspec.json.encode(entries), indent=2) + b"\n"
    else:
        content = yaml.safe_dump(entries, sort_keys=False, allow_unicode=True).encode()
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # readable by its owner alone
    try:
        with os.fdopen(handle, "wb") as file:
            if path.exists():
                before = path.stat()
                os.fchmod(file.fileno(), before.st_mode & 0o777)
                with contextlib.suppress(PermissionError):  # only the superuser gives files away
                    os.fchown(file.fileno(), before.st_uid, before.st_gid)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
