"""A server on a real socket in front of an engine that thinks up its answers by hashing the prompt.

The engine keeps the contract of the real one: deltas of any size, a stop token at the end that is no text, ``cancel``
frees the slot. Its next bytes depend on the prompt and the seed alone, so any two ways to ask must give the same text.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import random
import signal
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxserve.config import ServerConfig
from jaxserve.engine.request import Delta, FinishReason, Limits, Request, TokenLogprob
from jaxserve.errors import JaxserveError
from jaxserve.server.app import create_app
from jaxserve.server.serve import Server, listen
from jaxserve.server.service import ServedModel, Service
from jaxserve.text.chat import ChatTemplate
from jaxserve.text.tokenizer import Tokenizer

MODEL = "toy"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIGNS = ["a", "b", "c", " ", " ", "\n", ".", "é", "ß", "中", "文", "😀", "ﷺ", "👩‍👧", "END", "\ufffd"]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Tokenizer:
    """One token a byte, and three control tokens."""
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def byte_tokenizer(folder: Path) -> Tokenizer:
    """That tokenizer, by way of its folder."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {sign: token for token, sign in enumerate(alphabet)}
    bytewise = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise.decoder = decoders.ByteLevel()
    bytewise.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    bytewise.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return Tokenizer.load(folder)


