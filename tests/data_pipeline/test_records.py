import bz2
import collections
import gzip
import json
import lzma
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.config import ConfigError
from jaxpar.data.records import Reading, find_parts, read_documents_of

READING = Reading(field="text", skip_invalid=False)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def read(*patterns, file_format="auto", part_bytes=2**20, reading=READING):
    """Texts, what was left out, and the parts."""
    parts = find_parts(patterns, file_format, part_bytes)
    skipped, texts = collections.Counter(), []
    for part in parts:
        texts += [text for text, _ in read_documents_of(part, reading, skipped)]
    return texts, dict(skipped), parts


def jsonl(records):
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


texts = st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20), max_size=10)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("scratch") / "a.jsonl"


@settings(max_examples=80)
@given(texts=texts, part_bytes=st.integers(1, 120), last_newline=st.booleans(), dos=st.booleans())
def test_every_line_belongs_to_exactly_one_part(scratch, texts, part_bytes, last_newline, dos):
    content = jsonl([{"text": text} for text in texts])
    content = content.replace(b"\n", b"\r\n") if dos else content
    scratch.write_bytes(content if last_newline else content.rstrip())
    found, skipped, parts = read(str(scratch), part_bytes=part_bytes)
    assert (found, skipped) == (texts, {})
    if content:
        assert len(parts) >= len(scratch.read_bytes()) // part_bytes
    assert sum(part.num_bytes for part in parts) == len(scratch.read_bytes())


@pytest.mark.parametrize(("suffix", "compress"), [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)])
def test_compressed_jsonl(suffix, compress):
    texts = [f"document {i}" * 50 for i in range(200)]
    Path(f"a.jsonl.{suffix}").write_bytes(compress(jsonl([{"text": text} for text in texts])))
    assert read(f"a.jsonl.{suffix}", part_bytes=10)[0] == texts
    Path(f"a.jsonl.{suffix}").write_bytes(compress(jsonl([{"text": "x" * 10_000}]))[:-6])
    with pytest.raises(ConfigError, match=rf"a.jsonl.{suffix}: cannot be read"):
        read(f"a.jsonl.{suffix}")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (b"{broken", "not JSON"),
        (b"[1]", "must be a JSON object, and this is list"),
        (b'{"body": "x", "id": 1}', "has no field \"text\", but 'body', 'id'"),
        (b'{"text": null}', 'field "text" is not a string, but NoneType'),
        (b'{"text": "caf\xe9"}', "not JSON in UTF-8"),
        (b'{"text": "\\ud800"}', "lone surrogate"),
    ],
)
@pytest.mark.parametrize("part_bytes", [20, 2**20])
def test_a_record_that_cannot_be_read_is_named_by_its_line_or_left_out(record, message, part_bytes):
    lines = [b'{"text": "first"}', b"", record, b'{"text": "last"}']
    Path("a.jsonl").write_bytes(b"\n".join(lines))
    with pytest.raises(ConfigError) as caught:
        read("a.jsonl", part_bytes=part_bytes)
    assert caught.value.problems[0].key == "a.jsonl:3"
    assert message in str(caught.value)
    assert "--skip-invalid" in str(caught.value)
    reading = Reading(field="text", skip_invalid=True)
    assert read("a.jsonl", part_bytes=part_bytes, reading=reading)[:2] == (["first", "last"], {"invalid": 1})


def test_the_line_of_a_compressed_record_is_named():
    Path("a.jsonl.gz").write_bytes(gzip.compress(jsonl([{"text": "x"}] * 6) + b"oops\n"))
    with pytest.raises(ConfigError, match=r"a.jsonl.gz:7: not JSON"):
        read("a.jsonl.gz")


def test_another_field_and_empty_documents():
    Path("a.jsonl").write_bytes(jsonl([{"body": "one", "text": 1}, {"body": ""}, {"body": "two"}]))
    reading = Reading(field="body", skip_invalid=False)
    assert read("a.jsonl", reading=reading)[:2] == (["one", "two"], {"empty": 1})


def test_text_files_are_documents_and_those_without_text_are_counted():
    Path("b.md").write_text("b")
    Path("a.md").write_text("a\r\n", newline="")
    Path("latin.md").write_bytes(b"caf\xe9")
    Path("none.md").touch()
    assert read("*.md")[:2] == (["a\r\n", "b"], {"not UTF-8": 1, "empty": 1})


