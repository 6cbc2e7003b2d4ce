"""From what a client wrote to the token ids of a prompt: messages through the template, text through the tokenizer.

Knows which messages and prompts there may be, and how long. Knows no engine. It runs in worker threads, never on the
event loop; ``text`` bounds what a hostile template input or text may cost.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from jaxserve.config import ServerConfig
from jaxserve.errors import ContextLengthExceeded, InvalidRequest
from jaxserve.server import wire
from jaxserve.server.params import check_count, check_token_ids
from jaxserve.server.service import ServedModel
from jaxserve.text.chat import ChatTemplate, Prompt

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_COUNTABLE = 2**17  # most tokens that are counted for those who only want to count, unless the model takes more
_TAKEN = frozenset(inspect.signature(ChatTemplate.prompt).parameters)


def completion_prompts(
    prompt: str | Sequence[str | int | list[int]], model: ServedModel, config: ServerConfig
) -> tuple[tuple[int, ...], ...]:
    """The prompts of a completion request: one text, one list of ids, or a list of either.

    Raises:
        InvalidRequest: empty, mixed, too many, or ids outside the vocabulary.
        ContextLengthExceeded: one of them is longer than the model allows.
    """
    if isinstance(prompt, str):
        return (_from_text(prompt, model),)
    if not prompt:
        raise InvalidRequest("'prompt' must not be empty.", param="prompt", code="empty_array")
    if all(isinstance(item, int) for item in prompt):
        return (_from_ids([item for item in prompt if isinstance(item, int)], model),)
    check_count("prompt", len(prompt), config.max_prompts)
    texts = [item for item in prompt if isinstance(item, str)]
    if len(texts) == len(prompt):
        return tuple(_from_text(text, model) for text in texts)
    lists = [item for item in prompt if isinstance(item, list)]
    if len(lists) == len(prompt):
        return tuple(_from_ids(ids, model) for ids in lists)
    raise InvalidRequest("'prompt' must not mix texts, token ids and lists of them.", param="prompt")


def text_tokens(text: str, model: ServedModel, *, add_special: bool) -> list[int]:
    """Token ids of a text, up to ``countable`` of them, for those who only want to count.

    Raises:
        ContextLengthExceeded: more than that.
    """
    return _encode(Prompt(text), model, "prompt", add_special=add_special, most=countable(model))


def countable(model: ServedModel) -> int:
    """The longest list of tokens that is made or read without anything being generated."""
    return max(_COUNTABLE, model.engine.limits.max_length)


def chat_prompt(
    wanted: wire.ChatFields,
    model: ServedModel,
    config: ServerConfig,
    *,
    add_special: bool = False,
    to_count: bool = False,
) -> tuple[int, ...]:
    """The token ids of a conversation.

    Args:
        wanted: the messages and how to render them; unless the last one is continued, the assistant's turn is opened.
        add_special: let the tokenizer put its own tokens around the template's.
        to_count: allow more tokens than a prompt may have.

    Raises:
        InvalidRequest: no messages, an unknown role, content that is not text, or the template refuses.
        ContextLengthExceeded: longer than the model allows.
    """
    if model.chat_template is None:
        raise InvalidRequest("This model has no chat template; use /v1/completions.", param="messages")
    messages = wanted.messages
    if not messages:
        raise InvalidRequest("'messages' must not be empty.", param="messages", code="empty_array")
    check_count("messages", len(messages), config.max_messages)
    variables = wanted.chat_template_kwargs or {}
    if not _TAKEN.isdisjoint(variables):
        raise InvalidRequest("'chat_template_kwargs' sets a name that is taken.", param="chat_template_kwargs")
    most = countable(model) if to_count else model.engine.limits.max_input_tokens
    opens = not wanted.continue_final_message if wanted.add_generation_prompt is None else wanted.add_generation_prompt
    with _blaming("messages"):
        prompt = model.chat_template.prompt(
            [_turn(message, f"messages[{index}]") for index, message in enumerate(messages)],
            model.tokenizer.controls,
            add_generation_prompt=opens,
            continue_final_message=bool(wanted.continue_final_message),
            check_text=lambda text: model.tokenizer.check_length(text, most),
            **variables,
        )
    ids = _encode(prompt, model, "messages", add_special=add_special, most=most)
    if not ids:
        raise InvalidRequest("'messages' give an empty prompt.", param="messages")
    return tuple(ids)


def _from_ids(ids: list[int], model: ServedModel) -> tuple[int, ...]:
    if not ids:
        raise InvalidRequest("'prompt' must hold at least one token.", param="prompt", code="empty_array")
    check_token_ids("prompt", ids, model.engine.limits.vocab_size)
    return tuple(ids)


def _from_text(text: str, model: ServedModel) -> tuple[int, ...]:
    ids = _encode(Prompt(text), model, "prompt", add_special=True, most=model.engine.limits.max_input_tokens)
    if not ids:
        raise InvalidRequest("'prompt' must hold at least one token.", param="prompt")
    return tuple(ids)


def _encode(prompt: Prompt, model: ServedModel, param: str, *, add_special: bool, most: int) -> list[int]:
    """A raw prompt is all the client's own, so control tokens spelt in it are control tokens, as everywhere else."""
    with _blaming(param):
        return model.tokenizer.encode(
            prompt.text, add_special=add_special, parse_special=True, inert=prompt.inert, max_tokens=most
        )


@contextlib.contextmanager
def _blaming(param: str) -> Iterator[None]:
    """Names the parameter that made a text too long."""
    try:
        yield
    except ContextLengthExceeded as error:
        error.param = param
        raise


def _turn(message: wire.Message, path: str) -> dict[str, Any]:
    """A message as templates expect it."""
    role = ROLES.get(message.role)
    if role is None:
        names = ", ".join(ROLES)
        raise InvalidRequest(f"'{path}.role' must be one of: {names}.", param=f"{path}.role")
    if message.content is None and not (role == "assistant" and message.tool_calls):
        param = f"{path}.content"
        raise InvalidRequest(f"'{param}' is missing.", param=param, code="missing_required_parameter")
    for index, part in enumerate(message.content if isinstance(message.content, list) else ()):
        param = f"{path}.content[{index}]"
        if part.type != "text":
            raise InvalidRequest(f"'{param}' must be text.", param=param, code="unsupported_content")
        if part.text is None:
            param += ".text"
            raise InvalidRequest(f"'{param}' is missing.", param=param, code="missing_required_parameter")
    turn: dict[str, Any] = msgspec.to_builtins(message)
    return turn | {"role": role}
