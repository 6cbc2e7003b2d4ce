"""Every error that jaxserve raises on purpose.

This module knows what can go wrong and what a caller is told about it. It does not know HTTP (one table in
``server/openai.py`` maps each class to a status) nor the command line (``exit_code`` is the only hint it gives).
"""

from __future__ import annotations


class JaxserveError(Exception):
    """Base of all. ``str(error)`` is one sentence for a person; ``code`` is a word for a program.

    Attributes:
        message: one sentence, safe to show to a client: no path, address or prompt in it for request errors.
        code: a stable machine-readable word, as in OpenAI's error objects.
        param: the request parameter or the setting at fault, if there is one.
        exit_code: what the command line exits with when this error ends it (sysexits.h).
    """

    code: str = "error"
    exit_code: int = 1

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


# --- a request that cannot be served as it stands -------------------------------------------------------------------


class InvalidRequest(JaxserveError):
    """The request is wrong and will be wrong again: a 4xx that names the parameter."""

    code = "invalid_value"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and requested output do not fit into any pool."""

    code = "context_length_exceeded"


class ModelNotFound(InvalidRequest):
    """The named model is not served here."""

    code = "model_not_found"


class Quarantined(InvalidRequest):
    """The same request made a step fail a short while ago."""

    code = "quarantined"


# --- a caller who may not ---------------------------------------------------------------------------------------------


class Unauthenticated(JaxserveError):
    """No key, or one that is not valid."""

    code = "invalid_api_key"


class Forbidden(JaxserveError):
    """A valid key, or an address, that may not do this."""

    code = "insufficient_permissions"


# --- a request that came at a bad moment ------------------------------------------------------------------------------


class Unavailable(JaxserveError):
    """Not now; the same request may succeed later. ``retry_after`` is in seconds."""

    code = "service_unavailable"

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Overloaded(Unavailable):
    """The queue is full."""

    code = "server_is_overloaded"


class QueueTimeout(Unavailable):
    """The request waited longer than the server lets any request wait."""

    code = "queue_timeout"


class RateLimited(Unavailable):
    """A key's share of the minute is used up; ``kind`` says which: ``requests`` or ``tokens``."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, kind: str = "requests", retry_after: float = 1.0) -> None:
        super().__init__(message, retry_after=retry_after)
        self.kind = kind


class NotReady(Unavailable):
    """The model is still being verified, compiled or tested."""

    code = "not_ready"


class ShuttingDown(Unavailable):
    """The server drains."""

    code = "server_shutdown"


class DeadlineExceeded(JaxserveError):
    """The caller's own deadline passed before the request was done."""

    code = "deadline_exceeded"


# --- a request that failed through no fault of its own ----------------------------------------------------------------


class EngineError(JaxserveError):
    """The step that carried this request failed."""

    code = "engine_error"


class NumericalError(EngineError):
    """The model produced a non-finite number for this request."""

    code = "numerical_error"


class DeviceFault(EngineError):
    """Steps fail whoever is in them: the device, not a request, is at fault, and the process ends."""

    code = "device_fault"
    exit_code = 70  # EX_SOFTWARE


# --- what stops a process ---------------------------------------------------------------------------------------------


class ConfigError(JaxserveError):
    """A setting is missing, misspelt or out of range; ``param`` names it."""

    code = "config_error"
    exit_code = 78  # EX_CONFIG


class PlanError(ConfigError):
    """What is asked for does not fit the device; the message holds the numbers."""

    code = "does_not_fit"


class CheckpointError(JaxserveError):
    """A checkpoint is absent, incomplete, damaged or of an unknown kind; the message names the file."""

    code = "checkpoint_error"
    exit_code = 78  # EX_CONFIG


class SelfTestFailed(CheckpointError):
    """The loaded model did not reproduce its stored golden tokens."""

    code = "self_test_failed"


class SourceUnavailable(JaxserveError):
    """A model's source (package index, hub, folder) could not be reached."""

    code = "source_unavailable"
    exit_code = 69  # EX_UNAVAILABLE