def test_the_format_goes_by_the_name_or_by_what_is_asked():
    Path("a.jsonl").write_bytes(jsonl([{"text": "x"}]))
    assert read("a.jsonl")[0] == ["x"]
    assert read("a.jsonl", file_format="text")[0] == ['{"text": "x"}\n']
    Path("a.txt").write_bytes(b"x")
    Path("b.jsonl.zst").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"b.jsonl.zst.*compressed"):
        read("b.jsonl.zst")
    with pytest.raises(ConfigError, match=r"data prepare = 'c.\*': matches no file"):
        read("c.*")


FAKE_PARQUET = """
import json, types

class ParquetFile:
    # A list of row groups, each a list of rows.
    def __init__(self, path):
        self._groups = json.load(open(path))
        self.schema_arrow = types.SimpleNamespace(names=sorted(self._groups[0][0]))
        groups = [types.SimpleNamespace(total_byte_size=100 * len(g), num_rows=len(g)) for g in self._groups]
        self.metadata = types.SimpleNamespace(num_row_groups=len(groups), row_group=lambda i: groups[i])

    def iter_batches(self, batch_size, row_groups, columns):
        rows = [row for i in row_groups for row in self._groups[i]]
        (column,) = columns
        for at in range(0, len(rows), batch_size):
            values = [row[column] for row in rows[at : at + batch_size]]
            array = types.SimpleNamespace(to_pylist=lambda values=values: values)
            yield types.SimpleNamespace(column=lambda i, array=array: array)
"""

FAKE_DATASETS = """
import types

class Rows:
    column_names = ["id", "text"]
    data = types.SimpleNamespace(nbytes=7000)

    def __len__(self):
        return 700

    def __getitem__(self, part):
        return {"text": [f"row {i}" for i in range(*part.indices(700))]}

def load_dataset(*name, split):
    if name != ("owner/name", "en") or split != "train":
        raise FileNotFoundError(f"no {name} {split}")
    return Rows()
"""


def install(monkeypatch, name, source):
    """A stand-in for a package: what is tested is our side."""
    *package, module = name.split(".")
    folder = Path("packages", *package)
    folder.mkdir(parents=True, exist_ok=True)
    if package:
        (folder / "__init__.py").touch()
    (folder / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(Path("packages").resolve())
    for imported in (name, *package):
        monkeypatch.delitem(sys.modules, imported, raising=False)


def test_parquet_is_cut_at_row_groups(monkeypatch):
    install(monkeypatch, "pyarrow.parquet", FAKE_PARQUET)
    groups = [[{"text": f"{g} {i}", "id": i} for i in range(3)] for g in range(5)]
    Path("a.parquet").write_text(json.dumps(groups))
    expected = [row["text"] for group in groups for row in group]
    for part_bytes, count in ((1, 5), (500, 3), (2**20, 1)):
        found, _, parts = read("a.parquet", part_bytes=part_bytes)
        assert (found, len(parts)) == (expected, count)
    with pytest.raises(ConfigError, match="has no column \"body\", but 'id', 'text'"):
        read("a.parquet", reading=Reading(field="body", skip_invalid=False))
    groups[1][2]["text"] = None
    Path("a.parquet").write_text(json.dumps(groups))
    with pytest.raises(ConfigError, match=r'a.parquet, row 2 of part 1: "text" is null'):
        read("a.parquet", part_bytes=1)
    found, skipped, _ = read("a.parquet", reading=Reading(field="text", skip_invalid=True))
    assert (len(found), skipped) == (14, {"invalid": 1})


def test_hugging_face_data_sets_are_cut_by_rows(monkeypatch):
    install(monkeypatch, "datasets", FAKE_DATASETS)
    found, _, parts = read("hf:owner/name:en:train", part_bytes=3000)
    assert found == [f"row {i}" for i in range(700)]
    assert len(parts) == 3
    with pytest.raises(ConfigError, match=r"hf:owner/name:train: cannot be loaded"):
        read("hf:owner/name:train")
    with pytest.raises(ConfigError, match="names no data set"):
        read("hf:owner/name")


@pytest.mark.parametrize(
    ("package", "pattern", "extra"), [("pyarrow", "a.parquet", "parquet"), ("datasets", "hf:name:train", "hf")]
)
def test_a_package_that_is_missing_is_an_error_that_names_the_extra(monkeypatch, package, pattern, extra):
    Path("a.parquet").touch()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"needs the package {package}(?s:.*)jaxpar\[{extra}\]"):
        read(pattern)
