import filecmp
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxpar.config import ConfigError
from jaxpar.data import prepare as prepare_module
from jaxpar.data import shard_job
from jaxpar.data.prepare import Request, prepare
from jaxpar.data.split import document_scores
from jaxpar.data.store import StoreError, damaged_parts, open_shards, read_manifest, token_dtype
from jaxpar.data.workers import WorkerDied, run_jobs
from tests.data_pipeline.jobs import Counts, die, square
from tests.data_pipeline.test_tokenizers import save_bpe

TEXTS = [f"the cat {i} sat on the mat " * (i % 13) + f"é{i}" for i in range(900)]


@pytest.fixture(autouse=True)
def corpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:700]))
    Path("b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[700:]))
    save_bpe("tokenizer.json", ["<|endoftext|>"])


def request(out, **fields):
    return Request(**{"patterns": ("*.jsonl",), "out": Path(out), "shard_bytes": 2**14} | fields)


def made(out, workers=1, **fields):
    counts = Counts()
    manifest = prepare(request(out, **fields), num_workers=workers, progress=counts)
    return manifest, counts


def files_of(store):
    return sorted(path.name for path in Path(store).iterdir())


def assert_same(one, other):
    assert files_of(one) == files_of(other)
    assert filecmp.cmpfiles(one, other, files_of(one), shallow=False)[0] == files_of(one)


def test_a_store_holds_the_tokens_of_every_document():
    manifest, counts = made("store", tokenizer="tokenizer.json")
    tokenizer = prepare_module.load_tokenizer("tokenizer.json")
    documents = [[*tokenizer.encode(text), tokenizer.eod_id] for text in TEXTS]
    shards = open_shards("store", manifest)
    found = [
        shard.tokens[start:end].tolist()
        for shard in shards
        for start, end in zip([0, *shard.ends[:-1]], shard.ends, strict=True)
    ]
    assert found == documents
    assert np.array_equal(np.concatenate([shard.scores for shard in shards]), document_scores(TEXTS))
    assert len(shards) == len(manifest.shards) > 10
    assert all(isinstance(shard.tokens, np.memmap) for shard in shards)
    assert manifest == read_manifest("store")
    assert (manifest.num_documents, manifest.num_tokens) == (900, sum(map(len, documents)))
    assert (manifest.dtype, manifest.tokenizer["vocab_size"]) == ("uint16", tokenizer.vocab_size)
    assert manifest.tokenizer["fingerprint"] == tokenizer.fingerprint
    assert (counts.done, counts.total) == (2 * (sum(p.stat().st_size for p in Path().glob("*.jsonl")),))[:2]
    assert (counts.documents, counts.tokens) == (900, manifest.num_tokens)
    assert not list(damaged_parts("store", manifest))
    expected = [f"{kind}-{i:05}" for kind in ("documents", "tokens") for i in range(len(shards))]
    assert [Path(name).stem for name in files_of("store")] == sorted([*expected, "manifest", "sources"])


def test_the_store_does_not_depend_on_the_number_of_workers():
    made("one", tokenizer="tokenizer.json")
    _, counts = made("three", workers=3, tokenizer="tokenizer.json")
    assert_same("one", "three")
    assert counts.done == counts.total
    assert counts.tokens == read_manifest("one").num_tokens


def test_small_files_share_a_shard():
    for i in range(300):
        Path(f"{i:03}.txt").write_text(f"file {i}")
    manifest, _ = made("store", patterns=("*.txt",), shard_bytes=1000)
    assert manifest.num_documents == 300
    assert len(manifest.shards) == 3
    assert manifest.sources["num_files"] == 300
    first = json.loads(Path("store/sources.jsonl").read_text().splitlines()[0])
    assert first == {"path": "000.txt", "bytes": 6}


def test_ids_of_a_large_vocabulary_take_four_bytes():
    assert [token_dtype(size) for size in (257, 2**16, 2**16 + 1)] == ["uint16", "uint16", "uint32"]


KILLED = """if True:
    import sys
    from pathlib import Path
    from jaxpar.data.prepare import Request, prepare
    from tests.data_pipeline.jobs import Counts
    if __name__ == "__main__":
        request = Request(patterns=("*.jsonl",), out=Path("store"), shard_bytes=2**12, tokenizer="tokenizer.json")
        prepare(request, num_workers=int(sys.argv[1]), progress=Counts())
"""


def test_killed_in_the_middle_it_goes_on_and_the_store_is_the_same():
    made("whole", shard_bytes=2**12, tokenizer="tokenizer.json")
    # Enough work that the kill comes long before the end, whatever the machine does.
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen([sys.executable, "-c", KILLED, "2"], env=environment)
    progress = Path("store.partial/.progress")
    deadline = time.monotonic() + 120
    while len(list(progress.glob("0*.json"))) < 3:
        assert process.poll() is None
        assert time.monotonic() < deadline
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = sorted(path.stem for path in progress.glob("0*.json"))
    assert 3 <= len(done) < len(read_manifest("whole").shards)
    with pytest.raises(ConfigError, match=r"(?s)store.*unfinished: repeat"):
        read_manifest("store")
    # The second finished shard is damaged meanwhile, and a half-written file lies about.
    damaged = Path(f"store.partial/tokens-{done[1]}.bin")
    damaged.write_bytes(damaged.read_bytes()[:-2] + b"??")
    Path("store.partial/tokens-00099.bin.1.tmp").write_bytes(b"half")
    kept_file = Path(f"store.partial/tokens-{done[0]}.bin")
    written = kept_file.stat().st_mtime_ns
    manifest, counts = made("store", workers=2, shard_bytes=2**12, tokenizer="tokenizer.json")
    assert_same("whole", "store")
    assert Path("store", kept_file.name).stat().st_mtime_ns == written
    # A worker may have finished one more shard in the moment of the kill.
    assert len(done) - 1 <= sum(counts.kept) <= len(done) + 1
    assert (counts.done, counts.tokens) == (counts.total, manifest.num_tokens)
    assert not Path("store.partial").exists()


def interrupted(monkeypatch, after):
    """Ends the work, as a full disk would, after some shards."""
    write = shard_job._write_shard

    def fail(job, report):
        if job.number == after:
            raise OSError(28, "No space left on device")
        return write(job, report)

    with monkeypatch.context() as patch:
        patch.setattr(shard_job, "_write_shard", fail)
        with pytest.raises(StoreError, match=r"No space left.*kept in store.partial: the same command goes on"):
            made("store")


def test_other_input_does_not_go_on_in_the_same_place(monkeypatch):
    interrupted(monkeypatch, 2)
    for fields, what in (
        ({"tokenizer": "tokenizer.json"}, "tokenizer"),
        ({"field": "body"}, "field"),
        ({"shard_bytes": 999}, "shard_bytes"),
        ({"patterns": ("a.jsonl",)}, "files, b.jsonl"),
    ):
        with pytest.raises(ConfigError, match=rf"begun from other input; changed: {what}"):
            made("store", **fields)
    Path("b.jsonl").write_text('{"text": "changed"}\n')
    with pytest.raises(ConfigError, match=r"changed: files, b.jsonl"):
        made("store")


def test_an_end_just_before_the_store_gets_its_name_is_made_good(monkeypatch):
    made("whole")

    def fail(self, target):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        with pytest.raises(StoreError, match="the same command goes on"):
            made("store")
    assert not Path("store").exists()
    _, counts = made("store")
    assert all(counts.kept)
    assert_same("whole", "store")


def test_nothing_is_overwritten():
    Path("store").mkdir()
    with pytest.raises(ConfigError, match="never overwritten"):
        made("store")
    assert not list(Path("store").iterdir())


def test_two_processes_do_not_write_one_store(monkeypatch):
    interrupted(monkeypatch, 1)
    with (
        prepare_module._locked(Path("store.partial")),
        pytest.raises(ConfigError, match="another process is writing it"),
    ):
        made("store")


def test_documents_without_text_make_no_store():
    Path("a.jsonl").write_text('{"text": ""}\n' * 3)
    Path("b.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"no document has text \(3 empty\)"):
        made("store")


def test_a_bad_record_ends_every_worker_and_is_named():
    with Path("b.jsonl").open("a") as file:
        file.write("oops\n")
    with pytest.raises(ConfigError, match=r"b.jsonl:201: not JSON"):
        made("store", workers=2)
    manifest, _ = made("other", skip_invalid=True)
    assert manifest.skipped == {"invalid": 1}


@pytest.mark.parametrize("name", ["tokens-00002.bin", "documents-00001.npy", "sources.jsonl"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_every_damage_is_found_and_named(name, damage):
    made("store", shard_bytes=2**16)
    path = Path("store", name)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes({"flip": content, "cut": content[:-2], "remove": b""}[damage])
    if damage == "remove":
        path.unlink()
    manifest = read_manifest("store")
    assert [problem.partition(":")[0] for problem in damaged_parts("store", manifest)] == [name]
    if damage != "flip" and name != "sources.jsonl":
        with pytest.raises(StoreError, match=name.partition("-")[2].partition(".")[0]):
            open_shards("store", manifest)


def test_a_damaged_manifest_is_said_to_be():
    made("store")
    path = Path("store/manifest.json")
    fields = json.loads(path.read_text())
    for change, message in (
        ({"num_tokens": 1}, "num_tokens is 1"),
        ({"content": "0"}, "content is 0"),
        ({"colour": "red"}, "damaged"),
    ):
        path.write_text(json.dumps(fields | change))
        with pytest.raises(StoreError, match=message):
            read_manifest("store")
    path.write_text("{")
    with pytest.raises(StoreError, match="damaged"):
        read_manifest("store")
    for change, message in (({"version": 2}, "format version 2"), ({"format": "x"}, "not the manifest")):
        path.write_text(json.dumps(fields | change))
        with pytest.raises(ConfigError, match=message):
            read_manifest("store")
    with pytest.raises(ConfigError, match="not a token store"):
        read_manifest("elsewhere")


def test_a_worker_that_is_killed_is_an_error_and_not_a_wait():
    with pytest.raises(WorkerDied, match=r"ended by itself \(SIGKILL\)"):
        list(run_jobs(die, range(6), num_workers=2, report=lambda _: None))


@pytest.mark.parametrize(("num_jobs", "workers"), [(0, 2), (1, 2), (7, 1), (7, 2)])
def test_every_job_is_run_once(num_jobs, workers):
    reports = []
    results = dict(run_jobs(square, range(num_jobs), num_workers=workers, report=reports.append))
    assert results == {i: i**2 for i in range(num_jobs)}
    assert sorted(reports) == sorted(-i for i in range(num_jobs))


ORPHANS = """if True:
    import os, time
    from jaxpar.data.workers import run_jobs
    from tests.data_pipeline.jobs import pid_and_sleep
    if __name__ == "__main__":
        for _ in run_jobs(pid_and_sleep, range(2), num_workers=2, report=lambda pid: print(pid, flush=True)):
            pass
"""


def has_ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_workers_end_with_a_parent_that_is_killed():
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen([sys.executable, "-c", ORPHANS], env=environment, stdout=subprocess.PIPE, text=True)
    with process:
        workers = [int(process.stdout.readline()) for _ in range(2)]
        assert not any(has_ended(pid) for pid in workers)
        process.kill()
        process.wait()
        deadline = time.monotonic() + 30
        while not all(has_ended(pid) for pid in workers):
            assert time.monotonic() < deadline
            time.sleep(0.02)
