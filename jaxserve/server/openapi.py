"""The OpenAPI document: every URL, what it takes and gives, and every status it may answer with.

Knows the operations, and writes them down as OpenAPI 3.1 with what others know: the types of ``wire``, the ranges of
``params`` and the table of errors. Knows no handler. Limits that depend on the model are not in the document, so a
request that keeps to it may still be refused.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import msgspec

from jaxserve import __version__, errors
from jaxserve.config import ServerConfig
from jaxserve.server import parallel, wire
from jaxserve.server.extensions import BlockUpdate
from jaxserve.server.keys import Scope
from jaxserve.server.openai import HTTP_REFUSALS, TABLE
from jaxserve.server.params import (
    LONGEST_TIMEOUT_MS,
    MAX_BIAS,
    MAX_LOGPROBS,
    NOTHING,
    RANGES,
    TIMEOUT_HEADER,
    UNSERVED,
)
from jaxserve.server.prompts import ROLES

_JSON, _EVENTS = "application/json", "text/event-stream"
_SCHEMAS = "#/components/schemas/"
_ANYTHING = dict[str, Any]

_SERVED = (errors.InvalidRequest, errors.Unavailable)
_GENERATED = (*_SERVED, errors.DeadlineExceeded, errors.EngineError, errors.DeviceFault)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one URL.

    Attributes:
        path: the URL with its parameters in braces.
        does: one sentence.
        takes: the type of its JSON body, if it takes one.
        gives: the type of its JSON answer; ``None`` for plain text.
        events: the type of a stream's events, if it can stream.
        example: a body that is understood.
        raises: the errors it may answer with, their subclasses included.
        scope: what a key has to hold to ask this, on a server with keys.
        probe: it answers 503 in the form of its 200, because what it says is the status.
    """

    method: str
    path: str
    does: str
    takes: type[msgspec.Struct] | None = None
    gives: Any = None
    events: type[msgspec.Struct] | None = None
    example: dict[str, Any] = dataclasses.field(default_factory=dict)
    raises: tuple[type[errors.JaxserveError], ...] = ()
    scope: Scope = Scope.INFER
    probe: bool = False


def _probe(path: str, does: str, *raises: type[errors.JaxserveError]) -> Operation:
    return Operation(method="get", path=path, does=does, gives=_ANYTHING, raises=raises, scope=Scope.PUBLIC, probe=True)


_TURNS = [{"role": "user", "content": "Name three primary colours."}]

OPERATIONS: Sequence[Operation] = (
    Operation(
        method="post",
        path="/generate",
        does="Continues a prompt, whole or as a stream.",
        takes=wire.GenerateRequest,
        gives=wire.GenerateResponse,
        events=wire.GenerateResponse,
        example={"prompt": "The capital of France", "max_tokens": 8},
        raises=_GENERATED,
    ),
    Operation(
        method="post",
        path="/v1/completions",
        does="OpenAI's completions, whole or as a stream.",
        takes=wire.CompletionRequest,
        gives=wire.CompletionResponse,
        events=wire.CompletionResponse,
        example={"prompt": ["The capital of France"], "max_tokens": 8, "logprobs": 1},
        raises=_GENERATED,
    ),
    Operation(
        method="post",
        path="/v1/chat/completions",
        does="OpenAI's chat completions, whole or as a stream.",
        takes=wire.ChatRequest,
        gives=wire.ChatResponse,
        events=wire.ChatChunk,
        example={"messages": _TURNS, "max_tokens": 8},
        raises=_GENERATED,
    ),
    Operation(
        method="post",
        path="/tokenize",
        does="Text or messages to token ids.",
        takes=wire.TokenizeRequest,
        gives=wire.TokenizeResponse,
        example={"messages": _TURNS},
        raises=_SERVED,
    ),
    Operation(
        method="post",
        path="/detokenize",
        does="Token ids to text.",
        takes=wire.DetokenizeRequest,
        gives=wire.DetokenizeResponse,
        example={"tokens": [5, 6, 7]},
        raises=_SERVED,
    ),
    Operation(method="get", path="/v1/models", does="The served model.", gives=wire.ModelList, raises=_SERVED),
    Operation(method="get", path="/v1/models/{model}", does="A model by its name.", gives=wire.Model, raises=_SERVED),
    _probe("/livez", "Whether a restart would do no good."),
    _probe("/startupz", "Whether it has been ready once."),
    _probe("/readyz", "Whether requests should come here."),
    _probe("/health", "The same as `/readyz`."),
    _probe("/ping", "The same as `/readyz`."),
    _probe("/v2/health/live", "The same as `/livez`, as the Open Inference Protocol has it."),
    _probe("/v2/health/ready", "The same as `/readyz`, as the Open Inference Protocol has it."),
    _probe("/v2/models/{model}/ready", "The same for one model.", errors.ModelNotFound),
    Operation(method="get", path="/metrics", does="Figures in Prometheus's text format.", scope=Scope.METRICS),
    Operation(method="get", path="/openapi.json", does="This document.", gives=_ANYTHING, scope=Scope.PUBLIC),
)


