"""The document says what is there: every route, every status, every field, and its examples are understood."""

from __future__ import annotations

import inspect
from typing import Any

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from jaxserve import errors
from jaxserve.config import ServerConfig
from jaxserve.server import openapi, parallel, params, wire
from jaxserve.server.app import SCOPES, create_app
from jaxserve.server.keys import Scope
from jaxserve.server.openai import HTTP_REFUSALS, TABLE

DOCUMENT = msgspec.json.decode(openapi.encoded(ServerConfig()))


def resolved(reference: dict[str, Any]) -> dict[str, Any]:
    """What a ``$ref`` leads to."""
    found = DOCUMENT
    for step in reference["$ref"].removeprefix("#/").split("/"):
        found = found[step]
    return found


def references(tree: Any) -> list[dict[str, Any]]:
    """Every ``$ref`` of a tree."""
    if isinstance(tree, dict):
        return [tree] if "$ref" in tree else [found for value in tree.values() for found in references(value)]
    return [found for value in tree for found in references(value)] if isinstance(tree, list) else []


def served(app: Starlette) -> set[tuple[str, str]]:
    """The application's methods and paths. HEAD goes with GET."""
    routes = [route for route in app.routes if isinstance(route, Route)]
    found = {(method.lower(), route.path.replace(":path", "")) for route in routes for method in route.methods or ()}
    return {(method, path) for method, path in found if method != "head"}


def said(document: dict[str, Any]) -> set[tuple[str, str]]:
    """The document's methods and paths."""
    return {(method, path) for path, operations in document["paths"].items() for method in operations}


def test_every_route_is_in_it_and_nothing_else(service):
    """A route that misses here needs a row in ``openapi.OPERATIONS``."""
    assert said(DOCUMENT) == served(create_app(service))


def test_it_is_served(ask):
    found = ask("GET", "/openapi.json")
    assert found.headers["content-type"] == "application/json"
    assert found.json()["openapi"] == "3.1.0"


def test_every_reference_leads_somewhere():
    found = references(DOCUMENT["paths"]) + references(DOCUMENT["components"])
    assert len(found) > 50
    assert all(resolved(reference) for reference in found)


def test_whoever_sends_a_body_may_say_how_long_they_wait():
    for path, operations in DOCUMENT["paths"].items():
        for operation in operations.values():
            headers = [one["name"] for one in operation.get("parameters", ()) if one["in"] == "header"]
            assert headers == (["x-request-timeout-ms"] if "requestBody" in operation else []), path


def test_ids_are_unique():
    ids = [operation["operationId"] for operations in DOCUMENT["paths"].values() for operation in operations.values()]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("operation", openapi.OPERATIONS, ids=lambda operation: operation.path)
def test_examples_are_answered(operation, ask):
    found = ask(operation.method.upper(), operation.path.format(model="toy"), operation.example or None)
    assert found.status_code == 200
    answer = DOCUMENT["paths"][operation.path][operation.method]["responses"]["200"]
    assert found.headers["content-type"].partition(";")[0] in answer["content"]
    if inspect.isclass(operation.gives) and issubclass(operation.gives, msgspec.Struct):
        msgspec.convert(found.json(), operation.gives)


def test_every_public_error_is_some_operations():
    public = {cls for cls, row in TABLE.items() if row.public}
    raised = {cls for cls in public for operation in openapi.OPERATIONS if issubclass(cls, operation.raises)}
    assert raised | {errors.Unauthenticated, errors.Forbidden} == public


def test_scopes_are_those_of_the_gate():
    scopes = {path.replace(":path", ""): scope for path, scope in SCOPES.items()}
    for operation in openapi.OPERATIONS:
        assert operation.scope == (Scope.PUBLIC if operation.probe else scopes[operation.path])


def test_a_generating_operation_may_answer_with_whatever_there_is():
    """All that the two tables hold but the statuses of URLs and methods that there are not."""
    (chat,) = [operation for operation in openapi.OPERATIONS if operation.takes is wire.ChatRequest]
    every = {200, *HTTP_REFUSALS, *(row.status for row in TABLE.values())} - {405}
    assert openapi.statuses(chat) == every
    responses = DOCUMENT["paths"][chat.path]["post"]["responses"]
    assert set(responses) == {str(status) for status in every}


def test_codes_stand_with_their_statuses():
    responses = DOCUMENT["components"]["responses"]
    for cls, row in TABLE.items():
        code = cls.code if row.public else "internal_error"
        assert f"`{code}`" in responses[f"Error{row.status}"]["description"]
    assert "retry-after" in responses["Error503"]["headers"]


@pytest.mark.parametrize("kind", [wire.GenerateRequest, wire.CompletionRequest, wire.ChatRequest])
def test_ranges_are_those_that_are_checked(kind):
    properties = DOCUMENT["components"]["schemas"][kind.__name__]["properties"]
    for name, (low, high) in params.RANGES.items():
        number = properties[name]["anyOf"][0]
        assert (number["minimum"], number["maximum"]) == (low, high)
    assert properties["stop"]["anyOf"][1]["maxItems"] == ServerConfig().max_stop_strings
    assert properties["response_format"]["enum"] == [None, {"type": "text"}]


def test_the_route_that_a_platform_asked_for_is_in_it():
    paths = openapi.document(ServerConfig(health_route="/healthy"))["paths"]
    assert set(paths) - set(DOCUMENT["paths"]) == {"/healthy"}
    assert openapi.document(ServerConfig(health_route="/livez"))["paths"].keys() == DOCUMENT["paths"].keys()


def test_limits_follow_the_settings():
    schemas = openapi.document(ServerConfig(max_n=3))["components"]["schemas"]
    assert schemas["ChatRequest"]["properties"]["n"]["anyOf"][0]["maximum"] == 3


def test_control_a_route_without_a_row_shows(service):
    app = create_app(service)
    app.routes.append(Route("/new", lambda request: None))
    assert served(app) - said(DOCUMENT) == {("get", "/new")}


def test_what_is_asked_of_parallel_generation_has_its_words_and_ranges():
    properties = DOCUMENT["components"]["schemas"]["Parallel"]["properties"]
    assert set(properties) == set(parallel.WORDS) | set(parallel.RANGES)
    for name, words in parallel.WORDS.items():
        assert properties[name]["enum"] == [None, *words]
    for name, (low, high) in parallel.RANGES.items():
        number = properties[name]["anyOf"][0]
        assert (number["minimum"], number["maximum"]) == (low, high)
    events = DOCUMENT["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]["text/event-stream"]
    assert "BlockUpdate" in str(events)
