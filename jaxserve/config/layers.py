"""Where values come from: defaults, then a YAML file, then the environment, then flags; a later layer wins.

Knows the origin of every value and how to say that one is wrong. Reads the process environment; nothing else in the
package does. A value is written the same way in a file, a variable and a flag.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from jaxserve.config.tree import PREFIX, SETTINGS, Config, Setting, written
from jaxserve.errors import ConfigError

MAX_FILE_BYTES = 65_536
MAX_NAME = 100
FILE_VARIABLE = "JAXSERVE_CONFIG"
# What platforms tell every container: our own variable of the same setting wins.
PLATFORM_VARIABLES = types.MappingProxyType({"AIP_HEALTH_ROUTE": "server.health_route"})
DEFAULT = "default"


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """A value as somebody wrote it, and where: ``configs/a.yaml:7``, a variable's name or a flag."""

    name: str
    value: object
    origin: str


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration and, for each setting by its name, where its value came from."""

    config: Config
    origins: Mapping[str, str]


def load(
    file: Path | None = None, flags: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None
) -> Loaded:
    """Reads all layers.

    Args:
        file: a YAML file; without one, the file that ``JAXSERVE_CONFIG`` names, if it is set.
        flags: setting name to value, as the command line gave them.
        environ: the environment; the process's own by default.

    Raises:
        ConfigError: one sentence with the place, the setting, what it takes and what was found.
    """
    environ = os.environ if environ is None else environ
    if file is None and environ.get(FILE_VARIABLE):
        file = Path(environ[FILE_VARIABLE])
    given = [
        *(_from_file(file) if file else ()),
        *_from_environment(environ),
        *(Given(name, value, SETTINGS[name].flag) for name, value in (flags or {}).items()),
    ]
    values = {name: _home(setting, setting.default, DEFAULT) for name, setting in SETTINGS.items()}
    origins = dict.fromkeys(SETTINGS, DEFAULT)
    for item in given:
        values[item.name] = _convert(SETTINGS[item.name], item)
        origins[item.name] = item.origin
    sections = {
        section.name: section.type(
            **{field.name: values[f"{section.name}.{field.name}"] for field in msgspec.structs.fields(section.type)}
        )
        for section in msgspec.structs.fields(Config)
    }
    return Loaded(Config(**sections), types.MappingProxyType(origins))


def _from_environment(environ: Mapping[str, str]) -> Iterator[Given]:
    by_variable = {setting.variable: name for name, setting in SETTINGS.items()}
    for variable, name in PLATFORM_VARIABLES.items():
        if environ.get(variable):
            yield Given(name, environ[variable], variable)
    for variable, value in environ.items():
        # Only names with a double underscore are ours: an orchestrator that runs a service called "jaxserve" sets
        # JAXSERVE_PORT and JAXSERVE_SERVICE_HOST in every container.
        if variable.startswith(PREFIX) and "__" in variable:
            if variable not in by_variable:
                raise ConfigError(f"{variable}: no such setting{_nearest(variable, by_variable)}.", param=variable)
            yield Given(by_variable[variable], value, variable)


def _from_file(path: Path) -> Iterator[Given]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES:,} bytes.")
        root = yaml.compose(content.decode("utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}.") from error
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line}: not YAML: {error.problem}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {str(error).splitlines()[0]}.") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deeply.") from error
    _refuse_aliases(root, path)
    sections = {section.name for section in msgspec.structs.fields(Config)}
    for section, place, node in _entries(root, path, ""):
        if section not in sections:
            raise ConfigError(f"{place}: no section `{section}`{_nearest(section, sections)}.", param=section)
        for name, place, leaf in _entries(node, path, section + "."):
            if name not in SETTINGS:
                raise ConfigError(f"{place}: no setting `{name}`{_nearest(name, SETTINGS)}.", param=name)
            yield Given(name, _as_written(leaf), place)


def _refuse_aliases(root: yaml.Node | None, path: Path) -> None:
    """A few lines of aliases can stand for gigabytes, or for themselves."""
    seen: set[int] = set()
    left = [root] if root is not None else []
    while left:
        node = left.pop()
        if id(node) in seen:
            raise ConfigError(f"{path}:{node.start_mark.line + 1}: an alias stands for this; write it out.")
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            left += node.value
        elif isinstance(node, yaml.MappingNode):
            left += [part for pair in node.value for part in pair]


def _entries(node: yaml.Node | None, path: Path, prefix: str) -> Iterator[tuple[str, str, yaml.Node]]:
    """The entries of a mapping: dotted name, ``file:line`` and value node."""
    if node is None or (isinstance(node, yaml.ScalarNode) and not node.value):
        return
    if not isinstance(node, yaml.MappingNode):
        what = f"section `{prefix[:-1]}`" if prefix else "a configuration file"
        raise ConfigError(f"{path}:{node.start_mark.line + 1}: {what} is a mapping of names to values.")
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode) or len(key.value) > MAX_NAME or not key.value.isprintable():
            raise ConfigError(f"{path}:{line}: a name is a short word.")
        name = prefix + key.value
        if name in seen:
            raise ConfigError(f"{path}:{line}: `{name}` is given twice, first in line {seen[name]}.", param=name)
        seen[name] = line
        yield name, f"{path}:{line}", value


def _as_written(node: yaml.Node) -> object:
    """A value as text: YAML's own types would read ``off`` as false and ``1e3`` as a word."""
    if isinstance(node, yaml.SequenceNode):
        return [_as_written(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {str(key.value): _as_written(value) for key, value in node.value}
    return node.value


def _convert(setting: Setting, given: Given) -> Any:
    value = _items(given.value) if setting.takes_list else given.value
    if value in ("off", ["off"]) and setting.takes_off:
        return None
    try:
        converted = msgspec.convert(value, setting.kind, strict=False, dec_hook=lambda kind, text: kind(text))
    except (msgspec.ValidationError, TypeError) as error:
        found = repr(given.value) if len(repr(given.value)) <= 60 else repr(given.value)[:57] + "..."
        raise ConfigError(
            f"{given.origin}: `{setting.name}` takes {setting.values}, not {found}.", param=setting.name
        ) from error
    return _home(setting, converted, given.origin)


def _items(value: object) -> object:
    """What a list was given as, item by item; ``auto`` alone stays a word."""
    written_items = value if isinstance(value, list | tuple) else [value]
    items = [part for item in written_items for part in (item.split(",") if isinstance(item, str) else [item])]
    return "auto" if items == ["auto"] else [_pool(item) for item in items]


def _pool(item: object) -> object:
    """``4x2048`` as the fields of a ``Pool``; anything else as it is."""
    match = re.fullmatch(r"\s*(\d+)\s*x\s*(\d+)\s*", item) if isinstance(item, str) else None
    return {"slots": match[1], "length": match[2]} if match else item


def _home(setting: Setting, value: Any, origin: str) -> Any:
    """A path with ``~`` as the home folder, anything else as it is."""
    if not isinstance(value, Path):
        return value
    try:
        return value.expanduser()
    except RuntimeError as error:
        message = f"{origin}: `{setting.name}` is {value}, but this user has no home folder: give a path."
        raise ConfigError(message, param=setting.name) from error


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean `{near[0]}`?)" if near else ""


def describe(loaded: Loaded, *, origins: bool = False) -> str:
    """The configuration as a YAML file that ``load`` reads; with ``origins``, each line says where it is from."""
    lines: list[str] = []
    for section in msgspec.structs.fields(Config):
        lines.append(f"{section.name}:")
        for field in msgspec.structs.fields(section.type):
            line = f"  {field.name}: {written(getattr(getattr(loaded.config, section.name), field.name))}"
            origin = loaded.origins[f"{section.name}.{field.name}"]
            lines.append(f"{line:<56}  # {origin}" if origins else line)
    return "\n".join(lines) + "\n"


def tuned_environment(config: Config, environ: Mapping[str, str] | None = None) -> dict[str, str] | None:
    """The environment this process should have been started with, or ``None`` if that is the one it has.

    glibc reads its tunables before ``main``: whoever wants huge pages for the arrays that XLA allocates has to ask
    before the process starts.
    """
    environ = os.environ if environ is None else environ
    tunables = environ.get("GLIBC_TUNABLES", "")
    if config.engine.huge_pages == "off" or os.uname().sysname != "Linux" or "glibc.malloc.hugetlb" in tunables:
        return None
    return {**environ, "GLIBC_TUNABLES": ":".join(filter(None, (tunables, "glibc.malloc.hugetlb=1")))}
