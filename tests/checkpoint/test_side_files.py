"""What lies beside the weights is parsed, renamed and checked; what has no part in the model stays behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve.checkpoint.gguf import GGUFFile
from jaxserve.checkpoint.safetensors import SafetensorsFolder
from jaxserve.checkpoint.side_files import SideFiles, is_licence, is_side_file, write_side_files
from jaxserve.errors import CheckpointError
from jaxserve.text.tokenizer import Tokenizer


@pytest.fixture
def write(tmp_path):
    """Writes the side files of a source into ``content``."""

    def write(source: GGUFFile | SafetensorsFolder) -> tuple[Path, SideFiles]:
        for name in ("content", "scratch"):
            (tmp_path / name).mkdir()
        return tmp_path / "content", write_side_files(
            source,
            source.hf_config(),
            source.hf_config()["vocab_size"],
            tmp_path / "content",
            tmp_path / "scratch",
        )

    return write


def change(folder: Path, name: str, **fields: object) -> None:
    path = folder / name
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(old | fields))


def test_a_folders_files(write, folder):
    (folder / "modeling.py").write_text("raise SystemExit")
    (folder / "README.md").write_text("# A model")
    content, found = write(SafetensorsFolder(folder))
    assert found == SideFiles(
        tokenizer=("tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"),
        chat_template="chat_template.jinja",
        generation_config="generation_config.json",
        licence=None,
    )
    names = {path.name for path in content.iterdir()}
    assert names == {"config.json", "tokenizer", "chat_template.jinja", "generation_config.json", "LICENSE"}
    assert (content / "chat_template.jinja").read_text() == "{{ messages }}"
    assert json.loads((content / "generation_config.json").read_text()) == {"eos_token_id": [0, 3], "temperature": 0.7}
    assert (content / "LICENSE").read_text() == "as you like it"


def test_a_gguf_files_metadata(write, forms):
    content, found = write(GGUFFile(forms["gguf"]))
    assert found.licence == "mit"
    assert (content / "chat_template.jinja").read_text() == "{{ messages }}"
    assert json.loads((content / "generation_config.json").read_text()) == {"bos_token_id": 0, "eos_token_id": 0}


def test_both_give_the_same_tokenizer(write, forms, tmp_path, tiny):
    text = "the quick brown ½ box\n" * 3
    ids = tiny.tokenizer.encode(text, add_special_tokens=False).ids
    content, _ = write(GGUFFile(forms["gguf"]))
    from_gguf = Tokenizer.load(content / "tokenizer")
    assert from_gguf.encode(text, add_special=False) == ids
    content.rename(tmp_path / "first")
    (tmp_path / "scratch").rmdir()
    content, _ = write(SafetensorsFolder(forms["folder"]))
    from_folder = Tokenizer.load(content / "tokenizer")
    assert from_folder.encode(text, add_special=False) == ids
    assert from_folder.eos_ids[0] == from_gguf.eos_ids[0] == 0


def test_code_and_paths_stay_out_of_the_configuration(write, folder):
    change(folder, "config.json", auto_map={"AutoModel": "evil.Model"}, _name_or_path="somewhere")
    content, _ = write(SafetensorsFolder(folder))
    config = json.loads((content / "config.json").read_text())
    assert not {"auto_map", "_name_or_path"} & config.keys()
    assert config["hidden_size"] == 64


def test_a_tokenizer_larger_than_the_embedding_is_refused(write, folder):
    change(folder, "config.json", vocab_size=200)
    with pytest.raises(CheckpointError, match=r"The tokenizer has \d+ tokens, the model's embedding 200 rows"):
        write(SafetensorsFolder(folder))


def test_tokens_without_an_embedding_are_left_out(write, folder):
    """A text model's vocabulary may end in words for what it cannot see."""
    definition = json.loads((folder / "tokenizer.json").read_text())
    rows = len(definition["model"]["vocab"])
    image = {"id": rows, "content": "<image>", "special": True, "normalized": False}
    image |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    (folder / "tokenizer.json").write_text(json.dumps(definition | {"added_tokens": [image]}))
    change(folder, "config.json", vocab_size=rows)
    assert Tokenizer.load(folder).encode("<image>", parse_special=True) == [rows]
    content, _ = write(SafetensorsFolder(folder))
    written = Tokenizer.load(content / "tokenizer")
    assert written.vocab_size == rows
    assert max(written.encode("<image>", parse_special=True)) < rows


