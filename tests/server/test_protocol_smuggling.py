"""No request is read as two, and no server or proxy in front may read another one than this: T13 of the advisories.

Raw bytes against the whole service. What is refused gets exactly one answer, and then the connection is closed, so that
nothing behind it is ever taken for a request.
"""

from __future__ import annotations

import re
import socket

from jaxserve.server import middleware

POST = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
BODY = b'{"prompt":"x"}'
LENGTH = b"content-length: %d\r\n" % len(BODY)
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
CHUNK = b"%x\r\n%s\r\n" % (len(BODY), BODY)
GET = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n"
NEXT = GET + b"x-request-id: smuggled\r\n\r\n"

REFUSED = {
    "length and chunks": POST + LENGTH + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": POST + b"transfer-encoding: chunked\r\n" + LENGTH + b"\r\n0\r\n\r\n",
    "two equal lengths": POST + LENGTH + LENGTH + b"\r\n" + BODY,
    "two lengths": POST + LENGTH + b"content-length: 0\r\n\r\n" + BODY,
    "a list of lengths": POST + b"content-length: 14, 14\r\n\r\n" + BODY,
    "a length with a sign": POST + b"content-length: +14\r\n\r\n" + BODY,
    "a negative length": POST + b"content-length: -14\r\n\r\n" + BODY,
    "a hexadecimal length": POST + b"content-length: 0xe\r\n\r\n" + BODY,
    "an empty length": POST + b"content-length:\r\n\r\n" + BODY,
    "a length in two words": POST + b"content-length: 1 4\r\n\r\n" + BODY,
    "a length beyond 64 bits": POST + b"content-length: 18446744073709551630\r\n\r\n" + BODY,
    "a space before the colon": POST + b"content-length : 14\r\n\r\n" + BODY,
    "identity": POST + b"transfer-encoding: identity\r\n\r\n" + BODY,
    "identity, chunked": POST + b"transfer-encoding: identity, chunked\r\n\r\n0\r\n\r\n",
    "chunked, identity": POST + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "gzip, chunked": POST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked twice": POST + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "another word": POST + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a word in quotes": POST + b'transfer-encoding: "chunked"\r\n\r\n0\r\n\r\n',
    "a control character before it": POST + b"transfer-encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "chunks in HTTP/1.0": CHUNKED.replace(b"1.1", b"1.0") + b"0\r\n\r\n",
    "bare line feeds": POST.replace(b"\r\n", b"\n") + LENGTH.replace(b"\r\n", b"\n") + b"\n" + BODY,
    "one bare line feed": POST[:-2] + b"\n" + LENGTH + b"\r\n" + BODY,
    "a bare carriage return": POST[:-2] + b"\r" + LENGTH + b"\r\n" + BODY,
    "a folded line": POST + b"x: a\r\n b\r\n" + LENGTH + b"\r\n" + BODY,
    "a folded first line": b"GET /livez HTTP/1.1\r\n host: localhost\r\n\r\n",
    "no host": b"GET /livez HTTP/1.1\r\n\r\n",
    "two hosts": GET + b"host: localhost\r\n\r\n",
    "a host in the URL": b"GET http://elsewhere/livez HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "nothing but a host in the URL": b"CONNECT localhost:80 HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "a star for a URL": b"OPTIONS * HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "a URL without a slash": b"GET livez HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "a fragment": b"GET /livez#/x HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "raw UTF-8 in the URL": b"GET /liv\xc3\xa9 HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "no version": b"GET /livez\r\n\r\n",
    "version 1.2": GET.replace(b"1.1", b"1.2") + b"\r\n",
    "version 2": GET.replace(b"1.1", b"2.0") + b"\r\n",
    "HTTP/2 itself": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a method in small letters": GET.replace(b"GET", b"get") + b"\r\n",
    "a tab between the words": GET.replace(b" ", b"\t", 1) + b"\r\n",
    "a zero byte in a value": GET + b"x: a\x00b\r\n\r\n",
    "a zero byte in a name": GET + b"x\x00: a\r\n\r\n",
    "a name in two words": GET + b"x y: a\r\n\r\n",
    "no colon": GET + b"xy\r\n\r\n",
    "no name": GET + b": a\r\n\r\n",
    "a negative chunk": CHUNKED + b"-e\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a chunk beyond 64 bits": CHUNKED + b"1" + b"0" * 16 + b"e\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a chunk of 0xe": CHUNKED + b"0xe\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a space before a chunk": CHUNKED + b" " + CHUNK + b"0\r\n\r\n",
    "a chunk with a bare line feed": CHUNKED + CHUNK.replace(b"\r\n", b"\n", 1) + b"0\r\n\r\n",
    "a chunk's extension with a bare line feed": CHUNKED + CHUNK.replace(b"\r\n", b";a\n", 1) + b"0\r\n\r\n",
    "a chunk that ends with a bare line feed": CHUNKED + CHUNK[:-2] + b"\n0\r\n\r\n",
    "a chunk that is longer than it says": CHUNKED + CHUNK[:-2] + b"xx\r\n0\r\n\r\n",
    "a length behind the body": CHUNKED + CHUNK + b"0\r\ncontent-length: 5\r\n\r\n",
    "a last chunk with bare line feeds": CHUNKED + CHUNK + b"0\n\n",
}

