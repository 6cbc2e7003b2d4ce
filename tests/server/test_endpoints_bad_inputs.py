"""The twenty-seven kinds of bad input and what is right about their answers; every number at its edges and beyond."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tests.rigs.bad_inputs import CHAT, ELSEWHERE, GENERATE, TEXT, Model, Row, number_rows, rows
from tests.rigs.exchange import exchange, request

TOY = Model(vocab=259, longest=512, output=256, body=400_000)
ROWS = rows(TOY)
ON_A_SOCKET = {13, 14, 16, 26}  # what is refused before there is a request to speak of


def check(row: Row, status: int, error: dict[str, Any] | None) -> None:
    assert status == row.status
    if status >= 400:
        assert error is not None
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["type"], error["param"]) == (row.type, row.param)
        assert row.code in (None, error["code"])
        assert len(error["message"]) < 300
        assert error["message"].endswith(".")


@pytest.mark.parametrize("row", [row for row in ROWS if row.kind not in ON_A_SOCKET], ids=str)
def test_a_bad_input(row, ask, engine):
    begin = time.monotonic()
    found = ask(row.method, row.path, None if row.body is None else row.content, row.headers)
    assert time.monotonic() - begin < 10
    check(row, found.status_code, found.json().get("error"))
    assert "x-request-id" in found.headers
    if row.status == 200:
        return
    assert engine.submitted == []
    streams = row.path in (CHAT, TEXT, GENERATE) and isinstance(row.body, dict) and row.param != "stream_options"
    if streams and row.kind != 15:
        again = ask("POST", row.path, row.body | {"stream": True})
        assert again.json()["error"] == found.json()["error"]


@pytest.mark.parametrize("kind", sorted(ON_A_SOCKET))
def test_bad_http(kind, served):
    mine = [row for row in ROWS if row.kind == kind]
    assert mine
    for row in mine:
        data = request(row.method, row.path, None if row.body is None else row.content, row.headers)
        found = asyncio.run(exchange(served.address, data, 10))
        check(row, found.status, found.json().get("error"))
        for name, value in row.answers:
            assert found.headers[name] == value, row
        if kind == 26:
            assert len(found.headers["x-request-id"]) == 32


@pytest.mark.parametrize("path", [CHAT, TEXT, GENERATE])
def test_numbers_at_their_edges_and_beyond(path, ask):
    for row in number_rows(path):
        found = ask("POST", path, row.content)
        assert found.status_code == row.status, (row.content, found.text)
        if row.status == 400:
            assert found.json()["error"]["param"] == row.param, row.content


def test_every_kind_is_there():
    assert {row.kind for row in ROWS} - {0} | set(ELSEWHERE) == set(range(1, 28))


def test_control_a_wrong_answer_shows():
    row = next(row for row in ROWS if row.kind == 1)
    error = {"message": "No.", "type": row.type, "param": None, "code": "invalid_json"}
    check(row, 400, error)
    for wrong in ({"code": "x"}, {"param": "x"}, {"type": "server_error"}, {"message": "no"}, {"more": 1}):
        with pytest.raises(AssertionError):
            check(row, 400, error | wrong)
    with pytest.raises(AssertionError):
        check(row, 500, error)