def operations(config: ServerConfig) -> list[Operation]:
    """Those that there are always, and the probe that a platform asked for at start."""
    found = list(OPERATIONS)
    if config.health_route is not None and config.health_route not in {operation.path for operation in found}:
        found.append(_probe(config.health_route, "The same as `/readyz`."))
    return found


@functools.lru_cache(maxsize=4)
def encoded(config: ServerConfig) -> bytes:
    """The document as JSON."""
    return msgspec.json.encode(document(config))


def document(config: ServerConfig) -> dict[str, Any]:
    """The document of a server with these settings."""
    paths: dict[str, Any] = {}
    for operation in operations(config):
        paths.setdefault(operation.path, {})[operation.method] = _described(operation)
    kinds = {kind: None for operation in OPERATIONS for kind in (operation.takes, operation.gives, operation.events)}
    structs = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
    _, schemas = msgspec.json.schema_components(
        [*structs, BlockUpdate, wire.ErrorResponse], ref_template=_SCHEMAS + "{name}"
    )
    for name, schema in schemas.items():
        schema["description"] = schema.get("description", "").replace("``", "`")
        _narrow(name, schema["properties"], config)
    return {
        "openapi": "3.1.0",
        "info": {"title": "jaxserve", "version": __version__, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": {f"Error{status}": _refusal(status) for status in sorted(_CODES)},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def statuses(operation: Operation) -> set[int]:
    """Every status that ``operation`` may answer with."""
    raised = {row.status for cls, row in TABLE.items() if row.public and issubclass(cls, operation.raises)}
    always = {200, 400, 408, 431, 500}  # HTTP's own refusals, and what nobody foresaw
    keyed = set() if operation.scope is Scope.PUBLIC else {401, 403}
    body = {413, 415} if operation.takes else set()
    return raised | always | keyed | body | ({503} if operation.probe else set())


# --- operations -------------------------------------------------------------------------------------------------------


def _described(operation: Operation) -> dict[str, Any]:
    answer = _success(operation)
    responses: dict[str, Any] = {
        str(status): {"$ref": f"#/components/responses/Error{status}"} for status in sorted(statuses(operation))
    }
    responses["200"] = answer
    if operation.probe:
        responses["503"] = answer | {"description": "No."}
    found: dict[str, Any] = {
        "operationId": _id(operation),
        "summary": operation.does,
        "responses": responses,
        # A server without keys asks for none.
        "security": [] if operation.scope is Scope.PUBLIC else [{}, {"key": [str(operation.scope)]}],
    }
    if operation.takes:
        content = {"schema": _schema(operation.takes), "examples": {"short": {"value": operation.example}}}
        found["requestBody"] = {"required": True, "content": {_JSON: content}}
        found["parameters"] = [
            {
                "name": TIMEOUT_HEADER,
                "in": "header",
                "description": "How long the client waits, in milliseconds; then the answer is 408.",
                "schema": {"type": "integer", "minimum": 1, "maximum": LONGEST_TIMEOUT_MS},
            }
        ]
    if "{model}" in operation.path:
        found["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    return found


def _success(operation: Operation) -> dict[str, Any]:
    content: dict[str, Any]
    description = "Yes." if operation.probe else "The answer."
    if operation.gives is None:
        content = {"text/plain": {"schema": {"type": "string"}}}
    else:
        content = {_JSON: {"schema": _schema(operation.gives)}}
    if operation.events is not None:
        name = operation.events.__name__
        kinds = (operation.events, BlockUpdate, wire.ErrorResponse)
        schema = {"anyOf": [_schema(kind) for kind in kinds]}
        event = {"type": "string", "contentMediaType": _JSON, "contentSchema": schema}
        data = {"anyOf": [{"const": "[DONE]"}, event]}
        content[_EVENTS] = {"schema": {"type": "object", "properties": {"data": data}, "required": ["data"]}}
        description += f" With `stream`, events whose data is a `{name}` each, and `[DONE]` at the end;"
        description += (
            " an error that comes later is a last event with an `ErrorResponse`. Who asks for provisional text"
        )
        description += f" gets events of the type `block.update`, too, whose data is a `{BlockUpdate.__name__}`."
    return {"description": description, "headers": _HEADERS, "content": content}


def _id(operation: Operation) -> str:
    return "_".join([operation.method, *operation.path.strip("/").replace(".", "_").split("/")]).translate(
        {ord(sign): None for sign in "{}"}
    )


def _schema(kind: Any) -> dict[str, Any]:
    struct = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    return {"$ref": _SCHEMAS + kind.__name__} if struct else msgspec.json.schema(kind)


# --- errors -----------------------------------------------------------------------------------------------------------


def _codes() -> dict[int, list[str]]:
    """The words in ``error.code`` by status: those of HTTP, of our own errors, and of what nobody foresaw."""
    found: dict[int, list[str]] = {status: [code] for status, (code, _) in HTTP_REFUSALS.items()}
    for cls, row in TABLE.items():
        code = cls.code if row.public else "internal_error"
        if code not in found.setdefault(row.status, []):
            found[row.status].append(code)
    return found


_CODES = _codes()
_TEXT = {"schema": {"type": "string"}}
_HEADERS = {"x-request-id": _TEXT}


def _refusal(status: int) -> dict[str, Any]:
    more = {"retry-after": _TEXT, "retry-after-ms": _TEXT} if status in (429, 503) else {}
    more |= {"www-authenticate": _TEXT} if status == 401 else {}
    codes = ", ".join(f"`{code}`" for code in _CODES[status])
    return {
        "description": f"Refused; `error.code` may be {codes}, or a word for the fault in the field `error.param`."
        if status == 400
        else f"Refused: {codes}.",
        "headers": _HEADERS | more,
        "content": {_JSON: {"schema": _schema(wire.ErrorResponse)}},
    }


# --- what the types alone do not say ----------------------------------------------------------------------------------

_WORDS_OF = {
    "integer": ("minimum", "maximum"),
    "number": ("minimum", "maximum"),
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("propertyNames", "additionalProperties"),
}


def _narrow(name: str, properties: dict[str, Any], config: ServerConfig) -> None:
    """Writes ranges into the properties of a request's schema."""
    if name == "Message":
        properties["role"]["enum"] = list(ROLES)
    if name == "ContentPart":
        properties["type"]["enum"] = ["text"]
    if name == "Prediction":
        properties["type"]["enum"] = ["content"]
    if name == "Parallel":
        for field, words in parallel.WORDS.items():
            properties[field] = {"enum": [None, *words], "default": None}
        for field, (low, high) in parallel.RANGES.items():
            properties[field]["anyOf"][0] |= {"minimum": low, "maximum": high}
    bounds = _bounds(name, config) if name.endswith("Request") else {}
    for field, schema in properties.items():
        if bounds and field in UNSERVED:
            properties[field] = {"enum": [None, *NOTHING.get(field, ())], "description": "Not served."}
        for option in schema.get("anyOf", (schema,)):
            words = _WORDS_OF.get(option.get("type"), ())
            option |= {word: value for word, value in bounds.get(field, {}).items() if word in words}


def _bounds(name: str, config: ServerConfig) -> dict[str, dict[str, Any]]:
    """The limits of each field of a request type, as JSON Schema words them."""
    bias = {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS}
    to_count = name == "TokenizeRequest"  # nothing is an honest question there
    return {
        **{field: {"minimum": low, "maximum": high} for field, (low, high) in RANGES.items()},
        "top_k": {"minimum": -1},
        "max_tokens": {"minimum": 1 if name == "ChatRequest" else 0},
        "max_completion_tokens": {"minimum": 1},
        "min_tokens": {"minimum": 0},
        "n": {"minimum": 1, "maximum": 1 if name == "GenerateRequest" else config.max_n},
        "best_of": {"minimum": 1, "maximum": config.max_n},
        "logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
        "top_logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
        "logit_bias": {"propertyNames": {"pattern": "^[0-9]{1,10}$"}, "additionalProperties": bias},
        "stop": {"minLength": 1, "maxLength": config.max_stop_length, "maxItems": config.max_stop_strings},
        "prompt": {} if to_count else {"minLength": 1, "minItems": 1},
        "messages": {"minItems": 1, "maxItems": config.max_messages},
    }
