"""Every class of published advisories has the tests that show it, or a reason that still holds why there can be none.

The classes are those of advisories in servers of language models, 2024 to 2026. A test that is renamed or lost shows
here; so does a reason that has outlived its cause.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest


@dataclasses.dataclass(frozen=True)
class Shown:
    """A class of faults.

    Attributes:
        what: the class, in a few words.
        by: ``path::test``, or ``make target`` for what a rig shows.
        absent: why nothing can show it: the part that does not exist yet, by its path.
    """

    what: str
    by: tuple[str, ...] = ()
    absent: str = ""


HERE = "tests/house/test_advisories.py"
AUTH, KEYS = "tests/server/test_auth.py", "tests/server/test_keys.py"
BAD, PROTOCOL = "tests/server/test_endpoints_bad_inputs.py", "tests/server/test_protocol.py"
CLASSES: dict[int, Shown] = {
    1: Shown("objects from bytes, code from text", (f"{HERE}::test_nothing_turns_bytes_into_objects",)),
    2: Shown(
        "listeners nobody asked for", ("tests/launch/test_serving_network.py::test_it_listens_where_it_was_told_to",)
    ),
    3: Shown(
        "pickles beside weights",
        (
            "tests/checkpoint/test_safetensors.py::test_pickles_are_refused_by_name_and_not_opened",
            "tests/checkpoint/test_convert.py::test_a_pickle_beside_good_weights_is_refused",
        ),
    ),
    4: Shown("code of a model's folder", ("tests/checkpoint/test_convert.py::test_no_code_of_a_folder_is_run",)),
    5: Shown("templates that reach out", ("tests/text/test_sandbox.py::test_injections_are_refused",)),
    6: Shown(
        "templates that never end", ("tests/text/test_sandbox.py::test_bombs_are_stopped", f"{BAD}::test_a_bad_input")
    ),
    7: Shown("hostile grammars", absent="jaxserve/text/grammar.py"),
    8: Shown("numbers beyond reason", (f"{BAD}::test_numbers_at_their_edges_and_beyond",)),
    9: Shown(
        "ids beyond the vocabulary, control tokens in text",
        (f"{BAD}::test_a_bad_input", "tests/text/test_chat.py::test_injections"),
    ),
    10: Shown("one request ends the engine", ("tests/rigs/test_rigs.py::test_poison", "make poison")),
    11: Shown(
        "heads and bodies without end",
        (
            f"{BAD}::test_bad_http",
            f"{PROTOCOL}::test_an_endless_head_is_refused",
            f"{PROTOCOL}::test_many_bodies_in_pieces_of_one_byte_leave_nothing",
            "tests/server/test_middleware.py::test_300_megabytes_are_not_read",
        ),
    ),
    12: Shown(
        "slow clients",
        (
            f"{PROTOCOL}::test_a_slow_head_is_cut_off",
            f"{PROTOCOL}::test_a_slow_body_is_cut_off",
            f"{PROTOCOL}::test_a_reader_that_takes_nothing_is_dropped",
            f"{PROTOCOL}::test_a_silent_connection_is_closed",
        ),
    ),
    13: Shown(
        "smuggled requests, confused hosts",
        (
            "tests/server/test_protocol_smuggling.py::test_each_is_refused_once_and_the_connection_closed",
            "tests/server/test_middleware.py::test_there_is_one_host",
            f"{AUTH}::test_what_a_host_or_a_proxy_says_does_not_matter",
        ),
    ),
    14: Shown(
        "a forgotten route",
        (f"{AUTH}::test_nobody_gets_in_without_a_key", f"{AUTH}::test_every_route_says_what_it_needs"),
    ),
    15: Shown(
        "the time a comparison takes",
        (f"{KEYS}::test_every_look_up_takes_the_same_steps", f"{KEYS}::test_no_secret_is_compared_byte_by_byte"),
    ),
    16: Shown("attacks by the key itself", (f"{AUTH}::test_hostile_keys_are_refused_fast_and_written_nowhere",)),
    17: Shown(
        "errors that tell too much",
        (
            "tests/rigs/test_fuzz.py::test_nothing_is_found_where_nothing_is",
            "tests/rigs/test_fuzz.py::test_leaks",
            "make fuzz",
        ),
    ),
    18: Shown(
        "requests that the server is made to send",
        ("tests/launch/test_serving_network.py::test_it_speaks_to_nobody_who_has_not_spoken_first",),
    ),
    19: Shown(
        "names that become paths",
        (
            f"{BAD}::test_a_bad_input",
            "tests/server/test_endpoints.py::test_no_such_model",
            "tests/checkpoint/test_store.py::test_names_never_become_paths",
        ),
    ),
    20: Shown(
        "links, pipes and devices",
        (
            "tests/checkpoint/test_files.py::test_only_regular_files_are_opened",
            "tests/checkpoint/test_files.py::test_elsewhere_no_link_is_followed",
            "tests/checkpoint/test_safetensors.py::test_links_and_fifos_are_refused",
            "tests/checkpoint/test_side_files.py::test_links_to_secrets_are_not_taken_over",
        ),
    ),
    21: Shown(
        "malformed GGUF files",
        (
            "tests/checkpoint/test_gguf.py::test_malformed_files_are_refused_by_name_and_reason",
            "tests/checkpoint/test_gguf.py::test_malformed_files_take_little_memory",
            "make fuzz-parsers",
        ),
    ),
    22: Shown(
        "malformed safetensors, and tensors that do not fit",
        (
            "tests/checkpoint/test_safetensors.py::test_malformed_files_are_refused_by_name_and_reason",
            "tests/checkpoint/test_parameters.py::test_missing_tensors_are_named",
            "tests/checkpoint/test_parameters.py::test_misshapen_tensors_are_named_even_with_as_many_numbers",
            "tests/checkpoint/test_parameters.py::test_weights_that_are_no_numbers_are_refused",
            "make fuzz-parsers",
        ),
    ),
    23: Shown(
        "what a restore would believe",
        (
            "tests/checkpoint/test_restore.py::test_another_tree_is_refused",
            "tests/checkpoint/test_restore.py::test_why_the_manifest_is_needed_a_flipped_bit_is_restored",
            "tests/rigs/test_corrupt.py::test_damage_is_refused_by_name",
            "make corrupt",
        ),
    ),
    24: Shown(
        "broken tokenizers",
        (
            "tests/checkpoint/test_side_files.py::test_a_broken_tokenizer_is_refused",
            "tests/checkpoint/test_side_files.py::test_a_broken_sentencepiece_model_is_refused",
            "tests/checkpoint/test_side_files.py::test_a_tokenizer_larger_than_the_embedding_is_refused",
            "tests/text/test_tokenizer.py::test_a_table_that_does_not_fit_its_encoder_is_refused",
        ),
    ),
    25: Shown(
        "lines that are forged in a log",
        (
            "tests/server/test_logs.py::test_json_is_one_object_a_line",
            "tests/server/test_logs.py::test_the_console_shows_no_control_characters",
            "tests/server/test_audit.py::test_a_line_stays_a_line",
        ),
    ),
    26: Shown("who else asked for a prefix", absent="jaxserve/engine/prefix_cache.py"),
    27: Shown(
        "another's cache in an answer",
        ("tests/engine/test_engine.py::test_alone_is_together_bit_for_bit", "make simulate"),
    ),
    28: Shown(
        "what a cancelled request leaves", ("tests/rigs/test_rigs.py::test_cancels_and_their_leaks", "make cancels")
    ),
    29: Shown("settings that become lines of other files", absent="deploy"),
    30: Shown(
        "other sites' pages",
        (
            f"{AUTH}::test_no_site_is_invited",
            f"{AUTH}::test_lists_come_before_keys",
            f"{AUTH}::test_other_sites_pages_may_not_do_what_admins_do",
        ),
    ),
    31: Shown("what is installed", ("tests/house/test_dependencies.py::test_pins_are_names_and_versions_that_fit",)),
}


def lost(shown: Shown, root: Path) -> list[str]:
    """What a class points to and is not there; or its reason, if what was absent has come."""
    if shown.absent:
        return [f"{shown.absent} exists now"] if (root / shown.absent).exists() else []
    targets = re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.M)
    missing = []
    for name in shown.by:
        path, _, test = name.partition("::")
        if name.startswith("make "):
            there = name.removeprefix("make ") in targets
        else:
            there = (root / path).is_file() and bool(re.search(rf"^def {test}\(", (root / path).read_text(), re.M))
        missing += [] if there else [name]
    return missing


@pytest.mark.parametrize("number", CLASSES)
def test_a_class_is_shown(number, root):
    shown = CLASSES[number]
    assert bool(shown.by) != bool(shown.absent)
    assert lost(shown, root) == [], shown.what


def test_there_are_all_of_them():
    assert list(CLASSES) == list(range(1, 32))


def test_a_lost_test_shows(root):
    assert lost(Shown("x", (f"{HERE}::test_a_lost_test_shows",)), root) == []
    assert lost(Shown("x", (f"{HERE}::test_never", "make nothing", "tests/none.py::test_x")), root) != []
    assert lost(Shown("x", absent="jaxserve"), root) == ["jaxserve exists now"]


# --- 1: objects from bytes, code from text ----------------------------------------------------------------------------

MODULES = frozenset(
    {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle", "torch", "zmq", "code"}
)
CALLS = frozenset({"eval", "exec", "compile", "__import__", "recv_pyobj", "send_pyobj", "system", "popen", "mktemp"})
OF_MODULES = {
    "yaml": frozenset({"load", "load_all", "full_load", "unsafe_load", "unsafe_load_all"}),
    "runpy": frozenset({"run_path", "run_module"}),
}


def banned(source: str) -> Iterator[str]:
    """What a module does that none may do."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            yield from _banned_call(node)


