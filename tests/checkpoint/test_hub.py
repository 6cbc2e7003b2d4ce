"""The hub's client is told exactly what to fetch, and all that it raises becomes one sentence."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from jaxserve.checkpoint.hub import snapshot
from jaxserve.checkpoint.side_files import is_side_file
from jaxserve.errors import CheckpointError, SourceUnavailable


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """What the client was asked for; it answers with a folder named like a commit."""
    calls: list[dict[str, object]] = []

    def download(repository: str, **options: object) -> str:
        calls.append({"repository": repository} | options)
        return str(tmp_path / "snapshots" / "0123abcd")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return calls


def test_one_commit_for_all_files(asked, tmp_path):
    assert snapshot("org/name", "main", tmp_path) == (tmp_path / "snapshots" / "0123abcd", "0123abcd")
    (call,) = asked
    assert (call["repository"], call["revision"], call["cache_dir"]) == ("org/name", "main", tmp_path)


def test_only_files_that_a_conversion_reads_are_fetched(asked, tmp_path):
    snapshot("org/name", None, tmp_path)
    (call,) = asked

    def wanted(name: str) -> bool:
        allowed = any(fnmatch(name, pattern) for pattern in call["allow_patterns"])
        return allowed and not any(fnmatch(name, pattern) for pattern in call["ignore_patterns"])

    taken = ["model.safetensors", "model-00001-of-00009.safetensors", "model.safetensors.index.json"]
    beside = ["config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"]
    beside += ["generation_config.json", "chat_template.jinja", "LICENSE", "LICENSE.txt", "NOTICE", "USE_POLICY.md"]
    assert all(map(wanted, taken + beside))
    assert all(map(is_side_file, beside))
    left = ["pytorch_model.bin", "modeling_x.py", "original/consolidated.00.pth", "onnx/model.onnx", "README.md"]
    left += ["consolidated.safetensors", "fp16/model.safetensors", "tokenizer/tokenizer.json", "rust_model.ot"]
    assert not any(map(wanted, left))


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("no route\nand more"),
        TimeoutError(),
        LocalEntryNotFoundError("not in the cache"),
        HfHubHTTPError.__mro__[1]("some HTTP error"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_cannot_be_reached_is_one_sentence(monkeypatch, tmp_path, error):
    def fail(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(SourceUnavailable, match=r"^org/name could not be fetched from the hub: \w") as caught:
        snapshot("org/name", None, tmp_path)
    assert "\n" not in caught.value.message


def test_offline_for_real(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SourceUnavailable, match="org/name"):
        snapshot("org/name", None, tmp_path)


@pytest.mark.parametrize(
    ("repository", "revision"),
    [
        ("name", None),
        ("../x/y", None),
        ("org/../x", None),
        ("org/name/more", None),
        ("org/.name", None),
        ("https://host/org/name", None),
        ("org/name", "../main"),
        ("org/name", "-x"),
        ("org/name", "a b"),
        ("org/na me", None),
    ],
)
def test_malformed_names_never_reach_the_client(asked, tmp_path, repository, revision):
    with pytest.raises(CheckpointError, match="is not a repository"):
        snapshot(repository, revision, tmp_path)
    assert asked == []
    assert isinstance(tmp_path, Path)
