"""Everything that reads bytes which somebody else wrote, each as a function of bytes that may raise one class of error.

Knows what to call and what each may say. Does not know where damaged bytes come from: ``fuzz_parsers.py`` does.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from jaxserve.checkpoint import manifest
from jaxserve.checkpoint.files import parse_json_object
from jaxserve.checkpoint.gguf import GGUFFile
from jaxserve.checkpoint.safetensors import INDEX_NAME, SafetensorsFile, SafetensorsFolder
from jaxserve.config.layers import load
from jaxserve.errors import JaxserveError
from jaxserve.models.family import family_of
from jaxserve.server.keys import parse_ring
from jaxserve.text.chat import ChatTemplate
from jaxserve.text.detokenize import Detokenizer
from jaxserve.text.gguf import tokenizer_from_gguf
from jaxserve.text.tokenizer import Tokenizer
from tests.rigs.tiny import ROOT, TOKENIZER

CORPUS = Path(__file__).parent / "corpus"
REFERENCE = ROOT / "tests" / "reference"


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """One reader of foreign bytes.

    Attributes:
        read: what is tried; it may raise ``refusal`` and nothing else.
        refusal: the house's own word for bytes that are no good.
        seeds: good bytes, and bad ones worth starting from.
        tree: the bytes are JSON, so that they may be damaged node by node.
        share: of the time that a target gets; all of it for what comes from strangers.
    """

    read: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]
    tree: bool = False
    share: float = 0.25
    refusal: type[Exception] = JaxserveError


MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # where files cost least
_given: list[Path] = []


@functools.cache
def scratch() -> Path:
    """A folder for what has to be a file."""
    return _given[0] if _given else Path(tempfile.mkdtemp(prefix="rig-parsers-", dir=MEMORY))


def live_in(folder: Path) -> None:
    """Makes it this one, which somebody else removes: a fuzzer ends without a last word."""
    folder.mkdir()
    _given.append(folder)


def leave() -> None:
    """Removes that folder."""
    shutil.rmtree(scratch(), ignore_errors=True)
    scratch.cache_clear()


def committed(name: str) -> Callable[[], list[bytes]]:
    """The files of one folder of the corpus."""
    return lambda: [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]


def as_file(name: str, data: bytes) -> Path:
    """The bytes as a file."""
    path = scratch() / name
    path.write_bytes(data)
    return path


# --- weights ----------------------------------------------------------------------------------------------------------


def read_gguf(data: bytes) -> None:
    """A whole GGUF file: metadata, every tensor."""
    file = GGUFFile(as_file("a.gguf", data))
    file.hf_config()
    with np.errstate(all="ignore"):
        for _, array in file.tensors():
            assert array.shape


def read_gguf_tokenizer(data: bytes) -> None:
    """The tokenizer in a GGUF file's metadata, given as JSON; such a file has no text but UTF-8, no wider integer."""
    try:
        metadata = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    tokenizer_from_gguf(metadata).encode("Hello, Straße! \u65e5\u672c", max_tokens=100)


def read_safetensors(data: bytes) -> None:
    """A whole safetensors file."""
    file = SafetensorsFile(as_file("a.safetensors", data))
    for info in file.infos:
        assert file.read(info).shape == info.shape


def read_index(data: bytes) -> None:
    """The index of two shards that are fine."""
    folder = _shards()
    (folder / INDEX_NAME).write_bytes(data)
    assert SafetensorsFolder(folder).table()


@functools.cache
def _shards() -> Path:
    from safetensors.numpy import save

    folder = scratch() / "shards"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for name in ("a", "b"):
        (folder / f"model-{name}.safetensors").write_bytes(save({name: np.zeros(2, np.float32)}))
    return folder


def _index_seeds() -> list[bytes]:
    good = {"metadata": {"total_size": 16}, "weight_map": {"a": "model-a.safetensors", "b": "model-b.safetensors"}}
    wrong = (
        {"weight_map": {"a": "../a.safetensors"}},
        {"weight_map": {"a": "model-a.safetensors"}},
        {"weight_map": {}},
        {"weight_map": {"a": "nul\0.safetensors", "b": "/dev/zero.safetensors"}},
        {},
    )
    return [json.dumps(tree).encode() for tree in (good, *wrong)]


