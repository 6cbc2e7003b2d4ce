"""Conversations to prompts: a checkpoint's Jinja chat template with Hugging Face's semantics.

Knows messages, tools and what templates expect of them. Control tokens in a prompt come from the template alone: what a
client writes stays text, whatever it spells (see ``untrusted.py``). Templates run in ``sandbox.py``.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jinja2
from jinja2 import nodes

from jaxserve.errors import CheckpointError, InvalidRequest
from jaxserve.text.folder import CONFIG_FILE, read_json, spelling_of
from jaxserve.text.sandbox import LimitExceeded, Meter, TemplateEnvironment, run
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.untrusted import Care, disguise_for

FILE = "chat_template.jinja"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
_REASONING = ("reasoning_content", "thinking", "reasoning")  # one thing under three names
_TEXT_PARTS = ("text", "input_text", "output_text")
_LEAST_WORDS, _MOST_WORDS = 8, 200  # characters of a template's complaint
_MAX_DEPTH = 64  # of lists and objects in each other
_MAX_VALUES = 100_000  # in all messages, tools and variables of a request; half a second's work
_MAX_ARGUMENTS = 2**18  # characters of a call's arguments; longer ones stay text
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # ends with a space to see whether the template trims
_ENVIRONMENT = TemplateEnvironment()
_RESERVED = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "strftime_now"}
    | set(_SPECIAL)
    | set(_ENVIRONMENT.globals)
)


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What one rendering may cost: loop turns and calls, characters made on the way, seconds."""

    steps: int = 1_000_000
    characters: int = 64_000_000
    seconds: float = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt. ``inert`` are positions at which no control token may stand: a client wrote them."""

    text: str
    inert: frozenset[int] = frozenset()


class ChatTemplate:
    """One compiled template. Immutable, safe in threads.

    Attributes:
        source: the template's text.
        reads_parts: it takes a message's content as a list of parts; otherwise text parts are joined before.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        clock: Callable[[], datetime.datetime] = datetime.datetime.now,
        limits: Limits = Limits(),
    ) -> None:
        """Compiles ``source``.

        ``special_tokens`` maps ``bos_token`` and the like to their spellings (``Tokenizer.special_tokens``); ``clock``
        is what ``strftime_now`` reads. Raises CheckpointError for a template that is no Jinja, or that reaches for
        what the sandbox forbids or never ends as soon as it is tried.
        """
        self.source = source
        self._special = {name: text for name, text in (special_tokens or {}).items() if text}
        self._clock = clock
        self._limits = limits
        try:
            self._template = _ENVIRONMENT.from_string(source)
            tree = _ENVIRONMENT.parse(source)
        except (jinja2.TemplateError, RecursionError, ValueError, OverflowError) as error:
            raise CheckpointError(f"The chat template is not valid: {error}") from error
        constants = (node.value for node in tree.find_all(nodes.Const))
        self._literals = frozenset(value for value in constants if isinstance(value, str))
        self.reads_parts = self._probe()

    @classmethod
    def load(cls, folder: Path, *, clock: Callable[[], datetime.datetime] = datetime.datetime.now) -> Self | None:
        """The template of a checkpoint's or Hugging Face's folder, ``None`` if it has none. Raises CheckpointError."""
        folder = Path(folder)
        config = read_json(folder / CONFIG_FILE) or read_json(folder / "tokenizer" / CONFIG_FILE)
        path = folder / FILE
        if path.is_file():
            try:
                source = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error
        else:
            source = _named_template(config.get("chat_template"))
        if not source:
            return None
        special = {name: spelling_of(config.get(name)) or "" for name in _SPECIAL}
        return cls(source, special, clock=clock)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt of a conversation as one string.

        Args:
            messages: ``{"role": ..., "content": ...}`` and what else the template knows. Keys whose value is ``None``
                are dropped; ``tool_calls[].function.arguments`` may be JSON text.
            tools: function definitions.
            add_generation_prompt: end with the beginning of the assistant's turn.
            continue_final_message: end in the middle of the last message, to be written on.
            **variables: more for the template, such as ``enable_thinking``.

        Raises:
            InvalidRequest: the template refuses the messages or costs too much; ``param`` is ``messages`` or the
                place in them.
        """
        data = self._prepare(messages, tools, variables)
        return self._render(data, add_generation_prompt, continue_final_message)

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        controls: Mapping[str, int],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        check_text: Callable[[str], object] | None = None,
        **variables: Any,
    ) -> Prompt:
        """Renders as ``render`` does and tells what in the text a client wrote; ``controls`` as ``Tokenizer`` has them.

        ``check_text`` may refuse the text by an exception before its signs are followed, which takes far longer than
        to render it.

        Raises InvalidRequest as ``render``, and if messages spell control tokens in a way that the template changes
        so much that they cannot be followed.
        """
        data = self._prepare(messages, tools, variables)
        text = self._render(data, add_generation_prompt, continue_final_message)
        if check_text is not None:
            check_text(text)
        disguise = disguise_for(frozenset(controls), self._literals)
        if not disguise.needed(data):
            return Prompt(text)
        for care in Care:
            try:
                masked = self._render(disguise.put_on(data, care), add_generation_prompt, continue_final_message)
            except InvalidRequest:
                continue  # the template looks for what was disguised
            restored, inert = disguise.take_off(masked)
            if restored == text:
                return Prompt(text, inert)
        if disguise.holds_control(data):
            raise InvalidRequest("The messages spell control tokens of the model.", param="messages")
        return Prompt(text)

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        max_tokens: int | None = None,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a conversation: the template's control tokens are tokens, the client's are text.

        The template writes its own begin token, so none is added. Raises as ``prompt`` and ``Tokenizer.encode`` do.
        """
        prompt = self.prompt(
            messages,
            tokenizer.controls,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            check_text=lambda text: None if max_tokens is None else tokenizer.check_length(text, max_tokens),
            **variables,
        )
        return tokenizer.encode(
            prompt.text, add_special=False, parse_special=True, inert=prompt.inert, max_tokens=max_tokens
        )

    def _prepare(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Everything a client sent, as plain data in the form templates expect."""
        for name in variables:
            if name in _RESERVED or not name.isidentifier() or name.startswith("_"):
                raise InvalidRequest(
                    "'chat_template_kwargs' sets a name that is not free.", param="chat_template_kwargs"
                )
        plain, more = _Plain("messages"), _Plain("chat_template_kwargs")
        try:
            return {
                "messages": [self._message(index, message, plain) for index, message in enumerate(messages)],
                "tools": None if tools is None else plain(list(tools)),
                "documents": None,
                **more(dict(variables)),
            }
        except UnicodeEncodeError:
            message = "A string in the messages holds a lone surrogate: it is not valid Unicode."
            raise InvalidRequest(message, param="messages", code="invalid_string") from None

    def _message(self, index: int, message: object, rebuilt: _Plain) -> dict[str, Any]:
        if not isinstance(message, Mapping):
            raise InvalidRequest("A message must be an object.", param=f"messages[{index}]")
        plain = {key: value for key, value in rebuilt(message).items() if value is not None}
        reasoning = next((plain[name] for name in _REASONING if name in plain), None)
        if reasoning is not None:
            plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
        if isinstance(plain.get("tool_calls"), list):
            plain["tool_calls"] = [_with_parsed_arguments(call, rebuilt) for call in plain["tool_calls"]]
        if isinstance(plain.get("content"), list):
            parts = _text_parts(plain["content"], f"messages[{index}].content")
            plain["content"] = parts if self.reads_parts else " ".join(part["text"] for part in parts)
        return plain

    def _render(self, data: dict[str, Any], add_generation_prompt: bool, continue_final_message: bool) -> str:
        if not continue_final_message:
            return self._run({**data, "add_generation_prompt": add_generation_prompt})
        if add_generation_prompt:
            message = "'continue_final_message' and 'add_generation_prompt' exclude each other."
            raise InvalidRequest(message, param="continue_final_message")
        data, final = _with_tag(data)
        return _cut_at_tag(self._run({**data, "add_generation_prompt": False}), final)

    def _run(self, data: dict[str, Any]) -> str:
        limits = self._limits
        variables = {**self._special, **data, "strftime_now": lambda form: self._clock().strftime(form)}
        try:
            return run(self._template, variables, Meter(limits.steps, limits.characters, limits.seconds))
        except jinja2.TemplateError as error:
            message = f"The chat template refuses the messages{self._own_words(error)}."
            raise InvalidRequest(message, param="messages") from error
        except Exception as error:
            message = f"The chat template cannot render the messages: {type(error).__name__}."
            raise InvalidRequest(message, param="messages") from error

    def _own_words(self, error: jinja2.TemplateError) -> str:
        """What may be said of an error: our own words and the template's, never what a client wrote."""
        said = str(error)
        if not isinstance(error, LimitExceeded):
            literals = (text for text in self._literals if len(text) >= _LEAST_WORDS and said.startswith(text))
            said = max(literals, key=len, default="")
        return ": " + said.strip(" .:'\"")[:_MOST_WORDS] if said else ""

    def _probe(self) -> bool:
        """Tries the template: is it harmless, and does it read content in parts?"""
        self.reads_parts = True
        text = "an uncommon probe"
        self._try(text)
        rendered = self._try([{"type": "text", "text": text}])
        return text in rendered and "'text'" not in rendered and '"text"' not in rendered

    def _try(self, content: str | list[dict[str, str]]) -> str:
        try:
            return self.render([{"role": "user", "content": content}])
        except InvalidRequest as error:
            if isinstance(error.__cause__, (jinja2.exceptions.SecurityError, LimitExceeded)):
                raise CheckpointError(f"The chat template is not safe to run: {error.__cause__}") from error
            return ""


def _named_template(value: object) -> str:
    """The template in a ``tokenizer_config.json``: text, or a list of named ones with a default among them."""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else ""


class _Plain:
    """Rebuilds values from plain JSON types, so many in all: nothing a template could call methods of.

    Its errors name ``param``.
    """

    def __init__(self, param: str) -> None:
        self._param = param
        self._left = _MAX_VALUES

    def __call__(self, value: Any, depth: int = _MAX_DEPTH) -> Any:
        """``value`` once more. Raises UnicodeEncodeError for a string that is not Unicode."""
        self._left -= 1
        if depth < 0 or self._left < 0:
            how = "nested too deeply" if depth < 0 else f"made of more than {_MAX_VALUES} values"
            raise InvalidRequest(f"'{self._param}' is {how}.", param=self._param)
        if value is None or type(value) in (bool, int, float):
            return value
        if isinstance(value, str):
            value.encode()
            return str(value)
        if isinstance(value, Mapping):
            return {self(key, depth - 1): self(item, depth - 1) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self(item, depth - 1) for item in value]
        raise InvalidRequest(f"A {type(value).__name__} is not JSON.", param=self._param)


def _text_parts(parts: list[Any], place: str) -> list[dict[str, Any]]:
    for index, part in enumerate(parts):
        if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            message = "Only text parts are supported by this model."
            raise InvalidRequest(message, param=f"{place}[{index}]", code="unsupported_content")
    return [{**part, "type": "text"} for part in parts]


def _with_parsed_arguments(call: Any, rebuilt: _Plain) -> Any:
    """The call with its arguments as an object: most templates go through them, and print JSON text as a string."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    text = function.get("arguments")
    if not isinstance(text, str) or len(text) > _MAX_ARGUMENTS:
        return call
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": rebuilt(arguments)}}


def _with_tag(data: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """``data`` with a tag behind the last message's text, and that text."""
    messages = data["messages"]
    content = messages[-1].get("content") if messages else None
    if isinstance(content, list) and content:
        final = content[-1]["text"]
        tagged: Any = [*content[:-1], {**content[-1], "text": final + _CONTINUE_TAG}]
    elif isinstance(content, str):
        final, tagged = content, content + _CONTINUE_TAG
    else:
        raise InvalidRequest("There is no final message with content to continue.", param="continue_final_message")
    return {**data, "messages": [*messages[:-1], {**messages[-1], "content": tagged}]}, final


def _cut_at_tag(rendered: str, final: str) -> str:
    tag = _CONTINUE_TAG.strip()
    at = rendered.rfind(tag)
    if at < 0 or final.strip() not in rendered:
        message = "The chat template changes the final message, so that it cannot be continued."
        raise InvalidRequest(message, param="continue_final_message")
    if rendered.startswith(_CONTINUE_TAG, at):
        return rendered[:at]
    return rendered[:at].rstrip()  # the template trims: the space at the end of the message goes as well