def _banned_call(node: ast.Call) -> Iterator[str]:
    function = node.func
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    for flag in ("allow_pickle", "shell", "trust_remote_code"):
        value = keywords.get(flag)
        if value is not None and not (isinstance(value, ast.Constant) and value.value is False):
            yield flag
    if isinstance(function, ast.Name) and function.id in CALLS:
        yield function.id
    if isinstance(function, ast.Attribute):
        owner = function.value.id if isinstance(function.value, ast.Name) else ""
        if function.attr in OF_MODULES.get(owner, ()) or function.attr in CALLS - {"compile"}:
            yield f"{owner}.{function.attr}"


def test_nothing_turns_bytes_into_objects(modules):
    assert {name: found for name, source in modules.items() if (found := list(banned(source)))} == {}


@pytest.mark.parametrize(
    "planted",
    [
        "import pickle",
        "from dill import loads",
        "import torch.serialization",
        "eval(text)",
        "exec(text)",
        "compile(text, 'a', 'exec')",
        "__import__(name)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.unsafe_load(text)",
        "socket.recv_pyobj()",
        "os.system(text)",
        "subprocess.run(text, shell=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=flag)",
    ],
)
def test_the_ban_finds(planted):
    assert list(banned(planted))


def test_the_ban_leaves_alone():
    for fine in ("re.compile('a')", "yaml.compose(text, Loader=yaml.SafeLoader)", "np.load(path, allow_pickle=False)"):
        assert list(banned(fine)) == []
