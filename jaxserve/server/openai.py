"""How an error looks to a client: OpenAI's error object, the HTTP status and the retry headers.

Knows the one table from the classes of ``jaxserve.errors`` to statuses, and what HTTP's own refusals are called. Knows
no route and no engine. Messages of errors that are nobody's business but the operator's are replaced by a fixed one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from jaxserve import errors
from jaxserve.server import wire

INTERNAL = "The server failed to answer this request."


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """What an error class becomes.

    Attributes:
        status: HTTP status.
        type: OpenAI's ``error.type``.
        retry: what ``x-should-retry`` says; ``None`` leaves it out, and clients then decide by the status.
        public: whether the error's own message may leave the house.
    """

    status: int
    type: str
    retry: bool | None = None
    public: bool = True


_INVALID = "invalid_request_error"
_UNAVAILABLE = "service_unavailable_error"
_SERVER = "server_error"
_HIDDEN = Row(500, _SERVER, retry=False, public=False)

TABLE: Mapping[type[errors.JaxserveError], Row] = {
    errors.InvalidRequest: Row(400, _INVALID),
    errors.ContextLengthExceeded: Row(400, _INVALID),
    errors.ModelNotFound: Row(404, _INVALID),
    errors.Quarantined: Row(400, _INVALID),
    errors.Unauthenticated: Row(401, _INVALID),
    errors.Forbidden: Row(403, _INVALID),
    errors.Unavailable: Row(503, _UNAVAILABLE),
    errors.Overloaded: Row(503, _UNAVAILABLE),
    errors.QueueTimeout: Row(503, _UNAVAILABLE),
    errors.RateLimited: Row(429, "requests"),  # or "tokens": the error's own kind
    errors.NotReady: Row(503, _UNAVAILABLE),
    errors.ShuttingDown: Row(503, _UNAVAILABLE),
    errors.DeadlineExceeded: Row(408, "timeout_error", retry=False),
    errors.EngineError: Row(500, _SERVER, retry=False),
    errors.NumericalError: Row(500, _SERVER, retry=False),
    errors.DeviceFault: Row(500, _SERVER, retry=True),  # another replica, or this one when it is back
    errors.JaxserveError: _HIDDEN,
    errors.ConfigError: _HIDDEN,
    errors.PlanError: _HIDDEN,
    errors.CheckpointError: _HIDDEN,
    errors.SelfTestFailed: _HIDDEN,
    errors.SourceUnavailable: _HIDDEN,
}

# What HTTP itself refuses, before there is a request to speak of: status -> (code, message).
HTTP_REFUSALS: Mapping[int, tuple[str, str]] = {
    400: ("invalid_http", "This is not a valid HTTP request."),
    404: ("invalid_url", "Invalid URL."),
    405: ("method_not_supported", "This URL does not support this method."),
    408: ("request_timeout", "The request took too long to arrive."),
    413: ("request_too_large", "The request body is too large."),
    415: ("unsupported_media_type", "Send JSON with the header Content-Type: application/json."),
    431: ("headers_too_large", "The request's headers are too large or too many."),
}

# After these the rest of the request is unwanted, so the connection cannot be used again.
_CLOSING = frozenset({400, 408, 413, 431})


def row_of(error: errors.JaxserveError) -> Row:
    """The table's row of an error, or of its nearest ancestor."""
    return next(TABLE[cls] for cls in type(error).__mro__ if cls in TABLE)


def error_object(error: Exception) -> wire.ErrorObject:
    """What a client is told about ``error``, whatever it is."""
    if isinstance(error, errors.JaxserveError):
        row = row_of(error)
        if row.public:
            kind = error.kind if isinstance(error, errors.RateLimited) else row.type
            return wire.ErrorObject(sentence(error.message), kind, error.param, error.code)
    if isinstance(error, HTTPException) and error.status_code in HTTP_REFUSALS:
        code, message = HTTP_REFUSALS[error.status_code]
        return wire.ErrorObject(message, _INVALID, None, code)
    return wire.ErrorObject(INTERNAL, _SERVER, None, "internal_error")


def sentence(message: str) -> str:
    """What the engine says in passing, for a log, as a client gets it."""
    first, _, _ = message.partition(" ")
    begun = message[:1].upper() + message[1:] if first.isalpha() else message
    return begun if begun.endswith((".", "!", "?")) else begun + "."


def status_of(error: Exception) -> int:
    """The HTTP status of ``error``."""
    if isinstance(error, errors.JaxserveError):
        return row_of(error).status
    if isinstance(error, HTTPException) and error.status_code in HTTP_REFUSALS:
        return error.status_code
    return 500


def error_body(error: Exception) -> bytes:
    """The error as JSON: a response's whole body, or the data of a stream's last event."""
    return msgspec.json.encode(wire.ErrorResponse(error_object(error)))


def error_headers(error: Exception) -> dict[str, str]:
    """What goes beside the body: when (or whether) to try again, which methods there are, whether the line is cut."""
    headers: dict[str, str] = {}
    if isinstance(error, errors.Unavailable):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
        headers["retry-after-ms"] = str(max(1, math.ceil(error.retry_after * 1000)))
    if isinstance(error, errors.Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    retry = row_of(error).retry if isinstance(error, errors.JaxserveError) else None
    if status_of(error) == 500:
        retry = bool(retry)
    if retry is not None:
        headers["x-should-retry"] = "true" if retry else "false"
    if isinstance(error, HTTPException):
        allow = (error.headers or {}).get("Allow")
        if allow:
            headers["allow"] = ", ".join(sorted(name.strip() for name in allow.split(",")))
        if error.status_code in _CLOSING:
            headers["connection"] = "close"
    return headers


def error_response(error: Exception) -> Response:
    """The whole answer to a request that failed with ``error`` before anything was sent."""
    return Response(error_body(error), status_of(error), error_headers(error), media_type="application/json")
