"""Twenty-seven kinds of bad input, each with the one right answer: status, type, code, param.

Knows requests and answers, not who asks: a test of the endpoints asks without a socket, ``fuzz.py`` asks the real
server. Kinds that need keys, a full queue or a failing engine are in ``bad_states.py``; ``ELSEWHERE`` names the tests
that show them without a process.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
TURNS = [{"role": "user", "content": "Hello"}]
DEEP = b"[" * 100_000

ELSEWHERE = {
    11: "tests/server/test_auth.py::test_exactly_one_key",
    12: "tests/server/test_auth.py::test_a_key_opens_what_its_scopes_say",
    23: "tests/server/test_auth.py::test_a_share_that_is_used_up",
    24: "tests/server/test_endpoints.py::test_a_refusal_of_the_engine",
    25: "tests/server/test_endpoints.py::test_a_failure_of_the_engine",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """What the right answers depend on: size of the vocabulary, longest context and output, most bytes of a body."""

    vocab: int
    longest: int
    output: int
    body: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One bad input and its answer.

    Attributes:
        kind: which of the 27; 0 for none of them.
        body: a tree to be written as JSON, or bytes as they are; ``None`` for no body.
        headers: besides the host, the length and, for a body, ``content-type: application/json``.
        code, param: of the error object; both ``None`` where the answer is none.
        type: of the error object.
        answers: headers that the answer has to have.
    """

    kind: int
    path: str
    body: Any = None
    status: int = 400
    code: str | None = None
    param: str | None = None
    type: str = "invalid_request_error"
    method: str = "POST"
    headers: tuple[tuple[str, str], ...] = ()
    answers: tuple[tuple[str, str], ...] = ()

    @property
    def content(self) -> bytes:
        """The body's bytes."""
        if self.body is None:
            return b""
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body, ensure_ascii=False).encode()

    def __str__(self) -> str:
        return f"{self.kind}: {self.method} {self.path} {self.content[:60]!r}"


def chat(**fields: Any) -> dict[str, Any]:
    """A good chat request, but for these fields."""
    return {"messages": TURNS, "seed": 1} | fields


def text(**fields: Any) -> dict[str, Any]:
    """A good completion request, but for these fields."""
    return {"prompt": "Hello", "seed": 1} | fields


def rows(model: Model) -> list[Row]:
    """Every row for a model."""
    return [*_no_json(), *_numbers(), *_prompts(model), *_fields(model), *_http(model), *_ids(), *_more()]


def _no_json() -> Iterator[Row]:
    for path in (CHAT, TEXT, GENERATE, "/tokenize", "/detokenize"):
        for body in (b"{", b"", json.dumps(chat() | text() | {"tokens": [1]}).encode() + b" x", b'{"a":1,}', b"nul"):
            yield Row(kind=1, path=path, body=body, code="invalid_json")
        for body in (DEEP, b'{"messages":' + DEEP, b'{"prompt":"a","messages":[],"x":' + DEEP + b"]" * 100_000 + b"}"):
            yield Row(kind=2, path=path, body=body, code="invalid_json")
        yield Row(kind=3, path=path, body=b'{"prompt":"\xff","messages":[]}', code="invalid_json")
        yield Row(kind=3, path=path, body='{"prompt":"a"}'.encode("utf-16"), code="invalid_json")
        yield Row(kind=3, path=path, body=b'\xef\xbb\xbf{"prompt":"a"}', code="invalid_json")
    yield Row(
        kind=4,
        path=CHAT,
        body=b'{"messages":[{"role":"user","content":"\\ud800"}]}',
        code="invalid_string",
        param="messages[0].content",
    )
    yield Row(kind=4, path=TEXT, body=b'{"prompt":"a\\udfffb"}', code="invalid_string", param="prompt")
    yield Row(kind=4, path="/tokenize", body=b'{"prompt":"\\ud83d"}', code="invalid_string", param="prompt")