SERVED = {
    "a plain request": POST + LENGTH + b"\r\n" + BODY,
    "tabs around a length": POST + b"content-length:\t14\t\r\n\r\n" + BODY,
    "chunks": CHUNKED + CHUNK + b"0\r\n\r\n",
    "chunks by another case": CHUNKED.replace(b"transfer-encoding: chunked", b"Transfer-Encoding: Chunked")
    + CHUNK
    + b"0\r\n\r\n",
    "a chunk with an extension": CHUNKED + CHUNK.replace(b"\r\n", b";a=b\r\n", 1) + b"0\r\n\r\n",
    "trailers": CHUNKED + CHUNK + b"0\r\nhost: elsewhere\r\nauthorization: Bearer x\r\n\r\n",
    "a name that a gateway might read as another": POST + LENGTH + b"content_length: 0\r\n\r\n" + BODY,
}


def say(address: tuple[str, int], request: bytes) -> list[tuple[int, bytes]]:
    """What the server says to ``request`` and another one behind it, until it closes: statuses and whole answers."""
    with socket.create_connection(address, timeout=5) as connection:
        connection.sendall(request)
        said = connection.recv(65536)
        try:
            connection.sendall(NEXT.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
            while data := connection.recv(65536):
                said += data
        except OSError:
            pass
    answers = re.split(rb"(?=HTTP/1\.1 \d{3} )", said)[1:]
    return [(int(answer.split()[1]), answer) for answer in answers]


def test_each_is_refused_once_and_the_connection_closed(served):
    wrong = {}
    for name, request in REFUSED.items():
        answers = say(served.address, request)
        statuses = [status for status, _ in answers]
        if statuses != [400] or b"connection: close" not in answers[0][1] or b'"invalid_http"' not in answers[0][1]:
            wrong[name] = answers
    assert wrong == {}


def test_each_is_served_as_one_request_and_the_next_as_another(served):
    wrong = {}
    for name, request in SERVED.items():
        answers = say(served.address, request)
        statuses = [status for status, _ in answers]
        if statuses != [200, 200] or b'"count":1' not in answers[0][1] or b"smuggled" not in answers[1][1]:
            wrong[name] = answers
    assert wrong == {}


def test_what_comes_in_one_piece_with_a_request_is_no_request(served):
    for request in (SERVED["a plain request"], SERVED["chunks"], GET + b"\r\n"):
        answers = say(served.address, request + NEXT)
        assert len(answers) <= 1
        assert not any(b"smuggled" in answer for _, answer in answers)


def test_nobody_changes_the_protocol(served):
    """The body is read as it would be without the offer, and the connection ends with the answer."""
    for protocol in (b"h2c", b"websocket", b"TLS/1.3"):
        offer = b"connection: upgrade, http2-settings\r\nhttp2-settings: AAMAAABk\r\nupgrade: " + protocol + b"\r\n"
        for request in (POST + offer + LENGTH + b"\r\n" + BODY, CHUNKED[:-2] + offer + b"\r\n" + CHUNK + b"0\r\n\r\n"):
            ((status, answer),) = say(served.address, request)
            assert status == 200, answer
            assert b'"count":1' in answer


def test_a_body_in_pieces_behind_an_offer_to_change_the_protocol(served):
    with socket.create_connection(served.address, timeout=5) as connection:
        for piece in (POST + b"connection: upgrade\r\nupgrade: h2c\r\n", LENGTH + b"\r\n", BODY[:5], BODY[5:]):
            connection.sendall(piece)
        assert b'"count":1' in connection.recv(65536)
        assert connection.recv(65536) == b""


def test_the_table_would_notice_a_second_answer(served, monkeypatch):
    """With the way in which other servers read it, the request behind a refused one is answered, too."""
    monkeypatch.setattr(middleware, "_ambiguous", lambda scope: False)
    assert len(say(served.address, REFUSED["identity, chunked"])) == 2
    assert len(say(served.address, REFUSED["two hosts"])) == 2
