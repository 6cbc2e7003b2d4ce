"""What a wire request asks of the sampler: ranges, defaults and refusals.

Knows the allowed range of every parameter and which ones are not served. Knows no text and no engine beyond its
``SamplingParams`` and ``Limits``. The engine checks its own limits once more; here every error names the parameter.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from jaxserve.config import ServerConfig
from jaxserve.engine.request import MAX_SEED, Limits, SamplingParams
from jaxserve.errors import ContextLengthExceeded, InvalidRequest
from jaxserve.server import wire

MAX_LOGPROBS = 20  # as OpenAI's chat API
MAX_BIAS = 100.0
TIMEOUT_HEADER = "x-request-timeout-ms"
LONGEST_TIMEOUT_MS = 24 * 3600 * 1000
_LEAST_TOP_P = 1e-9  # OpenAI allows 0, which means the likeliest token alone; so does this

# Ranges that depend on nothing: OpenAI's where OpenAI has the parameter.
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 10.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "seed": (-MAX_SEED - 1, MAX_SEED),
}

# Parameters that change the answer and are not served, with the values that ask for nothing.
NOTHING: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "suffix": ("",),
    "use_beam_search": (False,),
    "bad_words": ([],),
}
UNSERVED = (
    *NOTHING,
    *("allowed_token_ids", "audio", "chat_template", "guided_choice", "guided_grammar", "guided_json", "guided_regex"),
    *("prompt_embeds", "prompt_logprobs", "structured_outputs", "truncate_prompt_tokens", "web_search_options"),
)


def refuse_unserved(request: wire.SamplingFields | wire.TokenizeRequest) -> None:
    """Raises ``InvalidRequest`` for a parameter that this server would have to ignore to answer."""
    for name in UNSERVED:
        value = getattr(request, name, None)
        if value is not None and not any(_same(value, nothing) for nothing in NOTHING.get(name, ())):
            raise InvalidRequest(f"'{name}' is not supported.", param=name, code="unsupported_parameter")


def _same(value: Any, other: Any) -> bool:
    """Equal, and of the same type: 0 is not ``false``."""
    return type(value) is type(other) and bool(value == other)


def client_timeout(given: Sequence[str]) -> float | None:
    """How long the client waits, in seconds, by the values of its header; ``None`` if it does not say.

    Raises:
        InvalidRequest: it does not say it in whole milliseconds, or says it twice.
    """
    if not given:
        return None
    milliseconds = int(given[0]) if re.fullmatch(r"[0-9]{1,9}", given[0]) else 0
    if len(given) > 1 or not 1 <= milliseconds <= LONGEST_TIMEOUT_MS:
        message = f"The header '{TIMEOUT_HEADER}' must be a whole number from 1 to {LONGEST_TIMEOUT_MS}."
        raise InvalidRequest(message, param=TIMEOUT_HEADER)
    return milliseconds / 1000


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raises ``InvalidRequest`` with OpenAI's code unless ``low <= value <= high``."""
    if low <= value <= high:
        return
    kind = "integer" if isinstance(value, int) else "decimal"
    code = f"{kind}_below_min_value" if value < low else f"{kind}_above_max_value"
    raise InvalidRequest(f"'{name}' must be at least {low} and at most {high}.", param=name, code=code)


def sampling_params(request: wire.SamplingFields, limits: Limits, defaults: SamplingParams) -> SamplingParams:
    """The sampler's parameters but for the numbers of tokens, which depend on the prompt.

    Args:
        defaults: what the request leaves open; its ``logprobs`` are not used.

    Raises:
        InvalidRequest: a value out of its range, or ids outside the vocabulary.
    """
    given: dict[str, Any] = {}
    for name, (low, high) in RANGES.items():
        value = getattr(request, name)
        if value is not None:
            check_range(name, value, low, high)
            given[name] = value
    if request.top_p is not None:
        given["top_p"] = max(request.top_p, _LEAST_TOP_P)
    if request.seed is not None:
        given["seed"] = request.seed & MAX_SEED
    if request.top_k is not None:
        check_range("top_k", request.top_k, -1, limits.vocab_size)  # -1 is vLLM's word for all of them
        given["top_k"] = max(request.top_k, 0)
    if request.ignore_eos is not None:
        given["ignore_eos"] = request.ignore_eos
    if request.logit_bias:
        given["logit_bias"] = _logit_bias(request.logit_bias, limits)
    if request.stop_token_ids:
        check_count("stop_token_ids", len(request.stop_token_ids), limits.max_stop_token_ids)
        check_token_ids("stop_token_ids", request.stop_token_ids, limits.vocab_size)
        given["stop_token_ids"] = tuple(request.stop_token_ids)
    return dataclasses.replace(defaults, logprobs=_logprobs(request, limits), **given)


