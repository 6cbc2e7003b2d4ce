"""The fuzzer finds what is planted, and finds nothing where nothing is: on a toy engine, with few requests."""

from __future__ import annotations

import random
import time

import pytest

from jaxserve.config import ServerConfig
from jaxserve.errors import InvalidRequest
from jaxserve.server import middleware, params, parse
from jaxserve.server.service import ServedModel, Service
from jaxserve.text.chat import ChatTemplate
from tests.rigs import bad_inputs, fuzz
from tests.rigs.exchange import Answer
from tests.rigs.judge import Judge, error_faults, leaks
from tests.rigs.mutate import mutate_bytes, mutate_head, mutate_tree
from tests.server.conftest import TEMPLATE, FakeEngine, byte_tokenizer, serving

pytestmark = pytest.mark.rig


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    tokenizer = byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    model = ServedModel(
        id="tiny",
        engine=FakeEngine(tokenizer),
        tokenizer=tokenizer,
        chat_template=ChatTemplate(TEMPLATE, {}),
        created=1,
    )
    config = ServerConfig(port=0, lame_duck_s=0.0, drain_s=1.0, header_timeout_s=0.2, body_timeout_s=0.2)
    service = Service(config=config, model=model, access_log=False)
    service.readiness.ready()
    with serving(service) as served:
        yield served


def faults(served, count: int = 120, patience: float = 10.0) -> set[str]:
    """What a short run finds, each sort once."""
    fuzzer = fuzz.Fuzzer(served.url, patience)
    fuzzer.run(fuzz.damaged(3, fuzz.fields_of(fuzzer.document)), count)
    assert fuzzer.tally.cases == count
    return {fault["fault"].partition(":")[0] for fault in fuzzer.tally.faults}


def test_nothing_is_found_where_nothing_is(served):
    fuzzer = fuzz.Fuzzer(served.url, patience=10.0)
    rows = [row for row in bad_inputs.rows(bad_inputs.Model(259, 512, 256, 4 << 20)) if row.kind not in (13, 20, 27)]
    fuzzer.run(fuzz.row_cases(rows), len(rows))
    fuzzer.run(fuzz.damaged(1, fuzz.fields_of(fuzzer.document)), 300)
    fuzzer.canary()
    assert fuzzer.tally.faults == []
    assert fuzzer.tally.cases == len(rows) + 300
    assert {400, 404, 405, 413, 415, 431} - set(fuzzer.tally.statuses) <= {413}


def test_control_an_unforeseen_failure_is_found(served, monkeypatch):
    def broken(name, value, low, high):
        if not low <= value <= high:
            raise KeyError(value)

    monkeypatch.setattr(params, "check_range", broken)
    assert "status 500" in faults(served, 480)


def test_control_a_repeated_body_is_found(served, monkeypatch):
    monkeypatch.setattr(parse, "_not_json", lambda body: InvalidRequest(f"No JSON: {body[:200]!r}."))
    assert any(fault.startswith("repeats more than 64") for fault in faults(served))


def test_control_a_leaked_place_is_found(served, monkeypatch):
    def leaking(message):
        return InvalidRequest(f'{message} (File "{parse.__file__}", line 7).')

    monkeypatch.setattr(parse, "_wrong_field", leaking)
    assert "a place in the code" in faults(served)


def test_control_another_shape_is_found(served, monkeypatch):
    fuzzer = fuzz.Fuzzer(served.url)
    monkeypatch.setattr(middleware.StrictHeaders, "__call__", _answer_otherwise)
    fuzzer.run(fuzz.damaged(3, {}), 40)
    found = {fault["fault"] for fault in fuzzer.tally.faults}
    assert {"an error that is not JSON", "status 418 is not in the document"} <= found


