"""The settings themselves: name, type, bounds, default and meaning of each, once.

Knows also how a type and a value are put in words, and the documents' table. Does not know where values come from.
A duration's name ends in ``_s`` or ``_ms``.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

PREFIX = "JAXSERVE_"


def means(text: str) -> Meta:
    """What a setting does, in a line."""
    return Meta(description=text)


Auto = Literal["auto"]
Text = Annotated[str, Meta(min_length=1)]
Count = Annotated[int, Meta(ge=1, le=1_000_000)]
CountOrZero = Annotated[int, Meta(ge=0, le=1_000_000)]
Bytes = Annotated[int, Meta(ge=1024, le=2**50)]
Seconds = Annotated[float, Meta(gt=0, le=1_000_000)]
SecondsOrZero = Annotated[float, Meta(ge=0, le=1_000_000)]

# --- the tree ---------------------------------------------------------------------------------------------------------


class Pool(msgspec.Struct, frozen=True):
    """Slots of one length: ``slots`` requests side by side, each with ``length`` positions of cache; ``4x2048``."""

    slots: Annotated[int, Meta(ge=1, le=4096)]
    length: Annotated[int, Meta(ge=2, le=2**24)]

    def __str__(self) -> str:
        return f"{self.slots}x{self.length}"


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which model is served."""

    id: Annotated[Text, means("model to serve: one of the catalogue or one that was pulled")] = "smollm2-135m-instruct"
    version: Annotated[Text, means("version of it; `current` is the one in use")] = "current"
    dtype: Annotated[Literal["bfloat16", "float32"], means("type of weights, activations and cache")] = "bfloat16"


class CheckpointsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where models lie."""

    root: Annotated[Path, means("folder of converted models")] = Path("checkpoints")
    catalog: Annotated[Path, means("known models: where each comes from and its digest")] = Path(
        "checkpoints/catalog.yaml"
    )


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How requests share the device."""

    pools: Annotated[tuple[Pool, ...], Meta(min_length=1), means("slots x cache positions, one pool or more")] = (
        Pool(8, 2048),
    )
    max_concurrency: Annotated[Auto | Count, means("requests that run at once; `auto`: as many as slots")] = "auto"
    max_waiting: Annotated[
        Auto | CountOrZero,
        means("requests that wait for a slot, one more is refused at once; `auto`: as many as run"),
    ] = "auto"
    queue_timeout_s: Annotated[Seconds, means("longest wait for a slot")] = 60.0
    request_timeout_s: Annotated[Seconds, means("longest life of a request, from arrival to last token")] = 600.0
    max_tenant_share: Annotated[
        float, Meta(gt=0, le=1), means("share of a pool that one key may hold; below 1, others find a slot")
    ] = 1.0
    quarantine_s: Annotated[SecondsOrZero, means("how long a request that made a step fail is refused; 0: never")] = (
        600.0
    )
    batch_window_ms: Annotated[
        float, Meta(ge=0, le=1000), means("how long an idle engine waits for company before it starts")
    ] = 0.0
    max_input_tokens: Annotated[Auto | Count, means("longest prompt; `auto`: what the longest pool holds")] = "auto"
    max_output_tokens: Annotated[Auto | Count, means("longest output; `auto`: what the longest pool holds")] = "auto"
    max_logprobs: Annotated[int, Meta(ge=0, le=1000), means("most alternatives reported beside a token")] = 20
    max_logit_bias: Annotated[int, Meta(ge=0, le=4096), means("most tokens that one request may bias")] = 300
    max_stop_token_ids: Annotated[int, Meta(ge=1, le=1024), means("most tokens that may end an output")] = 16
    prefill_buckets: Annotated[
        Auto | tuple[Count, ...], means("sizes that prompt chunks are padded to; `auto`: chosen by the plan")
    ] = "auto"
    steps_per_dispatch: Annotated[
        Auto | Annotated[int, Meta(ge=1, le=256)], means("decode steps before the host looks at the tokens")
    ] = "auto"
    draft_tokens: Annotated[
        Auto | tuple[Annotated[int, Meta(ge=1, le=64)], ...] | None,
        means("drafts that a pass may verify; `auto`: 7 where no bit depends on it, else none"),
    ] = "auto"
    memory_limit_bytes: Annotated[Auto | Bytes, means("memory to plan for; `auto`: what the device reports")] = "auto"
    memory_headroom: Annotated[float, Meta(ge=0, lt=1), means("share of the memory that the plan leaves free")] = 0.1
    compilation_cache: Annotated[Path | None, means("folder that keeps compiled programs from start to start")] = Path(
        "~/.cache/jaxserve/programs"
    )
    expert_product: Annotated[
        Literal["auto", "ragged_dot", "tokamax"],
        means("kernel of experts on GPU and TPU; `ragged_dot`: XLA's own; `tokamax`: that package's"),
    ] = "auto"
    huge_pages: Annotated[
        Literal["auto", "off"], means("`auto`: on Linux ask the C library for huge pages, twice as fast on CPU")
    ] = "auto"
    native_kernels: Annotated[
        Literal["auto", "off"],
        means("experts on CPU; `auto`: in C++, if built and the processor has AVX-512; `off`: by XLA"),
    ] = "auto"


class MeshConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How many devices share the model; 1 x 1 puts all of it on one."""

    expert: Annotated[
        int, Meta(ge=1, le=4096), means("devices among which experts are split, and what else these divide")
    ] = 1
    tensor: Annotated[
        int, Meta(ge=1, le=4096), means("devices among which heads and feed-forward parts are split, times those")
    ] = 1
    exchange_tokens: Annotated[
        Auto | Count | None,
        means("size of passes from which tokens go to their experts' devices only; `auto`: by bytes"),
    ] = "auto"


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the network sees."""

    host: Annotated[Text, means("address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535), means("port to listen on; 0: a free one")] = 8000
    probe_port: Annotated[
        Auto | Annotated[int, Meta(ge=0, le=65535)] | None, means("port of the probes alone; `auto`: the next one")
    ] = "auto"
    health_route: Annotated[
        Annotated[str, Meta(pattern=r"^(/[\w.~-]+)+$")] | None, means("one more path that answers as /readyz does")
    ] = None
    max_body_bytes: Annotated[int, Meta(ge=1024, le=2**31), means("largest request body, else 413")] = 4 * 2**20
    max_header_bytes: Annotated[int, Meta(ge=1024, le=2**20), means("largest request head, else 431")] = 65_536
    max_headers: Annotated[int, Meta(ge=8, le=1000), means("most header lines of a request, else 431")] = 100
    header_timeout_s: Annotated[Seconds, means("longest time that a whole request head may take")] = 10.0
    body_timeout_s: Annotated[Seconds, means("longest time that a whole request body may take")] = 30.0
    keep_alive_timeout_s: Annotated[Seconds, means("how long an idle connection is kept")] = 30.0
    write_timeout_s: Annotated[Seconds, means("a client that takes nothing for this long is cut off")] = 30.0
    sse_ping_s: Annotated[Seconds, means("a silent stream gets a comment line this often")] = 15.0
    max_n: Annotated[int, Meta(ge=1, le=128), means("most choices (`n`, `best_of`) of a request")] = 8
    max_prompts: Annotated[int, Meta(ge=1, le=1024), means("most prompts of a completion request")] = 32
    max_choices: Annotated[int, Meta(ge=1, le=4096), means("most prompts times `n` of one HTTP request")] = 64
    max_stop_strings: Annotated[int, Meta(ge=1, le=64), means("most `stop` strings of a request")] = 4
    max_stop_length: Annotated[int, Meta(ge=1, le=4096), means("longest `stop` string, in characters")] = 256
    max_messages: Annotated[int, Meta(ge=1, le=65536), means("most messages of a chat request")] = 2048
    default_completion_tokens: Annotated[Count, means("`max_tokens` of a completion that names none")] = 16
    max_preparing: Annotated[int, Meta(ge=1, le=65536), means("requests being received or tokenised at once")] = 64
    tokenize_threads: Annotated[int, Meta(ge=1, le=64), means("threads that render templates and tokenise")] = 2
    lame_duck_s: Annotated[SecondsOrZero, means("after SIGTERM: how long it serves on while not ready")] = 5.0
    drain_s: Annotated[SecondsOrZero, means("after that: how long running requests may still take")] = 30.0
    drain_reject: Annotated[bool, means("whether it refuses new generations as soon as it drains")] = False
    heartbeat_limit_s: Annotated[
        Seconds, means("/livez fails when busy and without a step for this long; after twice as long it exits")
    ] = 60.0
    loop_limit_s: Annotated[Seconds, means("/livez fails when the event loop stands still for this long")] = 30.0
    stall_limit_s: Annotated[Seconds, means("/livez fails when start-up stands still for this long")] = 600.0
    rss_limit_bytes: Annotated[
        Auto | Bytes | None, means("memory that the process may take; `auto`: what its control group allows")
    ] = "auto"
    rss_share: Annotated[float, Meta(gt=0, le=1), means("share of it from which on new generations are refused")] = 0.9
    retry_after_s: Annotated[Seconds, means("`Retry-After` when nothing better is known")] = 1.0


class AuthConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Who may ask."""

    keys: Annotated[Path | None, means("file of API keys, read anew when it changes; `off`: anybody may ask")] = None
    public_metrics: Annotated[bool, means("whether /metrics answers without a key")] = False
    revoked_streams: Annotated[Literal["end", "finish"], means("what becomes of a revoked key's running requests")] = (
        "end"
    )
    hosts: Annotated[
        Auto | tuple[Text, ...] | None, means("names that `Host` may give; `auto`: on loopback its own, else any")
    ] = "auto"
    allow: Annotated[tuple[Text, ...] | None, means("addresses or networks that may ask; `off`: any")] = None
    proxies: Annotated[tuple[Text, ...] | None, means("those whose `X-Forwarded-For` is believed")] = None


class TLSConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Encryption on the main port; the files are read anew when they change."""

    certificate: Annotated[Path | None, means("PEM file of the certificate and its chain; `off`: plain HTTP")] = None
    private_key: Annotated[Path | None, means("PEM file of its key; `off`: it is in the certificate's file")] = None
    client_ca: Annotated[Path | None, means("PEM file of who signs clients' certificates; `off`: none needed")] = None


class AuditConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Who asked for what: never a key, a prompt or an output."""

    file: Annotated[Path | None, means("file that gets a JSON line a request, probes aside; `off`: none")] = None
    fsync: Annotated[bool, means("whether lines are forced to the disk as they are written")] = False
    body_digest: Annotated[bool, means("whether a line holds the SHA-256 of the request's body")] = False


class LogConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What is written while it runs: never a prompt or an output."""

    level: Annotated[Literal["debug", "info", "warning", "error"], means("least serious line to write")] = "info"
    format: Annotated[Literal["console", "json"], means("for people, or one JSON object a line")] = "console"
    access: Annotated[bool, means("a line for each HTTP request")] = True


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of one process."""

    model: ModelConfig = ModelConfig()
    checkpoints: CheckpointsConfig = CheckpointsConfig()
    engine: EngineConfig = EngineConfig()
    mesh: MeshConfig = MeshConfig()
    server: ServerConfig = ServerConfig()
    auth: AuthConfig = AuthConfig()
    tls: TLSConfig = TLSConfig()
    audit: AuditConfig = AuditConfig()
    log: LogConfig = LogConfig()


# --- the tree as a list -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One leaf of the tree.

    Attributes:
        name: its path, ``engine.max_waiting``.
        kind: the type that values are converted to, with its bounds.
        default: its value when nobody gives one.
    """

    name: str
    kind: Any
    default: Any

    @property
    def flag(self) -> str:
        """Its command line flag: ``--engine.max-waiting``."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """Its environment variable: ``JAXSERVE_ENGINE__MAX_WAITING``."""
        return PREFIX + self.name.replace(".", "__").upper()

    @property
    def meaning(self) -> str:
        """What it does, in a line."""
        return next(meta.description for meta in self.kind.__metadata__ if meta.description)

    @property
    def values(self) -> str:
        """What it takes, in words."""
        return _in_words(self.kind)

    @property
    def takes_list(self) -> bool:
        """Whether a value is several items, written with commas between them."""
        return any(get_origin(option) is tuple for option in _options(self.kind))

    @property
    def takes_off(self) -> bool:
        """Whether ``off`` turns it off: its value is then ``None``."""
        return types.NoneType in _options(self.kind)


def _options(kind: Any) -> tuple[Any, ...]:
    """The alternatives of a union, else the type itself; without annotations."""
    bare = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    return get_args(bare) if get_origin(bare) in (Union, types.UnionType) else (bare,)


def _in_words(kind: Any) -> str:
    options = _options(kind)
    if len(options) > 1:
        return " or ".join(map(_in_words, options))
    (bare,) = options
    if get_origin(bare) is Literal:
        return " or ".join(f"`{choice}`" for choice in get_args(bare))
    if get_origin(bare) is tuple:
        item = get_args(bare)[0]
        return "pools like `24x2048,4x32768`" if item is Pool else f"{_in_words(item)}, several with commas"
    nouns = {int: "an integer", float: "a number", bool: "`true` or `false`", Path: "a path", types.NoneType: "`off`"}
    bounds: dict[str, float] = {}
    noun = nouns.get(bare, "text")
    for meta in getattr(kind, "__metadata__", ()):
        noun = f"text like `{meta.pattern}`" if meta.pattern else noun
        limits = {"from": meta.ge, "above": meta.gt, "to": meta.le, "below": meta.lt}
        bounds |= {word: limit for word, limit in limits.items() if limit is not None}
    return " ".join([noun, *(f"{word} {limit:,}" for word, limit in bounds.items())])


def _leaves() -> Iterator[Setting]:
    for section in msgspec.structs.fields(Config):
        kinds = get_type_hints(section.type, include_extras=True)
        for field in msgspec.structs.fields(section.type):
            yield Setting(f"{section.name}.{field.name}", kinds[field.name], field.default)


SETTINGS: Mapping[str, Setting] = types.MappingProxyType({setting.name: setting for setting in _leaves()})


# --- in words ---------------------------------------------------------------------------------------------------------


def written(value: object) -> str:
    """A value as one writes it in a file, a variable or a flag."""
    match value:
        case bool():
            return str(value).lower()
        case None:
            return "off"
        case tuple():
            return ",".join(map(written, value))
        case float():
            return f"{value:g}"
        case _:
            return str(value)


def config_table() -> str:
    """All settings as a Markdown table, for the documents."""
    rows = (f"| `{s.name}` | `{written(s.default)}` | {s.values} | {s.meaning} |" for s in SETTINGS.values())
    return "\n".join(["| Setting | Default | Takes | Meaning |", "|---|---|---|---|", *rows]) + "\n"