def _logprobs(request: wire.SamplingFields, limits: Limits) -> int | None:
    """How many alternatives to report beside each token: ``None`` for no logprobs at all."""
    most = min(MAX_LOGPROBS, limits.max_logprobs)
    if isinstance(request, wire.ChatRequest):
        if request.top_logprobs is None:
            return 0 if request.logprobs else None
        check_range("top_logprobs", request.top_logprobs, 0, most)
        if not request.logprobs:
            raise InvalidRequest("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
        return request.top_logprobs
    asked: int | None = getattr(request, "logprobs", None)
    if asked is not None:
        check_range("logprobs", asked, 0, most)
    return asked


def _logit_bias(bias: dict[str, float], limits: Limits) -> tuple[tuple[int, float], ...]:
    check_count("logit_bias", len(bias), limits.max_logit_bias)
    pairs = []
    for key, value in bias.items():
        if not re.fullmatch(r"[0-9]{1,10}", key) or int(key) >= limits.vocab_size:
            message = f"'logit_bias' keys must be token ids from 0 to {limits.vocab_size - 1}."
            raise InvalidRequest(message, param="logit_bias")
        check_range("logit_bias", value, -MAX_BIAS, MAX_BIAS)
        pairs.append((int(key), value))
    if len(dict(pairs)) < len(pairs):
        raise InvalidRequest("'logit_bias' names a token twice.", param="logit_bias")
    return tuple(pairs)


def check_count(name: str, count: int, most: int) -> None:
    """Raises ``InvalidRequest`` when a list is longer than ``most``."""
    if count > most:
        message = f"'{name}' may have at most {most} entries, not {count}."
        raise InvalidRequest(message, param=name, code="array_above_max_length")


def check_token_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raises ``InvalidRequest`` when an id is not in the vocabulary."""
    if any(not 0 <= token < vocab_size for token in ids):
        raise InvalidRequest(f"'{name}' must hold token ids from 0 to {vocab_size - 1}.", param=name)


def stop_strings(stop: str | list[str] | None, config: ServerConfig) -> tuple[str, ...]:
    """The strings that end the output.

    Raises:
        InvalidRequest: too many, too long, or an empty one.
    """
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    check_count("stop", len(strings), config.max_stop_strings)
    if any(not string for string in strings):
        raise InvalidRequest("'stop' must not hold an empty string.", param="stop")
    if any(len(string) > config.max_stop_length for string in strings):
        message = f"'stop' strings may have at most {config.max_stop_length} characters."
        raise InvalidRequest(message, param="stop", code="string_above_max_length")
    return strings


def choices_per_prompt(request: wire.SamplingFields, config: ServerConfig) -> int:
    """``n``, checked."""
    n = getattr(request, "n", None)
    if n is not None:
        check_range("n", n, 1, 1 if isinstance(request, wire.GenerateRequest) else config.max_n)
    return n or 1


def choices_to_try(request: wire.SamplingFields, n: int, config: ServerConfig) -> int:
    """``best_of``, checked: how many choices are generated of each prompt, of which the best ``n`` are given."""
    best_of = getattr(request, "best_of", None)
    if best_of is None:
        return n
    check_range("best_of", best_of, n, max(n, config.max_n))
    if request.stream and best_of > n:
        raise InvalidRequest(
            "'best_of' must equal 'n' in a stream: which are best is known in the end.", param="best_of"
        )
    return int(best_of)


def check_streaming(request: wire.SamplingFields) -> None:
    """Raises ``InvalidRequest`` for stream options without a stream."""
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("'stream_options' needs 'stream' to be true.", param="stream_options")


def fit_output(
    request: wire.SamplingFields, sampling: SamplingParams, prompt_tokens: int, limits: Limits, *, default: int
) -> SamplingParams:
    """``sampling`` with the numbers of tokens that fit behind a prompt.

    Args:
        prompt_tokens: length of the (longest) prompt.
        default: tokens to generate for a request that names no number, or as many of them as fit.

    Raises:
        InvalidRequest: a number is out of range.
        ContextLengthExceeded: prompt and output do not fit together.
    """
    chat = isinstance(request, wire.ChatRequest)
    name, asked, least = "max_tokens", request.max_tokens, 1 if chat else 0
    if isinstance(request, wire.ChatRequest) and request.max_completion_tokens is not None:
        name, asked = "max_completion_tokens", request.max_completion_tokens
    if asked is not None:
        check_range(name, asked, least, limits.max_output_tokens)
    room = limits.max_length - prompt_tokens
    if prompt_tokens > limits.max_input_tokens or room < (least if asked is None else asked):
        raise _context_exceeded(prompt_tokens, asked, limits, "messages" if chat else "prompt")
    max_tokens = min(default, room, limits.max_output_tokens) if asked is None else asked
    min_tokens = 0 if request.min_tokens is None else request.min_tokens
    check_range("min_tokens", min_tokens, 0, max_tokens)
    return dataclasses.replace(sampling, max_tokens=max_tokens, min_tokens=min_tokens)


def _context_exceeded(prompt_tokens: int, asked: int | None, limits: Limits, param: str) -> ContextLengthExceeded:
    output = f" and {asked} tokens of output were asked for" if asked is not None else ""
    longest = f"{limits.max_length} tokens, of which the prompt may take {limits.max_input_tokens}"
    message = f"This model's context holds at most {longest}; the prompt has {prompt_tokens}{output}."
    return ContextLengthExceeded(message, param=param)