async def _answer_otherwise(self, scope, receive, send) -> None:
    await send({"type": "http.response.start", "status": 418, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": b"no"})


def test_control_a_hang_is_found(served, monkeypatch):
    def slow(request):
        if request.stream_options is not None:
            time.sleep(0.6)

    monkeypatch.setattr(params, "check_streaming", slow)
    found = faults(served, 80, patience=0.4)
    assert "hang" in found


def test_control_other_tokens_are_found(served):
    fuzzer = fuzz.Fuzzer(served.url)
    fuzzer._expected = []
    fuzzer.canary()
    assert [fault["case"] for fault in fuzzer.tally.faults] == ["canary"]


def test_control_a_wrong_answer_to_a_row_is_found():
    row = next(row for row in bad_inputs.rows(bad_inputs.Model(259, 512, 256, 4 << 20)) if row.kind == 13)
    body = b'{"error":{"message":"No.","type":"invalid_request_error","param":null,"code":"%s"}}'
    right = Answer(413, {"connection": "close"}, body % b"request_too_large", 0.1, complete=True, in_time=True)
    assert fuzz.row_faults(row, right) == []
    wrong = Answer(413, {"connection": "keep-alive"}, body % b"request_too_large", 0.1, complete=True, in_time=True)
    assert fuzz.row_faults(row, wrong)
    wrong = Answer(413, {"connection": "close"}, body % b"x", 0.1, complete=True, in_time=True)
    assert fuzz.row_faults(row, wrong) == ["code is 'x', not 'request_too_large'"]


# --- what is judged ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "leaks_it"),
    [
        ("object at 0x7f3a5c0d1e50", True),
        ("Traceback (most recent call last)", True),
        ("in /usr/lib/python3/site-packages/x", True),
        ("cannot open /srv/models/a.json", True),
        ("at 10.1.2.3:8000", True),
        ("x" * 65, True),
        ("x" * 64, False),
        ("use /v1/completions; GET /v1/models lists those", False),
        ("'messages[0].content' must be text.", False),
    ],
)
def test_leaks(said, leaks_it):
    assert bool(leaks(b"x" * 200, said)) == leaks_it


def error(body: bytes, kind: str = "application/json") -> Answer:
    return Answer(400, {"content-type": kind}, body, 0.1, complete=True, in_time=True)


def test_shapes_of_errors():
    good = b'{"error":{"message":"No.","type":"t","param":null,"code":"c"}}'
    assert error_faults(b"", error(good)) == []
    for wrong in (b"no", b"{}", b'{"error":"no"}', good[:-1] + b',"detail":1}', good.replace(b',"param":null', b"")):
        assert error_faults(b"", error(wrong)), wrong
    assert error_faults(b"", error(good, "text/html"))


def test_answers_that_are_none():
    judge = Judge({"paths": {"/a": {"get": {"responses": {"200": {"content": {"text/plain": {}}}}}}}}, patience=1.0)
    fine = Answer(200, {"content-type": "text/plain"}, b"x", 0.1, complete=True, in_time=True)
    assert judge.faults("GET", "/a", b"", fine) == []
    assert judge.faults("GET", "/a", b"", Answer(0, {}, b"", 0.1, complete=False, in_time=True)) == ["no answer"]
    assert judge.faults("GET", "/a", b"", Answer(200, {}, b"", 0.1, complete=False, in_time=True)) == ["cut off"]
    late = Answer(200, {"content-type": "text/plain"}, b"x", 1.1, complete=True, in_time=True)
    assert judge.faults("GET", "/a", b"", late)[0].startswith("hang")
    odd = Answer(206, {"content-type": "text/plain"}, b"x", 0.1, complete=True, in_time=True)
    assert "status 206 is not in the document" in judge.faults("GET", "/a", b"", odd)


def test_damage_depends_on_the_seed_alone():
    good = b"POST /a HTTP/1.1\r\nhost: x\r\n\r\n{}"
    for seed in range(50):
        once, again = random.Random(seed), random.Random(seed)
        assert mutate_bytes(once, b"abc", [b"x"]) == mutate_bytes(again, b"abc", [b"x"])
        assert mutate_head(once, good) == mutate_head(again, good)
        assert mutate_tree(once, fuzz.GOOD[bad_inputs.CHAT][1]) == mutate_tree(again, fuzz.GOOD[bad_inputs.CHAT][1])