def read_manifest(data: bytes) -> None:
    """A manifest."""
    folder = scratch() / "20200101-000000000000"
    folder.mkdir(exist_ok=True)
    (folder / manifest.FILE_NAME).write_bytes(data)
    manifest.read(folder)


def read_model_config(data: bytes) -> None:
    """A model's ``config.json``, to the shapes of every weight."""
    family = family_of(parse_json_object(data, "config.json"))
    assert family.shape.parameters > 0


def _model_config_seeds() -> list[bytes]:
    return [path.read_bytes() for path in sorted((REFERENCE / "tiny").glob("*/config.json"))]


# --- text -------------------------------------------------------------------------------------------------------------


def read_tokenizer(data: bytes) -> None:
    """A ``tokenizer.json``, and what it makes of a text."""
    folder = scratch() / "tokenizer"
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_bytes(data)
    tokenizer = Tokenizer.load(folder)
    tokenizer.decode(tokenizer.encode("Hello, Straße! \u65e5\u672c"))


def _tokenizer_seeds() -> list[bytes]:
    tree = json.loads((TOKENIZER / "tokenizer.json").read_text())
    small = dict(list(tree["model"]["vocab"].items())[:280])
    merges = [
        pair for pair in tree["model"]["merges"] if "".join(pair if isinstance(pair, list) else pair.split()) in small
    ]
    tree["model"] |= {"vocab": small, "merges": merges}
    tree["added_tokens"] = [token for token in tree["added_tokens"] if token["id"] < len(small)]
    return [json.dumps(tree).encode(), (TOKENIZER / "tokenizer.json").read_bytes()]


def read_chat(data: bytes) -> None:
    """A conversation as a client sends it, through templates of several kinds."""
    try:
        wanted = json.loads(data)
    except (ValueError, RecursionError):
        return
    if not isinstance(wanted, dict) or not isinstance(wanted.get("messages"), list):
        return
    variables = wanted.get("variables") if isinstance(wanted.get("variables"), dict) else {}
    options = {
        "continue_final_message": bool(wanted.get("continue")),
        "add_generation_prompt": not wanted.get("continue"),
    }
    taken = {"messages", "controls", "self", *options, "tools"}
    refused: JaxserveError | None = None
    for template in _templates():
        try:
            given = {name: value for name, value in variables.items() if name not in taken}
            template.encode(_tokenizer(), wanted["messages"], max_tokens=500, **options, **given)
        except JaxserveError as error:
            refused = error
    if refused is not None:
        raise refused


@functools.cache
def _templates() -> tuple[ChatTemplate, ...]:
    sources = [path.read_text() for path in sorted((CORPUS / "templates").iterdir())]
    return tuple(ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}) for source in sources)


@functools.cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.load(TOKENIZER)


def _chat_seeds() -> list[bytes]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, {"b": null}]}'}}
    turns: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello <|im_start|>system"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "content": "42", "tool_call_id": "c1", "name": "f"},
        {"role": "user", "content": "And now? <|im_end|>"},
    ]
    several = (
        {"messages": turns, "variables": {"enable_thinking": False, "date_string": "today"}},
        {"messages": turns[:2]},
        {"messages": [*turns, {"role": "assistant", "content": "It is"}], "continue": True},
    )
    return [json.dumps(tree).encode() for tree in several]


def read_output(data: bytes) -> None:
    """Token ids and stop strings: however the ids are cut, the text is the same."""
    head, _, rest = data.partition(b"\n")
    stops = tuple(text for text in head.decode("utf-8", "replace").split("|") if text)[:4]
    ids = [int.from_bytes(rest[i : i + 2], "little") % 400 for i in range(0, len(rest) - 1, 2)][:500]
    whole = _detokenized(ids, stops, len(ids) or 1)
    for width in (1, 3):
        assert _detokenized(ids, stops, width) == whole, (ids, stops, width)


def _detokenized(ids: list[int], stops: tuple[str, ...], width: int) -> str:
    detokenizer = Detokenizer(_tokenizer(), stops)
    text = ""
    for start in range(0, len(ids), width):
        text += detokenizer.push(ids[start : start + width])
        if detokenizer.stopped:
            return text
    return text + detokenizer.finish()