def _numbers() -> Iterator[Row]:
    for path, good in ((CHAT, b'"messages":[{"role":"user","content":"a"}]'), (TEXT, b'"prompt":"a"')):
        for value in (b"NaN", b"-Infinity", b"1e999"):
            yield Row(
                kind=5,
                path=path,
                body=b'{%s,"temperature":%s}' % (good, value),
                code="invalid_value",
                param="temperature",
            )
        yield Row(kind=5, path=path, body=b'{%s,"temperature":"nan"}' % good, code="invalid_type", param="temperature")
    for path, good in ((CHAT, chat), (TEXT, text)):
        yield Row(kind=5, path=path, body=good(temperature=-0.1), code="decimal_below_min_value", param="temperature")
        yield Row(kind=6, path=path, body=good(n=10**9), code="integer_above_max_value", param="n")
        yield Row(kind=6, path=path, body=good(n=0), code="integer_below_min_value", param="n")
        yield Row(kind=6, path=path, body=good(n=True), code="invalid_type", param="n")
        yield Row(kind=6, path=path, body=good(n="3"), code="invalid_type", param="n")
        yield Row(kind=7, path=path, body=good(max_tokens=-1), code="integer_below_min_value", param="max_tokens")
        yield Row(kind=7, path=path, body=good(max_tokens=2**63), code="integer_above_max_value", param="max_tokens")
        yield Row(kind=7, path=path, body=good(max_tokens=True), code="invalid_type", param="max_tokens")
        yield Row(kind=7, path=path, body=good(max_tokens=1.5), code="invalid_type", param="max_tokens")
        yield Row(
            kind=8,
            path=path,
            body=good(max_tokens=3, min_tokens=4),
            code="integer_above_max_value",
            param="min_tokens",
        )
    yield Row(kind=7, path=GENERATE, body=text(max_tokens=-1), code="integer_below_min_value", param="max_tokens")
    yield Row(kind=7, path=CHAT, body=chat(max_tokens=0), code="integer_below_min_value", param="max_tokens")
    yield Row(kind=7, path=TEXT, body=text(max_tokens=0), status=200)
    yield Row(
        kind=7,
        path=CHAT,
        body=chat(max_completion_tokens=-1),
        code="integer_below_min_value",
        param="max_completion_tokens",
    )
    # With no ``max_tokens`` the least may not be more than what is then generated at most.
    yield Row(kind=8, path=TEXT, body=text(min_tokens=17), code="integer_above_max_value", param="min_tokens")
    yield Row(
        kind=8,
        path=CHAT,
        body=chat(max_tokens=None, min_tokens=2**40),
        code="integer_above_max_value",
        param="min_tokens",
    )


def _prompts(model: Model) -> Iterator[Row]:
    longest, vocab = model.longest, model.vocab
    exceeded = "context_length_exceeded"
    words = "word " * longest
    for body in (
        text(prompt=words),
        text(prompt=[1] * (longest + 1)),
        text(prompt=[1] * (longest - model.output + 1), max_tokens=model.output),
    ):
        yield Row(kind=9, path=TEXT, body=body, code=exceeded, param="prompt")
    body = chat(messages=[{"role": "user", "content": words}])
    yield Row(kind=9, path=CHAT, body=body, code=exceeded, param="messages")
    for prompt in ([-1], [vocab], [2**31], [[1], [2**70]], ["a", 1]):
        yield Row(kind=18, path=TEXT, body=text(prompt=prompt), code="invalid_value", param="prompt")
    for prompt in ([1.5], [True], [None], {}, 3):
        yield Row(kind=18, path=TEXT, body=text(prompt=prompt), code="invalid_type", param="prompt")
    for prompt in ([], [[1], []]):
        yield Row(kind=18, path=TEXT, body=text(prompt=prompt), code="empty_array", param="prompt")
    yield Row(kind=18, path=TEXT, body=text(prompt=["a"] * 33), code="array_above_max_length", param="prompt")
    yield Row(kind=18, path=TEXT, body=text(prompt=["a"] * 32, n=3), code="array_above_max_length", param="n")
    yield Row(kind=18, path=TEXT, body={"seed": 1}, code="missing_required_parameter", param="prompt")
    for tokens in ([-1], [vocab], [2**63]):
        yield Row(kind=18, path="/detokenize", body={"tokens": tokens}, code="invalid_value", param="tokens")
    for path, good, param in ((TEXT, text, "prompt"), (CHAT, chat, "messages")):
        long = {"prompt": "ﷺ" * 100_000} if path == TEXT else {"messages": [{"role": "user", "content": "ﷺ" * 100_000}]}
        yield Row(kind=27, path=path, body=good(**long), code=exceeded, param=param)


