import json
from pathlib import Path

import pytest

from jaxpar.data import shard_job


@pytest.fixture
def corpus(jaxpar):
    """Two hundred records in the command's working directory."""
    Path("a.jsonl").write_text("".join(json.dumps({"text": f"record {i} " * 9}) + "\n" for i in range(200)))
    return jaxpar


def test_prepare_inspect_and_verify(corpus):
    made = corpus("data", "prepare", "a.jsonl", "--out", "tokens", "--workers", "1", "--json")
    assert made.code == 0
    report = json.loads(made.out)
    assert (report["num_documents"], report["num_shards"], report["shards_kept"]) == (200, 1, 0)
    inspected = json.loads(corpus("data", "inspect", "tokens", "--json").out)
    assert inspected["num_tokens"] == report["num_tokens"] == sum(len(f"record {i} " * 9) + 1 for i in range(200))
    assert inspected["tokenizer"]["name"] == "bytes"
    assert inspected["sources"]["patterns"] == ["a.jsonl"]
    said = corpus("data", "inspect", "tokens").out
    assert f"{report['num_tokens']:,} (uint16)" in said
    assert "a.jsonl" in said
    verified = corpus("data", "verify", "tokens")
    assert (verified.code, verified.err) == (0, "")
    assert "every checksum is right" in verified.out


def test_what_is_said_names_the_next_command(corpus):
    Path("b.jsonl").write_text('{"text": ""}\n{"text": "b"}\n')
    made = corpus("data", "prepare", "*.jsonl", "--out", "tokens")
    assert "tokens: " in made.out
    assert "in 201 documents" in made.out
    assert "left out: 1 empty" in made.err
    assert "data.source=store 'data.paths=[\"tokens\"]'" in made.err


def test_verify_names_the_damaged_shard_and_fails(corpus):
    assert corpus("data", "prepare", "a.jsonl", "--out", "tokens").code == 0
    path = Path("tokens/tokens-00000.bin")
    content = bytearray(path.read_bytes())
    content[777] ^= 4
    path.write_bytes(content)
    verified = corpus("data", "verify", "tokens")
    assert verified.code == 1
    assert "damaged: tokens-00000.bin: checksum" in verified.err
    as_json = corpus("data", "verify", "tokens", "--json")
    assert as_json.code == 1
    assert [problem.split(":")[0] for problem in json.loads(as_json.out)["damaged"]] == ["tokens-00000.bin"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("prepare", "none*.jsonl", "--out", "x"), "matches no file"),
        (("prepare", "a.jsonl", "--out", "."), "never overwritten"),
        (("prepare", "a.jsonl", "--out", "x", "--field", "body"), "has no field \"body\", but 'text'"),
        (("prepare", "a.jsonl", "--out", "x", "--tokenizer", "none.json"), "no such file"),
        (("prepare", "a.jsonl", "--out", "x", "--format", "csv"), "'csv' is not one of"),
        (("verify", "none"), "not a token store"),
        (("inspect", "."), "not a token store"),
    ],
)
def test_bad_input_is_told_without_a_traceback(corpus, arguments, message):
    result = corpus("data", *arguments)
    assert result.code == 2
    assert message in result.err
    assert "Traceback" not in result.err


def test_ctrl_c_says_how_to_go_on(corpus, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shard_job, "_write_shard", interrupt)
        result = corpus("data", "prepare", "a.jsonl", "--out", "tokens", "--workers", "1")
    assert result.code == 130
    assert "kept in tokens.partial: the same command goes on" in result.err
    assert corpus("data", "prepare", "a.jsonl", "--out", "tokens").code == 0