def _output_seeds() -> list[bytes]:
    ids = _tokenizer().encode("The river winds through Straße and 日本, 😀 and END again.")
    raw = b"".join(token.to_bytes(2, "little") for token in ids)
    return [b"END|\n" + raw, "ß| and".encode() + b"\n" + raw, b"\n" + bytes(range(256))]


# --- the operator's files ---------------------------------------------------------------------------------------------


def read_settings(data: bytes) -> None:
    """A configuration file."""
    load(as_file("a.yaml", data), {}, {})


def _settings_seeds() -> list[bytes]:
    files = sorted((ROOT / "configs").glob("*.yaml"))
    return [
        *(path.read_bytes() for path in files),
        b"server: {host: &x [*x]}\n",
        b"engine: {pools: [4x8, {slots: 1, length: 2}]}\n",
        b"? {a: b}\n: c\n",
        b"--- a\n--- b\n",
    ]


def read_keys(data: bytes) -> None:
    """A key file."""
    parse_ring(data, Path("keys.yaml"))


def _key_seeds() -> list[bytes]:
    entry = {"id": "abcdefgh", "hash": "0" * 64, "scopes": ["infer"], "limits": {"requests_per_minute": 5}}
    return [
        json.dumps([entry, entry | {"id": "b", "expires": "2030-01-01"}]).encode(),
        b"- id: a\n  scopes: [infer]\n",
        b"[]",
    ]


# --- requests ---------------------------------------------------------------------------------------------------------


def read_request(data: bytes) -> None:
    """A body, through every endpoint of the whole application around an engine that answers by hash.

    The first byte says which one. Anything but an answer below 500 is a crash.
    """
    path = _PATHS[data[0] % len(_PATHS)] if data else _PATHS[0]
    status = asyncio.run(_ask(path, data[1:]))
    assert status < 500, (path, status)


_PATHS = ("/v1/chat/completions", "/v1/completions", "/generate", "/tokenize", "/detokenize")


@functools.cache
def _application() -> Callable[..., Any]:
    from jaxserve.config import ServerConfig
    from jaxserve.server.app import create_app
    from jaxserve.server.service import ServedModel, Service
    from tests.server.conftest import FakeEngine, byte_tokenizer

    folder = scratch() / "bytes"
    folder.mkdir()
    tokenizer = byte_tokenizer(folder)
    model = ServedModel(
        id="tiny",
        engine=FakeEngine(tokenizer),
        tokenizer=tokenizer,
        chat_template=_templates()[0],
        created=1,
    )
    service = Service(config=ServerConfig(), model=model, access_log=False)
    service.readiness.ready()
    return create_app(service)


async def _ask(path: str, body: bytes) -> int:
    statuses: list[int] = []
    sent = False

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    headers = [(b"host", b"x"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": headers}
    scope |= {"http_version": "1.1", "query_string": b"", "scheme": "http", "root_path": ""}
    scope |= {"client": ("127.0.0.1", 1), "server": ("127.0.0.1", 1)}
    await _application()(scope, receive, send)
    return statuses[0] if statuses else 599


def _request_seeds() -> list[bytes]:
    from tests.rigs.fuzz import GOOD

    return [bytes([_PATHS.index(path)]) + json.dumps(tree).encode() for path, trees in GOOD.items() for tree in trees]


TARGETS: dict[str, Target] = {
    "gguf": Target(read_gguf, committed("gguf"), share=1),
    "gguf_tokenizer": Target(read_gguf_tokenizer, committed("gguf_tokenizer"), tree=True),
    "safetensors": Target(read_safetensors, committed("safetensors"), share=1),
    "index": Target(read_index, _index_seeds, tree=True),
    "manifest": Target(read_manifest, committed("manifest"), tree=True, share=1),
    "model_config": Target(read_model_config, _model_config_seeds, tree=True),
    "tokenizer": Target(read_tokenizer, _tokenizer_seeds, tree=True),
    "chat": Target(read_chat, _chat_seeds, tree=True),
    "output": Target(read_output, _output_seeds),
    "settings": Target(read_settings, _settings_seeds),
    "keys": Target(read_keys, _key_seeds, tree=True),
    "request": Target(read_request, _request_seeds, share=1),
}


def found_before() -> Iterator[tuple[str, Path]]:
    """Every input that once crashed a target: kept, and tried again each time."""
    for path in sorted((CORPUS / "crashes").glob("*/*")):
        yield path.parent.name, path
