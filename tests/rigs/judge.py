"""Whether an answer is one that the server may give: status, time, shape, and what it gives away.

Knows the OpenAPI document, OpenAI's shape of errors and the marks of a leak. Knows no request but its bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from jaxserve.server import wire
from tests.rigs.exchange import Answer

LONGEST_ECHO = 64
# What a careless message gives away: addresses of memory, places in code, files of the machine.
_MARKS = {
    "a memory address": re.compile(r"0x[0-9a-fA-F]{6,}"),
    "a place in the code": re.compile(r"site-packages|Traceback|File \"|\bline \d+, in |\.py\b"),
    "a path": re.compile(r"(?<![\w:/.])/(?:[\w.+-]+/)+[\w.+-]+"),
    "an address": re.compile(r"\b(?:127\.0\.0\.1|\d{1,3}(?:\.\d{1,3}){3}):\d+"),
}


class Judge:
    """Judges answers by one document.

    Attributes:
        document: what the server says of itself.
        patience: seconds that an answer may take.
    """

    def __init__(self, document: Mapping[str, Any], patience: float) -> None:
        self.document = document
        self.patience = patience
        self._paths = [
            (re.compile(re.sub(r"\\\{\w+\\\}", ".+", re.escape(path))), operations)
            for path, operations in document["paths"].items()
        ]

    def is_probe(self, path: str) -> bool:
        """Whether a path answers 503 in the form of its 200."""
        operations = next((found for pattern, found in self._paths if pattern.fullmatch(path)), {})
        responses = operations.get("get", {}).get("responses", {})
        return "content" in responses.get("503", {})

    def faults(self, method: str, path: str, sent: bytes, answer: Answer, *, parsable: bool = True) -> list[str]:
        """What is wrong with an answer; nothing if it is fine.

        Args:
            sent: the whole request.
            parsable: whether it was HTTP at all; else closing without a word is an answer, too.
        """
        if not answer.in_time or answer.seconds > self.patience:
            return [f"hang: no whole answer after {answer.seconds:.1f} s"]
        if answer.status == 0:
            return ["no answer"] if parsable else []
        if answer.status == 503 and self.is_probe(path):
            return []  # a busy machine: that is what a probe is there to say, in a form of its own
        found = []
        if answer.status >= 500 or answer.status < 200:
            found.append(f"status {answer.status}")
        if not parsable:  # nobody knows what it was taken for; HEAD, perhaps, which has no body
            return found + (error_faults(sent, answer) if answer.status >= 400 and answer.body else [])
        if method == "HEAD":
            return found
        return found + (self._shape(method, path, sent, answer) if answer.complete else ["cut off"])

    def _shape(self, method: str, path: str, sent: bytes, answer: Answer) -> list[str]:
        operations = next((found for pattern, found in self._paths if pattern.fullmatch(path)), {})
        operation = operations.get(method.lower(), {})
        documented = set(operation.get("responses", ())) or {"400", "404", "405", "408", "413", "431"}
        found = [] if str(answer.status) in documented else [f"status {answer.status} is not in the document"]
        if answer.status >= 400:
            return found + error_faults(sent, answer)
        return found + _success_faults(operation, answer)


def error_faults(sent: bytes, answer: Answer) -> list[str]:
    """What is wrong with an answer that is an error."""
    if answer.headers.get("content-type") != "application/json":
        return ["an error that is not JSON"]
    try:
        tree = answer.json()
        error = msgspec.convert(tree, wire.ErrorResponse).error
    except (msgspec.DecodeError, msgspec.ValidationError):
        return ["an error not in OpenAI's shape"]
    if set(tree) != {"error"} or set(tree["error"]) != {"message", "type", "param", "code"}:
        return ["an error with other fields than OpenAI's"]
    return leaks(sent, answer.body.decode()) + ([] if error.message.endswith((".", "!", "?")) else ["no sentence"])


def leaks(sent: bytes, said: str) -> list[str]:
    """What ``said`` gives away that it should not: of the machine, or of what was sent."""
    plain = re.sub(r"/v1/(models|completions|chat/completions)", "", said)
    found = [f"{name}: {match[0][:60]}" for name, mark in _MARKS.items() if (match := mark.search(plain))]
    text = sent.decode("utf-8", "replace")
    size = LONGEST_ECHO + 1
    if any(said[start : start + size] in text for start in range(max(len(said) - size + 1, 0))):
        found.append(f"repeats more than {LONGEST_ECHO} characters of the request")
    return found


def _success_faults(operation: Mapping[str, Any], answer: Answer) -> list[str]:
    kind = answer.headers.get("content-type", "").partition(";")[0]
    contents = operation.get("responses", {}).get("200", {}).get("content", {})
    if kind not in contents:
        return [f"content type {kind} is not in the document"]
    if kind == "text/event-stream":
        return _stream_faults(answer.body)
    if kind == "application/json":
        try:
            answer.json()
        except msgspec.DecodeError:
            return ["no JSON"]
    return []


def _stream_faults(body: bytes) -> list[str]:
    """A stream is events of JSON and ``[DONE]`` behind the last one, unless that one is an error."""
    events = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    if not events:
        return ["a stream without events"]
    try:
        trees = [msgspec.json.decode(event) for event in events if event != b"[DONE]"]
    except msgspec.DecodeError:
        return ["an event that is not JSON"]
    failed = [tree["error"] for tree in trees if "error" in tree]
    if failed:
        return [f"an error within a stream: {failed[0]['code']}"]
    return [] if events[-1] == b"[DONE]" else ["a stream without an end"]
