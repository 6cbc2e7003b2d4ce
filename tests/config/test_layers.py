"""Layers: a later one wins, every value knows its origin, every mistake is told in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.config import Pool, describe, load, tuned_environment
from jaxserve.errors import ConfigError

CONFIGS = sorted(Path(__file__).parents[2].joinpath("configs").glob("*.yaml"))


@pytest.fixture
def write(tmp_path):
    def write(text: str | bytes) -> Path:
        path = tmp_path / "a.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_defaults_know_that_they_are():
    loaded = load(environ={})
    assert set(loaded.origins.values()) == {"default"}
    assert loaded.config.server.port == 8000
    assert "~" not in str(loaded.config.engine.compilation_cache)


def test_a_later_layer_wins_and_origins_tell(write):
    file = write("engine:\n  max_waiting: 1\n  max_logprobs: 1\n  huge_pages: off\n")
    environ = {"JAXSERVE_ENGINE__MAX_WAITING": "2", "JAXSERVE_ENGINE__MAX_LOGPROBS": "2"}
    loaded = load(file, {"engine.max_waiting": "3"}, environ)
    engine = loaded.config.engine
    assert (engine.max_waiting, engine.max_logprobs, engine.huge_pages) == (3, 2, "off")
    assert loaded.origins["engine.max_waiting"] == "--engine.max-waiting"
    assert loaded.origins["engine.max_logprobs"] == "JAXSERVE_ENGINE__MAX_LOGPROBS"
    assert loaded.origins["engine.huge_pages"] == f"{file}:4"
    assert loaded.origins["engine.max_output_tokens"] == "default"


def test_variable_names_the_file(write):
    file = write("server:\n  port: 1\n")
    assert load(environ={"JAXSERVE_CONFIG": str(file)}).config.server.port == 1
    assert load(file, environ={"JAXSERVE_CONFIG": "/nowhere"}).config.server.port == 1


def test_what_an_orchestrator_sets_is_left_alone():
    environ = {"JAXSERVE_PORT": "tcp://10.0.0.1:80", "JAXSERVE_SERVICE_HOST": "10.0.0.1", "JAX_PLATFORMS": "cpu"}
    assert load(environ=environ).config == load(environ={}).config


def test_a_platform_tells_the_health_route_and_our_own_variable_wins():
    environ = {"AIP_HEALTH_ROUTE": "/vertex/health"}
    loaded = load(environ=environ)
    assert loaded.config.server.health_route == "/vertex/health"
    assert loaded.origins["server.health_route"] == "AIP_HEALTH_ROUTE"
    loaded = load(environ=environ | {"JAXSERVE_SERVER__HEALTH_ROUTE": "off"})
    assert loaded.config.server.health_route is None
    for wrong in ("health", "/a b", "/{x}", "/"):
        with pytest.raises(ConfigError, match=r"^AIP_HEALTH_ROUTE: `server\.health_route` takes"):
            load(environ={"AIP_HEALTH_ROUTE": wrong})


@pytest.mark.parametrize(
    "text",
    ["4x2048,2x64", "[4x2048, 2x64]", "['4 x 2048,2x64']", "[{slots: 4, length: 2048}, 2x64]"],
)
def test_pools_may_be_written_in_any_of_these_ways(write, text):
    assert load(write(f"engine:\n  pools: {text}\n"), environ={}).config.engine.pools == (Pool(4, 2048), Pool(2, 64))


def test_repeated_flag_is_a_list():
    assert load(flags={"engine.pools": ("4x2048", "2x64")}, environ={}).config.engine.pools[1] == Pool(2, 64)
    assert load(flags={"engine.prefill_buckets": "32,64"}, environ={}).config.engine.prefill_buckets == (32, 64)
    assert load(flags={"engine.prefill_buckets": "auto"}, environ={}).config.engine.prefill_buckets == "auto"


def test_words_that_yaml_takes_for_booleans_stay_words(write):
    engine = load(write("engine:\n  huge_pages: off\n  compilation_cache: off\n"), environ={}).config.engine
    assert engine.huge_pages == "off"
    assert engine.compilation_cache is None


@pytest.mark.parametrize("text", ["", "# nothing\n", "engine:\n", "{}"])
def test_an_empty_file_says_nothing(write, text):
    assert load(write(text), environ={}).config == load(environ={}).config


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "engine:\n  max_waitin: 3\n",
            "a.yaml:2: no setting `engine.max_waitin` (did you mean `engine.max_waiting`?).",
        ),
        ("engin:\n  a: 3\n", "a.yaml:1: no section `engin` (did you mean `engine`?)."),
        (
            "\nengine:\n  max_waiting: many\n",
            "a.yaml:3: `engine.max_waiting` takes `auto` or an integer from 0 to 1,000,000, not 'many'.",
        ),
        ("engine:\n  max_waiting: -1\n", "not '-1'."),
        ("engine:\n  max_waiting:\n", "not ''."),
        ("engine:\n  max_waiting: [1]\n", "not ['1']."),
        ("engine:\n  pools: 4x1\n", "`engine.pools` takes pools like `24x2048,4x32768`, not '4x1'."),
        ("engine:\n  pools: []\n", "not []."),
        ("engine:\n  pools: 2048\n", "not '2048'."),
        ("engine:\n  queue_timeout_s: .nan\n", "not '.nan'."),
        ("engine:\n  queue_timeout_s: nan\n", "not 'nan'."),
        ("engine:\n  queue_timeout_s: inf\n", "not 'inf'."),
        ("log:\n  level: off\n", "takes `debug` or `info` or `warning` or `error`, not 'off'."),
        ("log:\n  access: maybe\n", "takes `true` or `false`, not 'maybe'."),
        ("server:\n  port: 65536\n", "not '65536'."),
        ("server:\n  host: ''\n", "not ''."),
        ("server:\n  port: 1\n  port: 2\n", "a.yaml:3: `server.port` is given twice, first in line 2."),
        ("server: 8000\n", "a.yaml:1: section `server` is a mapping of names to values."),
        ("- a\n", "a.yaml:1: a configuration file is a mapping of names to values."),
        ("server: {port: 1\n", "a.yaml:2: not YAML: "),
        ("a: b: c\n", "a.yaml:1: not YAML: "),
        ("server: *x\n", "a.yaml:1: not YAML: "),
        (b"\xff\xfe\xfa", "a.yaml: not UTF-8 at byte 0."),
        ("server: {host: &x [*x]}\n", "a.yaml:1: an alias stands for this; write it out."),
        ("a: &a [b, b]\nb: &b [*a, *a]\nc: [*b, *b]\n", "an alias stands for this"),
        ("[" * 5000, "a.yaml: nested too deeply."),
        ("? {a: b}\n: c\n", "a.yaml:1: a name is a short word."),
        ("? [a]\n: c\n", "a.yaml:1: a name is a short word."),
        ("x" * 200 + ": 1\n", "a.yaml:1: a name is a short word."),
        ('"a\\nb": 1\n', "a.yaml:1: a name is a short word."),
        ("#" * 70_000, "a.yaml: larger than 65,536 bytes."),
        (b"server:\n  host: \x00\n", "a.yaml: not YAML: "),
        ("server:\n  host: " + "9" * 500 + "\nengine:\n  max_waiting: " + "9" * 500, "9..."),
    ],
)
def test_a_mistake_in_a_file_is_told_in_one_sentence(write, text, says):
    with pytest.raises(ConfigError) as caught:
        load(write(text), environ={})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert caught.value.exit_code == 78


def test_absent_file_and_folder(tmp_path):
    with pytest.raises(ConfigError, match=r"b\.yaml: cannot be read: No such file"):
        load(tmp_path / "b.yaml", environ={})
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load(tmp_path, environ={})


def test_mistakes_in_environment_and_flags():
    with pytest.raises(
        ConfigError, match=r"JAXSERVE_SERVER__PROT: no such setting \(did you mean `JAXSERVE_SERVER__PORT`"
    ):
        load(environ={"JAXSERVE_SERVER__PROT": "1"})
    with pytest.raises(
        ConfigError, match=r"^JAXSERVE_SERVER__PORT: `server.port` takes an integer .*, not 'x'\.$"
    ) as caught:
        load(environ={"JAXSERVE_SERVER__PORT": "x"})
    assert caught.value.param == "server.port"
    with pytest.raises(
        ConfigError, match=r"^--server.port: `server.port` takes an integer from 0 to 65,535, not '-1'\.$"
    ):
        load(flags={"server.port": "-1"}, environ={})


def test_no_home_folder(monkeypatch):
    def homeless(path):
        raise RuntimeError

    monkeypatch.setattr(Path, "expanduser", homeless)
    with pytest.raises(ConfigError, match="this user has no home folder"):
        load(environ={})


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_configurations_load(path):
    loaded = load(path, environ={})
    assert loaded.config != load(environ={}).config
    assert str(path) in "".join(loaded.origins.values())


def test_configurations_are_shipped():
    assert len(CONFIGS) >= 3


def test_description_reads_back(write):
    loaded = load(CONFIGS[0], {"engine.compilation_cache": "off"}, {"JAXSERVE_LOG__ACCESS": "false"})
    text = describe(loaded, origins=True)
    again = load(write(text), environ={})
    assert again.config == loaded.config
    assert "--engine.compilation-cache" in text
    assert "JAXSERVE_LOG__ACCESS" in text
    assert f"{CONFIGS[0]}:" in text
    assert "#" not in describe(loaded)


def test_tuned_environment():
    config = load(environ={}).config
    tuned = tuned_environment(config, {"A": "b"})
    assert tuned == {"A": "b", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    assert tuned_environment(config, tuned) is None
    others = {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}
    assert tuned_environment(config, others) == {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"}
    off = load(flags={"engine.huge_pages": "off"}, environ={}).config
    assert tuned_environment(off, {}) is None
