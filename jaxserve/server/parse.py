"""From the bytes of a body to a wire type, or to an error that names the field at fault.

Knows JSON and msgspec's messages. Knows no route. Messages never repeat what the client sent.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from jaxserve.errors import InvalidRequest

T = TypeVar("T")

_SEARCHED = 2**20  # bytes of a body in which the fault is looked for
_MAX_NAME = 64  # a longer key is the client's own invention and is not repeated
_AT = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"Object missing required field `(?P<field>[^`]*)`")


def parse(body: bytes, kind: type[T]) -> T:
    """Decodes ``body`` as ``kind``.

    Raises:
        InvalidRequest: not JSON, not UTF-8, nested too deep, a field missing or of the wrong type.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        raise _not_json(body) from None
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        # It stops at the first field of a wrong type; the rest need not be JSON at all, and that is the graver fault.
        raise (_wrong_field(str(error)) if _is_json(text) else _not_json(body)) from None
    except (msgspec.DecodeError, RecursionError):
        raise _not_json(body) from None


def _is_json(text: str) -> bool:
    """Whether all of ``text`` is JSON, without building any of it."""
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _wrong_field(message: str) -> InvalidRequest:
    match = _AT.search(message)
    path = match["path"] if match else ""
    reason = message[: match.start()] if match else message
    missing = _MISSING.fullmatch(reason)
    if missing:
        param = param_of(f"{path}.{missing['field']}".lstrip("."))
        return InvalidRequest(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    if not path:
        return InvalidRequest(f"The body must be a JSON object: {_lower(reason)}.", code="invalid_type")
    param = param_of(path)
    if reason.startswith("Expected"):
        return InvalidRequest(f"Invalid type for '{param}': {_lower(reason)}.", param=param, code="invalid_type")
    return InvalidRequest(f"Invalid value for '{param}': {_lower(reason)}.", param=param)


def param_of(path: str) -> str:
    """The name OpenAI would give as ``param``: the whole path within ``messages``, else the top-level field.

    Within what is not OpenAI's it is the whole path, too.
    """
    path = path.replace("[...]", "")
    return path if path.startswith(("messages[", "parallel.")) else re.split(r"[.\[]", path, maxsplit=1)[0]


def _not_json(body: bytes) -> InvalidRequest:
    """Says why ``body`` is not JSON.

    Two faults have a name because clients do make them: numbers that are not finite (Python's and JavaScript's writers
    emit ``NaN``) and unpaired surrogates. Python's lenient reader lets both pass, so that the field can be found, but
    not in megabytes: it takes a hundred times as long as the strict one.
    """
    if len(body) > _SEARCHED:
        return InvalidRequest("The body is not valid JSON.", code="invalid_json")
    try:
        tree = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError):
        return InvalidRequest("The body is not valid JSON.", code="invalid_json")
    for path, value in _leaves(tree):
        param = param_of(path)
        if isinstance(value, float) and not math.isfinite(value):
            return InvalidRequest(f"'{param}' must be a finite number.", param=param or None)
        if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
            message = f"'{param}' holds an unpaired surrogate, which is not text."
            return InvalidRequest(message, param=param or None, code="invalid_string")
    return InvalidRequest("The body is not valid JSON.", code="invalid_json")


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Every number and string of a JSON tree with its path, keys included, without recursion and without a copy."""
    levels: list[tuple[str, Iterator[tuple[Any, Any]]]] = [("", iter([("", tree)]))]
    while levels:
        path, items = levels[-1]
        step = next(items, None)
        if step is None:
            levels.pop()
            continue
        key, value = step
        if isinstance(key, int):
            path = f"{path}[{key}]"
        elif key.isidentifier() and len(key) <= _MAX_NAME:
            path = f"{path}.{key}".lstrip(".")
        if isinstance(value, dict):
            yield from ((path, name) for name in value)
            levels.append((path, iter(value.items())))
        elif isinstance(value, list):
            levels.append((path, iter(enumerate(value))))
        elif isinstance(value, (float, str)):
            yield path, value


def _lower(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]
