"""The one table from errors to answers."""

from __future__ import annotations

import inspect

import msgspec
import pytest
from starlette.exceptions import HTTPException

from jaxserve import errors
from jaxserve.server import openai

CLASSES = [
    cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, errors.JaxserveError)
]  # fmt: skip


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_has_a_row(cls):
    assert cls in openai.TABLE


def test_no_row_is_stale():
    assert set(openai.TABLE) == set(CLASSES)


@pytest.mark.parametrize("cls", CLASSES)
def test_the_answer_has_the_shape_of_openai(cls):
    response = openai.error_response(cls("It is so."))
    error = msgspec.json.decode(response.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert response.status_code == openai.TABLE[cls].status
    assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if not openai.TABLE[cls].public])
def test_what_is_for_the_operator_stays_inside(cls):
    body = openai.error_body(cls("/srv/models/secret.bin is damaged"))
    assert b"secret" not in body
    assert msgspec.json.decode(body)["error"]["code"] == "internal_error"


@pytest.mark.parametrize("error", [ValueError("secret"), KeyError("secret"), HTTPException(418, "secret")])
def test_the_unforeseen_says_nothing(error):
    response = openai.error_response(error)
    assert response.status_code == 500
    assert b"secret" not in response.body
    assert response.headers["x-should-retry"] == "false"


def test_a_child_of_a_known_class_is_known():
    class Odd(errors.ContextLengthExceeded):
        pass

    assert openai.status_of(Odd("no")) == 400


@pytest.mark.parametrize(
    ("seconds", "whole", "milliseconds"), [(0.25, "1", "250"), (1.0, "1", "1000"), (2.1, "3", "2100")]
)
def test_unavailable_says_when_to_come_back(seconds, whole, milliseconds):
    headers = openai.error_headers(errors.Overloaded("Full.", retry_after=seconds))
    assert headers == {"retry-after": whole, "retry-after-ms": milliseconds}


@pytest.mark.parametrize("cls", [errors.EngineError, errors.NumericalError])
def test_what_would_fail_again_is_not_retried(cls):
    assert openai.error_headers(cls("It failed."))["x-should-retry"] == "false"


def test_allowed_methods_come_sorted():
    error = HTTPException(405, headers={"Allow": "POST, GET,HEAD"})
    assert openai.error_headers(error)["allow"] == "GET, HEAD, POST"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("the queue is full", "The queue is full."),
        ("Bye.", "Bye."),
        ("'n' must be 1.", "'n' must be 1."),
        ("max_tokens is too large", "max_tokens is too large."),
        ("", "."),
    ],
)
def test_clients_are_told_in_sentences(said, told):
    assert openai.error_object(errors.Overloaded(said)).message == told


@pytest.mark.parametrize("status", sorted(openai.HTTP_REFUSALS))
def test_http_refusals(status):
    response = openai.error_response(HTTPException(status))
    error = msgspec.json.decode(response.body)["error"]
    assert response.status_code == status
    assert (error["type"], error["code"]) == ("invalid_request_error", openai.HTTP_REFUSALS[status][0])


def test_a_refused_caller_is_told_how_to_call():
    assert openai.error_response(errors.Unauthenticated("No.")).headers["www-authenticate"] == "Bearer"


def test_a_rate_limit_says_what_is_used_up():
    response = openai.error_response(errors.RateLimited("Too fast.", kind="tokens", retry_after=7.5))
    assert msgspec.json.decode(response.body)["error"]["type"] == "tokens"
    assert (response.status_code, response.headers["retry-after"]) == (429, "8")
