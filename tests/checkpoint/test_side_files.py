"""Files beside the weights are carried along, and nothing is written over."""

import os

import pytest

from jaxpar.checkpoint.errors import CheckpointError
from jaxpar.checkpoint.side_files import copy_side_files, side_files

CARRIED = ["LICENSE.txt", "added_tokens.json", "chat_template.jinja", "generation_config.json", "merges.txt"]
CARRIED += ["special_tokens_map.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json"]
LEFT = ["config.json", "model.safetensors", "pytorch_model.bin", "README.md", "optimizer.pt"]


@pytest.fixture
def source(tmp_path):
    directory = tmp_path / "source"
    (directory / "vocab.d").mkdir(parents=True)
    (tmp_path / "blob").write_text("linked")
    for name in CARRIED + LEFT:
        (directory / name).write_text(name)
    (directory / "vocab.json").unlink()
    (directory / "vocab.json").symlink_to(tmp_path / "blob")
    return directory


def test_side_files_are_copied_and_no_others(source, tmp_path):
    target = tmp_path / "new" / "target"
    assert copy_side_files(source, target) == CARRIED
    assert sorted(os.listdir(target)) == CARRIED
    assert (target / "vocab.json").read_text() == "linked"
    assert not (target / "vocab.json").is_symlink()
    assert (target / "merges.txt").read_text() == "merges.txt"
    assert copy_side_files(source, target) == CARRIED, "again, after everything is there"
    assert list(side_files(tmp_path / "absent")) == []


def test_files_that_are_there_are_kept_and_all_named(source, tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    for name in ("tokenizer.json", "merges.txt"):
        (target / name).write_text("own")
    with pytest.raises(CheckpointError, match=r"has its own merges.txt, tokenizer.json, other than those of"):
        copy_side_files(source, target)
    assert sorted(os.listdir(target)) == ["merges.txt", "tokenizer.json"]
    assert (target / "tokenizer.json").read_text() == "own"