def test_a_template_that_writes_a_token_without_an_embedding_is_refused(write, folder):
    definition = json.loads((folder / "tokenizer.json").read_text())
    rows = len(definition["model"]["vocab"])
    change(folder, "tokenizer_config.json", added_tokens_decoder={str(rows): {"content": "<turn>", "special": True}})
    change(folder, "config.json", vocab_size=rows)
    (folder / "chat_template.jinja").write_text("<turn>{{ messages }}")
    with pytest.raises(CheckpointError, match="template writes '<turn>'"):
        write(SafetensorsFolder(folder))


@pytest.mark.parametrize("text", ["", "{}", "garbage", '{"model": {"type": "BPE"}}'])
def test_a_broken_tokenizer_is_refused(write, folder, text):
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match="tokenizer"):
        write(SafetensorsFolder(folder))


@pytest.mark.parametrize("data", [b"", b"garbage", bytes(1000)])
def test_a_broken_sentencepiece_model_is_refused(write, folder, data):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(data)
    with pytest.raises(CheckpointError, match="tokenizer"):
        write(SafetensorsFolder(folder))


def test_an_absent_tokenizer_is_named(write, folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        write(SafetensorsFolder(folder))


def test_links_to_secrets_are_not_taken_over(write, folder, tmp_path):
    (tmp_path / "secret").write_text("the secret")
    (folder / "LICENSE").unlink()
    (folder / "LICENSE").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="LICENSE is a symbolic link"):
        write(SafetensorsFolder(folder))
    (folder / "LICENSE").unlink()
    (folder / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    (folder / "tokenizer.json").symlink_to(tmp_path / "tokenizer.json")
    for name in ("content", "scratch"):
        (tmp_path / name).rename(tmp_path / f"old {name}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is a symbolic link"):
        write(SafetensorsFolder(folder))


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ([{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}], "b"),
        ([{"name": "tool_use", "template": "a"}], None),
        ([7], None),
        (None, None),
        ("c", "c"),
    ],
)
def test_templates_of_older_files(write, folder, field, expected):
    change(folder, "tokenizer_config.json", chat_template=field)
    content, found = write(SafetensorsFolder(folder))
    assert found.chat_template == ("chat_template.jinja" if expected else None)
    assert expected is None or (content / "chat_template.jinja").read_text() == expected


def test_a_templates_own_file_wins(write, folder):
    (folder / "chat_template.jinja").write_text("own ½")
    content, _ = write(SafetensorsFolder(folder))
    assert (content / "chat_template.jinja").read_text() == "own ½"


def test_a_template_that_is_no_text_is_refused(write, folder):
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja is not UTF-8"):
        write(SafetensorsFolder(folder))


def test_without_defaults_there_is_no_file_of_defaults(write, folder):
    (folder / "generation_config.json").unlink()
    content, found = write(SafetensorsFolder(folder))
    assert found.generation_config is None
    assert not (content / "generation_config.json").exists()


def test_which_files_count():
    licences = ["LICENSE", "LICENCE.txt", "NOTICE.md", "USE_POLICY.md", "license.html", "COPYING", "Terms.txt"]
    assert all(is_licence(name) and is_side_file(name) for name in licences)
    assert all(is_side_file(name) for name in ("config.json", "tokenizer.model", "chat_template.jinja"))
    assert not any(is_side_file(name) for name in ("README.md", "modeling.py", "license.py", "training_args.bin", "x"))
