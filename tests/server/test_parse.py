"""Every way in which a body can be wrong is told with the field at fault, and nothing of the body is repeated."""

from __future__ import annotations

import time

import pytest

from jaxserve.errors import InvalidRequest
from jaxserve.server.parse import param_of, parse
from jaxserve.server.wire import ChatRequest, CompletionRequest

CHAT = '"messages":[{"role":"user","content":"x"}]'


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"", "invalid_json", None),
        (b"{", "invalid_json", None),
        (b"null", "invalid_type", None),
        (b"[]", "invalid_type", None),
        (b"{%s} x" % CHAT.encode(), "invalid_json", None),
        (b"[" * 100_000, "invalid_json", None),
        (b"{" + CHAT.encode() + b',"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "invalid_json", None),
        (b'{"messages":' + b"[" * 100_000, "invalid_json", None),
        (b'{"messages":' + b'{"a":' * 100_000, "invalid_json", None),
        (b'{"messages":7,"temperature":NaN}', "invalid_value", "temperature"),
        (b'{"messages":7} x', "invalid_json", None),
        (b'{"messages":[{"role":"user","content":"\xff"}]}', "invalid_json", None),
        (b'{"messages":[{"role":"user","content":"\xed\xa0\x80"}]}', "invalid_json", None),
        (b'{"messages":[],"anything":"\xff"}', "invalid_json", None),
        (b'{"messages":[{"role":"user","content":"a\\ud800b"}]}', "invalid_string", "messages[0].content"),
        (b'{"messages":[{"role":"a"},{"role":"user","content":[{"type":"text","text":"\\udc00"}]}]}',
         "invalid_string", "messages[1].content[0].text"),
        (b'{"messages":[],"user":"\\ud83d"}', "invalid_string", "user"),
        (b'{"messages":[],"\\ud83d":1}', "invalid_string", None),
        (b'{"messages":[],"temperature":NaN}', "invalid_value", "temperature"),
        (b'{"messages":[],"temperature":-Infinity}', "invalid_value", "temperature"),
        (b'{"messages":[],"temperature":1e999}', "invalid_value", "temperature"),
        (b'{"messages":[],"logit_bias":{"1":NaN}}', "invalid_value", "logit_bias"),
        (b'{"messages":[],"temperature":"nan"}', "invalid_type", "temperature"),
        (b'{"messages":[],"temperature":true}', "invalid_type", "temperature"),
        (b'{"messages":[],"max_tokens":1.5}', "invalid_type", "max_tokens"),
        (b'{"messages":[],"max_tokens":1.0}', "invalid_type", "max_tokens"),
        (b'{"messages":[],"max_tokens":true}', "invalid_type", "max_tokens"),
        (b'{"messages":[],"max_tokens":[]}', "invalid_type", "max_tokens"),
        (b'{"messages":[],"max_tokens":{}}', "invalid_type", "max_tokens"),
        (b'{"messages":[],"max_tokens":1' + b"0" * 5000 + b"}", "invalid_value", "max_tokens"),
        (b'{"messages":[],"n":"3"}', "invalid_type", "n"),
        (b'{"messages":[],"n":true}', "invalid_type", "n"),
        (b'{"messages":[],"stop":[1]}', "invalid_type", "stop"),
        (b'{"messages":[],"logit_bias":{"1":"x"}}', "invalid_type", "logit_bias"),
        (b'{"messages":[],"stream_options":{"include_usage":1}}', "invalid_type", "stream_options"),
        (b"{}", "missing_required_parameter", "messages"),
        (b'{"messages":null}', "invalid_type", "messages"),
        (b'{"messages":[{"content":"x"}]}', "missing_required_parameter", "messages[0].role"),
        (b'{"messages":[{"role":"user","content":[{"text":"x"}]}]}',
         "missing_required_parameter", "messages[0].content[0].type"),
        (b'{"messages":[{"role":"user","content":7}]}', "invalid_type", "messages[0].content"),
    ],
)  # fmt: skip
def test_a_wrong_chat_body_names_what_is_wrong(body, code, param):
    with pytest.raises(InvalidRequest) as caught:
        parse(body, ChatRequest)
    assert (caught.value.code, caught.value.param) == (code, param)


@pytest.mark.parametrize("body", [f"{{{CHAT}}}".encode("utf-16"), f"\ufeff{{{CHAT}}}".encode()])
def test_other_encodings_are_not_json(body):
    with pytest.raises(InvalidRequest) as caught:
        parse(body, ChatRequest)
    assert caught.value.code == "invalid_json"


@pytest.mark.parametrize("prompt", ["[1.5]", "[true]", "[null]", "[[[1]]]", "{}", "3", '[["a"]]'])
def test_prompts_of_other_types_name_the_prompt(prompt):
    with pytest.raises(InvalidRequest) as caught:
        parse(b'{"prompt":%s}' % prompt.encode(), CompletionRequest)
    assert (caught.value.code, caught.value.param) == ("invalid_type", "prompt")


def test_unknown_fields_and_nulls_are_fine():
    body = b'{%s,"store":false,"metadata":{"a":[1]},"temperature":null,"n":null,"temperatur":3}' % CHAT.encode()
    assert parse(body, ChatRequest).temperature is None


def test_messages_do_not_repeat_the_body():
    secret = b"hush" * 50
    for body in (b'{"messages":[],"%s":NaN}' % secret, b'{"messages":"%s"}' % secret, b'{"%s":"\\ud800"}' % secret):
        with pytest.raises(InvalidRequest) as caught:
            parse(body, ChatRequest)
        assert "hush" not in caught.value.message
        assert len(caught.value.message) < 200


def test_a_hostile_body_is_refused_quickly():
    """The search for the field at fault walks the whole tree, without recursion and without paths for what is fine."""
    body = b'{"messages":[],"x":[' + b"[]," * 300_000 + b"NaN]}"
    begin = time.monotonic()
    with pytest.raises(InvalidRequest) as caught:
        parse(body, ChatRequest)
    assert caught.value.param == "x"
    assert time.monotonic() - begin < 60


def test_the_fault_is_not_looked_for_in_megabytes():
    body = b'{"messages":[],"x":"%s","temperature":NaN}'
    for size, found in ((1000, ("invalid_value", "temperature")), (2**20, ("invalid_json", None))):
        with pytest.raises(InvalidRequest) as caught:
            parse(body % (b"x" * size), ChatRequest)
        assert (caught.value.code, caught.value.param) == found


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("temperature", "temperature"),
        ("prompt[3][1]", "prompt"),
        ("logit_bias[...]", "logit_bias"),
        ("messages", "messages"),
        ("messages[0].content[1].text", "messages[0].content[1].text"),
    ],
)
def test_param_of(path, param):
    assert param_of(path) == param