def _fields(model: Model) -> Iterator[Row]:
    for bias, code in (
        ({"999999": 5}, "invalid_value"),
        ({str(model.vocab): 5}, "invalid_value"),
        ({"a": 1}, "invalid_value"),
        ({"-1": 1}, "invalid_value"),
        ({"1": 101}, "decimal_above_max_value"),
        ({str(i): 0 for i in range(10_000)}, "array_above_max_length"),
    ):
        yield Row(kind=17, path=CHAT, body=chat(logit_bias=bias), code=code, param="logit_bias")
    for wanted in (
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"schema": DEEP.decode()}},
        {"json": ""},
    ):
        yield Row(
            kind=19,
            path=CHAT,
            body=chat(response_format=wanted),
            code="unsupported_parameter",
            param="response_format",
        )
    body = chat(logprobs=True, top_logprobs=1_000_000)
    yield Row(kind=20, path=CHAT, body=body, code="integer_above_max_value", param="top_logprobs")
    yield Row(kind=20, path=CHAT, body=chat(stop=["x"] * 100), code="array_above_max_length", param="stop")
    yield Row(kind=20, path=CHAT, body=chat(stop=""), code="invalid_value", param="stop")
    yield Row(kind=20, path=TEXT, body=text(stop=["a", ""]), code="invalid_value", param="stop")
    # A megabyte, or what fits into a body.
    long = "x" * min(2**20, model.body - 1000)
    yield Row(kind=20, path=CHAT, body=chat(stop=long), code="string_above_max_length", param="stop")
    body = chat(stream_options={"include_usage": True})
    yield Row(kind=21, path=CHAT, body=body, code="invalid_value", param="stream_options")
    yield Row(kind=21, path=CHAT, body=chat(max_tokens=2, anything={"a": [1]}), status=200)
    picture = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}
    for parts, place in (([picture], 0), ([{"type": "text", "text": "a"}, picture], 1)):
        yield Row(
            kind=22,
            path=CHAT,
            body=chat(messages=[{"role": "user", "content": parts}]),
            code="unsupported_content",
            param=f"messages[0].content[{place}]",
        )


def _http(model: Model) -> Iterator[Row]:
    for path in (CHAT, TEXT, GENERATE, "/tokenize"):
        for name in ("gpt-4", "../x", "/etc/passwd", "a/b", "%2e%2e", "nul\0", "x" * 300, "CON", "\u2024\u2024/x"):
            good = chat if path == CHAT else text
            yield Row(kind=10, path=path, body=good(model=name), status=404, code="model_not_found", param="model")
    big = b'{"messages":[],"prompt":"' + b" " * model.body + b'"}'
    closed = (("connection", "close"),)
    for path in (CHAT, TEXT, GENERATE, "/tokenize", "/detokenize"):
        yield Row(kind=13, path=path, body=big, status=413, code="request_too_large", answers=closed)
        for name, value in (("content-type", "text/plain"), ("content-type", ""), ("content-encoding", "gzip")):
            headers = ((name, value),)
            yield Row(kind=15, path=path, body=text(), status=415, code="unsupported_media_type", headers=headers)
        allow = (("allow", "POST"),)
        for method in ("GET", "PUT", "DELETE", "OPTIONS", "PATCH"):
            yield Row(kind=16, path=path, method=method, status=405, code="method_not_supported", answers=allow)
    for path in ("/", "/v1", "/v1/chat", "//v1/models", "/V1/models", "/livez/", "/docs", "/v1/..;/livez", "/%00"):
        yield Row(kind=16, path=path, method="GET", status=404, code="invalid_url")
    yield Row(kind=16, path="/v1/nowhere", body=text(), status=404, code="invalid_url")
    for headers in ((("x-pad", "x" * 70_000),), tuple((f"x-{i}", "1") for i in range(120))):
        yield Row(kind=14, path="/livez", method="GET", status=431, code="headers_too_large", headers=headers)


def _ids() -> Iterator[Row]:
    for headers in (
        (("x-request-id", "one"), ("x-request-id", "one")),
        (("x-request-id", "x" * 129),),
        (("x-request-id", "a\tb"),),
        (("x-request-id", "x" * 60_000),),
    ):
        yield Row(kind=26, path="/v1/models", method="GET", status=200, headers=headers)


