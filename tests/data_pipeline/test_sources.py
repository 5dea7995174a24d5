import ast
import os
import sysconfig
from pathlib import Path

import pytest

from jaxpar.config import ConfigError
from jaxpar.data.sources import find_files, read_documents


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b.txt", "a.txt", "deep/er/c.txt", "deep/d.md"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(f"text of {name}")
    return tmp_path


def names(patterns):
    return [path.as_posix() for path in find_files(patterns)]


def test_files_are_sorted_within_a_pattern_and_found_at_any_depth(corpus):
    assert names(["**/*.txt"]) == ["a.txt", "b.txt", "deep/er/c.txt"]
    assert names(["deep/**/*.*", "a.txt"]) == ["deep/d.md", "deep/er/c.txt", "a.txt"]


def test_a_file_that_several_patterns_or_links_match_is_one_document(corpus):
    os.symlink("a.txt", "link.txt")
    assert names(["a.txt", "./*.txt", str(corpus / "a.txt")]) == ["a.txt", "b.txt"]


def test_stdlib_is_the_standard_library_without_packages_and_tests():
    files = find_files(["stdlib:**/*.py"])
    root = Path(sysconfig.get_path("stdlib"))
    relative = [path.relative_to(root) for path in files]
    assert Path("ast.py") in relative
    assert Path("json/decoder.py") in relative
    assert (root / "ast.py").read_text() == Path(ast.__file__).read_text()
    excluded = {"site-packages", "dist-packages", "test", "tests"}
    assert not [path for path in relative if excluded & set(path.parts)]
    assert len(find_files(["stdlib:*.py"])) < len(files)


def test_no_match_names_each_pattern_and_the_working_directory(corpus):
    with pytest.raises(ConfigError) as caught:
        find_files(["*.txt", "*.none", "gone/*.txt"])
    assert [problem.value for problem in caught.value.problems] == ["*.none", "gone/*.txt"]
    assert all(problem.key == "data.paths" for problem in caught.value.problems)
    assert str(corpus) in str(caught.value)


def test_a_stdlib_pattern_without_match_names_the_directory():
    with pytest.raises(ConfigError) as caught:
        find_files(["stdlib:*.none"])
    assert sysconfig.get_path("stdlib") in str(caught.value)


def test_a_directory_is_answered_with_the_pattern_to_write(corpus):
    with pytest.raises(ConfigError, match=r'"deep/\*\*/\*\.txt"'):
        find_files(["deep/"])


def test_no_pattern_is_refused():
    with pytest.raises(ConfigError, match="no files are named"):
        find_files([])


def test_files_that_are_not_utf8_or_empty_are_skipped_and_counted(corpus):
    Path("latin.txt").write_bytes(b"caf\xe9")
    Path("nothing.txt").touch()
    texts, notes = read_documents(find_files(["*.txt"]))
    assert texts == ["text of a.txt", "text of b.txt"]
    assert len(notes) == 2
    assert "1 of 4 files skipped because they are not UTF-8: latin.txt" in notes
    assert "1 of 4 files skipped because they are empty: nothing.txt" in notes


def test_line_ends_are_kept(corpus):
    Path("dos.txt").write_bytes(b"a\r\nb\n")
    assert read_documents([Path("dos.txt")]) == (["a\r\nb\n"], [])


def test_nothing_readable_is_an_error_that_says_why(corpus):
    Path("latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match="no file has text: 1 of 1 files skipped because they are not UTF-8"):
        read_documents([Path("latin.txt")])


def test_a_file_that_cannot_be_read_is_named(corpus):
    with pytest.raises(ConfigError, match=r"data.paths = 'gone.txt'"):
        read_documents([Path("gone.txt")])
