"""Where chat templates run: Jinja's immutable sandbox with Hugging Face's settings, and a meter on what they do.

Templates come with checkpoints, from strangers; their input comes from clients. The sandbox keeps them from Python's
internals, the meter from endless loops and huge strings: every loop, call, filter, product and join is charged to it.
Knows nothing of messages or tokens.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextvars import ContextVar
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateRuntimeError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

_MAX_WIDTH = 100_000  # of a padding, a precision or a repetition given as a number
_MAX_BITS = 4096  # of an integer that a template computes
_WIDE_FORMAT = re.compile(r"\d{6,}")
_MAX_INDENT = 32  # of JSON
_GROWING = ("batch", "center", "format", "indent", "replace", "round", "slice")  # filters that can make much of little


class LimitExceeded(TemplateRuntimeError):
    """The template does more work or makes more text than it may."""


class Meter:
    """What one rendering may still do. ``steps``: loop turns and calls; ``characters``: text made on the way."""

    def __init__(self, steps: int, characters: int, seconds: float) -> None:
        self._steps = steps
        self._characters = characters
        self._deadline = time.monotonic() + seconds

    def work(self, steps: int = 1) -> None:
        """Charges ``steps``; raises LimitExceeded when they or the time are used up."""
        self._steps -= steps
        if self._steps < 0 or time.monotonic() > self._deadline:
            raise LimitExceeded("the chat template takes too many steps")

    def text(self, characters: int) -> None:
        """Charges a string of this length before or just after it is made."""
        self._characters -= characters
        if self._characters < 0:
            raise LimitExceeded("the chat template makes too much text")


_METER: ContextVar[Meter] = ContextVar("meter")


def run(template: jinja2.Template, variables: dict[str, Any], meter: Meter) -> str:
    """Renders ``template`` on the account of ``meter``."""
    token = _METER.set(meter)
    try:
        return template.render(variables)
    finally:
        _METER.reset(token)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment of Hugging Face's chat templates, metered. One serves all templates and threads."""

    # What makes long strings, lists or numbers out of short ones passes through ``call_binop``.
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        # optimized=False: constant expressions are not computed while compiling, where no meter runs.
        extensions: list[type[Extension]] = [_GenerationTag, loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=extensions)
        self.concat = _join  # type: ignore[method-assign, assignment]
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "dict": _TemplateDict(), "namespace": _SafeNamespace}
        self.filters |= {"tojson": _tojson, "from_json": json.loads}
        for name in ("random", "urlize", "wordwrap", "xmlattr"):  # not reproducible; not for prompts
            del self.filters[name]
        self.filters = {name: _metered(name, function) for name, function in self.filters.items()}
        self.filters |= {_LOOP: _each, _CONCAT: _join_values}

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        metered = _MeteredNodes().visit(source)
        metered.set_environment(self)
        return super()._generate(metered, *args, **kwargs)

    def unsafe_undefined(self, obj: object, attribute: str) -> Undefined:
        """Refuses at once: Jinja's own answer is an empty string until it is used."""
        raise SecurityError(f"a template may not reach for {attribute!r} of a {type(obj).__name__}")

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Calls a function, macro or method on the template's behalf."""
        meter = _METER.get()
        meter.work()
        method = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            _check_growth(method.__name__, owner, (*args, *kwargs.values()))
        result = super().call(context, function, *args, **kwargs)
        if isinstance(result, str):
            meter.text(len(result))
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Computes one of ``intercepted_binops``."""
        meter = _METER.get()
        meter.work()
        if operator == "%" and isinstance(left, str):
            _check_growth("format", left, right if isinstance(right, tuple) else (right,))
        elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            meter.text(len(left) + len(right))
        elif operator == "*" and (isinstance(left, Sized) or isinstance(right, Sized)):
            sized, times = (left, right) if isinstance(left, Sized) else (right, left)
            meter.text(len(sized) * max(0, times) if isinstance(times, int) else 0)
        elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MAX_BITS:
                raise LimitExceeded("the chat template computes with huge numbers")
        return super().call_binop(context, operator, left, right)


_LOOP, _CONCAT = "metered loop", "metered concat"  # no template can spell these names


class _MeteredNodes(NodeTransformer):
    """Puts a filter around what a loop runs over and in place of ``~``."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 (jinja2's own naming)
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, _LOOP, [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        values = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(values, _CONCAT, [], [], None, None, lineno=node.lineno)


class _GenerationTag(Extension):
    """``{% generation %}...{% endgeneration %}`` marks what the model wrote; it changes nothing in the text."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_unchanged"), [], [], body).set_lineno(line)

    def _unchanged(self, caller: Callable[[], str]) -> str:
        return caller()


class _TemplateDict:
    """``dict`` for templates: the constructor without the type, whose attributes lead elsewhere."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _SafeNamespace(Namespace):
    """``namespace`` for templates: no name with an underscore in front, so that nothing of Python's is reached."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that ``self`` may be one of the names
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold the name {name!r}")


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter escapes HTML."""
    if isinstance(indent, int) and indent > _MAX_INDENT:
        raise LimitExceeded("the chat template asks for a huge indent")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _join(parts: Iterable[str]) -> str:
    """``"".join`` that stops in time; Jinja uses it for the output and for every macro and block."""
    meter = _METER.get()
    pieces = []
    for part in parts:
        meter.text(len(part))
        pieces.append(part)
    return "".join(pieces)


def _join_values(values: list[Any]) -> str:
    return _join(map(str, values))


def _each(values: Any) -> Any:
    """What a loop runs over, each turn paid for. Things with a length stay themselves: templates ask for it."""
    meter = _METER.get()
    if isinstance(values, Sized):
        meter.work(len(values))
        return values
    return _turns(values, meter)


def _turns(values: Iterable[Any], meter: Meter) -> Iterator[Any]:
    for value in values:
        meter.work()
        yield value


def _metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that pays for the size of what it is given and of what it returns."""

    @functools.wraps(function)  # keeps Jinja's marks of what the filter wants to be passed
    def metered(*args: Any, **kwargs: Any) -> Any:
        meter = _METER.get()
        data = args[1:] if hasattr(function, "jinja_pass_arg") else args  # some are passed the context first
        meter.work(1 + sum(len(item) for item in data if isinstance(item, Sized)) // 100)
        value, *options = data
        options.extend(kwargs.values())
        if name == "join":
            _check_growth(name, str(options[0]) if options else "", (value,))
        elif name in _GROWING:
            _check_growth(name, str(value), options)
        result = function(*args, **kwargs)
        if isinstance(result, str):
            meter.text(len(result))
        return result

    return metered


def _check_growth(name: str, text: str, options: Sequence[Any]) -> None:
    """Charges a string operation that can multiply lengths before it is carried out."""
    if any(isinstance(option, int) and abs(option) > _MAX_WIDTH for option in options):
        raise LimitExceeded("the chat template asks for a huge width")
    longest = max((len(option) for option in options if isinstance(option, Sized)), default=0)
    if name == "translate" or (name.startswith("format") and _WIDE_FORMAT.search(text)):
        raise LimitExceeded(f"the chat template may not use {name!r} this way")
    if name.startswith("format"):
        _METER.get().text((text.count("%") + text.count("{")) * longest)
    elif name == "join":
        _METER.get().text(len(text) * longest)
    elif name == "replace":
        old = options[0] if options and isinstance(options[0], str) else ""
        _METER.get().text(text.count(old) * longest)
    elif name in ("indent", "expandtabs"):
        width = max((option for option in options if isinstance(option, int)), default=8)
        _METER.get().text((1 + text.count("\n") + text.count("\t")) * max(width, longest))