@dataclasses.dataclass
class FakeStream:
    """One request in the fake engine."""

    engine: FakeEngine
    request: Request
    deltas: list[Delta]
    cancelled: bool = False
    ended: JaxserveError | None = None
    generated: int = 0

    async def __aiter__(self) -> AsyncIterator[Delta]:
        for delta in self.deltas:
            await asyncio.sleep(self.engine.delay)
            if self.engine.hold:
                await asyncio.Event().wait()
            if self.cancelled:
                return
            if self.ended is not None:
                self.engine.active.discard(self.request.id)
                yield Delta(finish_reason=FinishReason.ERROR, error=self.ended)
                return
            if delta.finish_reason is not None:
                self.engine.active.discard(self.request.id)
            self.generated += len(delta.tokens)
            yield delta

    def cancel(self, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Frees the slot."""
        self.cancelled = True
        if self.request.id in self.engine.active:
            self.engine.active.discard(self.request.id)
            self.engine.cancelled.append(self.request.id)


class FakeEngine:
    """An engine that answers by hash.

    Attributes:
        delay: seconds before each delta.
        hold: if true, no delta ever comes.
        refuse: what ``submit`` raises, if anything.
        fail_after: (deltas, error): every request ends with this error after so many deltas.
        answer: what to say instead of what the hash says.
        widest: most tokens in a delta.
        active, cancelled, submitted, asked: ids, requests and tenants, for the tests to look at.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.limits = Limits(
            vocab_size=tokenizer.vocab_size,
            max_length=512,
            max_input_tokens=384,
            max_output_tokens=256,
            max_logit_bias=8,
            max_stop_token_ids=4,
            max_logprobs=5,
        )
        self.tokenizer = tokenizer
        self.delay = 0.0
        self.hold = False
        self.refuse: JaxserveError | None = None
        self.fail_after: tuple[int, JaxserveError] | None = None
        self.answer: bytes | None = None
        self.widest = 3
        self.active: set[str] = set()
        self.cancelled: list[str] = []
        self.submitted: list[Request] = []
        self.asked: list[str] = []
        self._cuts = random.Random(0)
        self._streams: list[FakeStream] = []
        self._tokens_of_bytes = {tokenizer.token_bytes(token)[0]: token for token in range(256)}

    def room(self, tenant: str = "") -> None:
        """Refuses what ``submit`` would."""
        self.asked.append(tenant)
        if self.refuse is not None:
            raise self.refuse

    def submit(self, request: Request, *, patient: bool = False) -> FakeStream:
        """Takes a request."""
        if self.refuse is not None:
            raise self.refuse
        self.submitted.append(request)
        self.active.add(request.id)
        self._streams.append(FakeStream(self, request, self._deltas(request)))
        return self._streams[-1]

    def cancel_tenant(self, tenant: str, error: JaxserveError) -> int:
        """Ends the running requests of a tenant."""
        theirs = [s for s in self._streams if s.request.tenant == tenant and s.request.id in self.active]
        for stream in theirs:
            stream.ended = error
        return len(theirs)

    def _deltas(self, request: Request) -> list[Delta]:
        tokens, reason = self._tokens(request)
        deltas: list[Delta] = []
        while tokens:
            width = self._cuts.randint(1, self.widest)
            now, tokens = tokens[:width], tokens[width:]
            logprobs = tuple(self._logprob(token, request) for token in now)
            deltas.append(Delta(now, logprobs if request.sampling.logprobs is not None else ()))
            if self._cuts.random() < 0.1:
                deltas.append(Delta())  # a strategy may need several passes for a block
        if deltas and self._cuts.random() < 0.5:
            deltas[-1] = dataclasses.replace(deltas[-1], finish_reason=reason)
        if not deltas or deltas[-1].finish_reason is None:
            if reason is FinishReason.STOP:
                while not deltas[-1].tokens:
                    deltas.pop()
                deltas[-1] = dataclasses.replace(deltas[-1], finish_reason=reason)
            else:
                deltas.append(Delta(finish_reason=reason))
        if self.fail_after is not None:
            count, error = self.fail_after
            deltas = [*deltas[:count], Delta(finish_reason=FinishReason.ERROR, error=error)]
        return deltas

    def _tokens(self, request: Request) -> tuple[tuple[int, ...], FinishReason]:
        rng = random.Random(repr((request.prompt, request.sampling.seed)))
        said = self.answer
        if said is None:
            said = "".join(rng.choice(SIGNS) for _ in range(rng.randint(0, 60))).encode()
            if rng.random() < 0.3:
                said = said[:10] + b"\xf0\x9f" + said[10:]  # models do emit broken UTF-8
        tokens = tuple(self.token_of(byte) for byte in said)
        if len(tokens) >= request.sampling.max_tokens or request.sampling.ignore_eos:
            return tokens[: request.sampling.max_tokens], FinishReason.LENGTH
        (end,) = self.tokenizer.encode("<|im_end|>", add_special=False, parse_special=True)
        return (*tokens, end), FinishReason.STOP

    def token_of(self, byte: int) -> int:
        """The token of a byte."""
        return self._tokens_of_bytes[byte]

    def _logprob(self, token: int, request: Request) -> TokenLogprob:
        top = tuple((token + i, -0.5 * (i + 1)) for i in range(request.sampling.logprobs or 0))
        return TokenLogprob(token, float("-inf") if token == 7 else -0.5, top)


@pytest.fixture
def engine(tokenizer) -> FakeEngine:
    """An idle engine."""
    return FakeEngine(tokenizer)


@pytest.fixture
def model(engine, tokenizer) -> ServedModel:
    """The engine's model."""
    template = ChatTemplate(TEMPLATE, {})
    return ServedModel(id=MODEL, engine=engine, tokenizer=tokenizer, chat_template=template, created=1_700_000_000)


@pytest.fixture
def config() -> ServerConfig:
    """Settings for tests; a test module overrides the fixture to change them."""
    return ServerConfig(port=0, lame_duck_s=0.0, drain_s=1.0, max_body_bytes=400_000)


@pytest.fixture
def service(config, model) -> Service:
    """A service that is ready."""
    service = Service(config=config, model=model)
    service.readiness.ready()
    return service


@dataclasses.dataclass
class Served:
    """A running server."""

    server: Server
    thread: threading.Thread
    address: tuple[str, int]

    @property
    def url(self) -> str:
        """Where it listens."""
        return "http://{}:{}".format(*self.address)

    def terminate(self) -> None:
        """What SIGTERM does."""
        self.server.handle_exit(signal.SIGTERM, None)


@contextlib.contextmanager
def serving(service: Service, tls: ssl.SSLContext | None = None) -> Iterator[Served]:
    """Serves until the block is left."""
    listener = listen(service.config)
    server = Server(service, tls)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    served = Served(server, thread, listener.getsockname()[:2])
    try:
        yield served
    finally:
        served.terminate()
        served.terminate()
        thread.join(10)
        assert not thread.is_alive()


@pytest.fixture
def served(service) -> Iterator[Served]:
    """The service on a real socket."""
    with serving(service) as served:
        yield served


@pytest.fixture
def client(served) -> Iterator[httpx2.Client]:
    """An HTTP client of that server."""
    with httpx2.Client(base_url=served.url, timeout=10) as client:
        yield client


@pytest.fixture
def ask(service) -> Any:
    """Asks the service without a socket: ``ask("POST", "/generate", {...})``; bytes go out as they are."""
    app = create_app(service)

    def ask(method: str, path: str, body: Any = None, headers: Any = ()) -> httpx2.Response:
        async def run() -> httpx2.Response:
            transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
            async with httpx2.AsyncClient(transport=transport, base_url="http://x") as client:
                content = body if isinstance(body, bytes) or body is None else msgspec.json.encode(body)
                given = httpx2.Headers({} if body is None else {"content-type": "application/json"})
                more = httpx2.Headers(headers)
                lines = [(name, value) for name, value in given.raw if name.decode() not in more] + more.raw
                return await client.request(method, path, content=content, headers=lines)

        return asyncio.run(run())

    return ask


@pytest.fixture
def serve_it() -> Any:
    """``with serve_it(service) as served``, for tests that stop it themselves."""
    return serving


@pytest.fixture
def wait_for() -> Any:
    """Waits until something is so, ``wait_for(lambda: ...)``, and fails when it does not come about."""

    def wait_for(condition: Callable[[], object], seconds: float = 5.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.01)

    return wait_for


@pytest.fixture
def events() -> Any:
    """Reads a stream of server-sent events: the JSON of each, comments left out, ``[DONE]`` as a string."""

    def read(response: httpx2.Response) -> list[Any]:
        found = []
        for line in response.iter_lines():
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                found.append(data if data == "[DONE]" else msgspec.json.decode(data))
        return found

    return read