def _more() -> Iterator[Row]:
    """Of no kind of their own, but told just as exactly."""

    def turn(**fields: Any) -> dict[str, Any]:
        return chat(messages=[{"role": "user", "content": "x"} | fields])

    missing, invalid, unserved = "missing_required_parameter", "invalid_value", "unsupported_parameter"
    wanted = (
        (CHAT, chat(messages=[]), "empty_array", "messages"),
        (CHAT, chat(messages="hi"), "invalid_type", "messages"),
        (CHAT, turn(role="robot"), invalid, "messages[0].role"),
        (CHAT, turn(content=None), missing, "messages[0].content"),
        (CHAT, turn(content=[{"type": "text"}]), missing, "messages[0].content[0].text"),
        (CHAT, chat(tools=[{"type": "function"}]), unserved, "tools"),
        (CHAT, chat(chat_template="{{ x }}"), unserved, "chat_template"),
        (CHAT, chat(use_beam_search=0), unserved, "use_beam_search"),
        (CHAT, chat(chat_template_kwargs={"chat_template": "x"}), invalid, "chat_template_kwargs"),
        (CHAT, chat(chat_template_kwargs={"controls": {}}), invalid, "chat_template_kwargs"),
        (CHAT, chat(chat_template_kwargs={"self": 1}), invalid, "chat_template_kwargs"),
        (CHAT, chat(top_logprobs=2), invalid, "top_logprobs"),
        (TEXT, text(prompt=""), invalid, "prompt"),
        (TEXT, text(logprobs=21), "integer_above_max_value", "logprobs"),
        (TEXT, text(echo=True), unserved, "echo"),
        (TEXT, text(best_of=3, stream=True), invalid, "best_of"),
        (TEXT, text(n=3, best_of=2), "integer_below_min_value", "best_of"),
        (TEXT, text(suffix="x"), unserved, "suffix"),
        (GENERATE, text(n=2), "integer_above_max_value", "n"),
        ("/tokenize", {}, missing, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, missing, "prompt"),
        ("/detokenize", {}, missing, "tokens"),
    )
    for path, body, code, param in wanted:
        yield Row(kind=0, path=path, body=body, code=code, param=param)


# --- every number at its edges and beyond -----------------------------------------------------------------------------

NUMBERS = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "seed", "n", "logprobs", "top_logprobs", "max_completion_tokens"),
    "best_of",
)
VALUES = (
    *("-1", "0", "2147483648", "9223372036854775807", "9223372036854775808", "1" + "0" * 400, "1e308", "1e999"),
    *("-1e308", "NaN", "Infinity", "-Infinity", "true", '"3"', "[]", "{}", "null", "1.5", "-0.0", "5e-324"),
)
# Fields that a value is fine for.
_FINE: dict[str, tuple[str, ...]] = {
    "max_tokens": ("0",),
    "min_tokens": ("0",),
    "temperature": ("0", "1.5", "-0.0", "5e-324"),
    "top_p": ("0", "-0.0", "5e-324"),
    "top_k": ("-1", "0"),
    "min_p": ("0", "-0.0", "5e-324"),
    "repetition_penalty": ("1.5",),
    "presence_penalty": ("-1", "0", "1.5", "-0.0", "5e-324"),
    "frequency_penalty": ("-1", "0", "1.5", "-0.0", "5e-324"),
    "seed": ("-1", "0", "2147483648", "9223372036854775807"),
    "logprobs": ("0",),
    "top_logprobs": ("0",),
}


def number_rows(path: str) -> Iterator[Row]:
    """Every numeric field of an endpoint with every odd value; the answer names the field, or the value is fine."""
    chats = path == CHAT
    good = '"messages":[{"role":"user","content":"a"}],"logprobs":true' if chats else '"prompt":"a"'
    only_chat, only_text = {"top_logprobs", "max_completion_tokens"}, {"logprobs", "best_of"}
    unknown = only_text if chats else only_chat | ({"best_of"} if path == GENERATE else set())
    for field in NUMBERS:
        if field in unknown:
            continue
        for value in VALUES:
            fine = value == "null" or value in _FINE.get(field, ())
            fine = fine and not (chats and field == "max_tokens" and value == "0")
            body = f'{{{good},"{field}":{value}}}'.encode()
            wrong = {"status": 200} if fine else {"status": 400, "param": field}
            yield Row(kind=7, path=path, body=body, **wrong)
