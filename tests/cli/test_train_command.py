"""``jaxpar train`` as its user sees it: exit codes, messages, what it prints and what it suggests."""

import json
import shlex
from pathlib import Path

import pytest

from jaxpar.checkpoint.errors import CheckpointError
from jaxpar.config import load_config
from jaxpar.config.overrides import split_path
from jaxpar.data.order import GlobalOrder
from jaxpar.loop import Outcome, RunFailed
from jaxpar.plan.resolve import check
from jaxpar.runtime.arrival import StartError
from jaxpar.runtime.interrupt import StopReason
from jaxpar.runtime.lock import RunLock
from jaxpar.trainer import Trainer
from tests.cli.command import finish, start
from tests.trainer.runs import BATCH, ROWS, STEPS, column, poison, rows_of

BAD_INPUT = {
    "file": (["nope.toml"], "nope.toml", "tiny.toml"),
    "key": (["tiny.toml", "mesh.tensr=2"], "mesh.tensr", "did you mean mesh.tensor?"),
    "type": (["tiny.toml", "train.steps=many"], "train.steps", "integer"),
    "override": (["tiny.toml", "mesh.fsdp"], "mesh.fsdp", "SECTION.KEY=VALUE"),
    "mesh product": (["tiny.toml", "mesh.data=4"], "= 16 devices, but there are 8", "runtime.cpu_devices=16"),
    "kv heads": (
        ["tiny.toml", "mesh.data=1", "mesh.fsdp=1", "mesh.tensor=8"],
        "model.num_kv_heads = 4",
        "allowed {1, 2, 4}",
    ),
    "batch": (["tiny.toml", "train.global_batch_size=10"], "train.global_batch_size = 10", "8 (128 tokens a step)"),
    "rows": (["tiny.toml", "data.num_samples=3"], "3 < 8", 'data.last_batch="pad"'),
    "tokenizer": (
        ["tiny.toml", "data.source=text", 'data.paths=["*.toml"]', "data.tokenizer=none.json"],
        "data.tokenizer = 'none.json'",
        "tokenizer.json",
    ),
    "weights": (["tiny.toml", "model.init_from=hf:nowhere"], "model.init_from = 'hf:nowhere'", "config.json"),
    "resume": (["tiny.toml", "checkpoint.resume=nowhere"], "checkpoint.resume = 'nowhere'", "auto, never, must"),
    "not yet": (
        ["tiny.toml", "mesh.pipeline=2", "model.first_dense_layers=1", "mesh.data=1", "mesh.fsdp=2"],
        "not yet",
        "set mesh.pipeline=1",
    ),
    "no model": ([], "model.", "model.preset"),
}


@pytest.mark.parametrize(("arguments", "problem", "remedy"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_is_told_in_words_and_exits_2(jaxpar, tmp_path, arguments, problem, remedy):
    result = jaxpar("train", *arguments)
    assert result.code == 2
    assert result.err.startswith("error: ")
    assert problem in result.err
    assert remedy in result.err
    assert "Traceback" not in result.err
    assert result.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.toml"]


def test_text_that_no_file_matches_is_bad_input(jaxpar):
    result = jaxpar("train", "tiny.toml", "data.source=text", 'data.paths=["none/*.txt"]', "model.vocab_size=0")
    assert result.code == 2
    assert "none/*.txt" in result.err


@pytest.mark.parametrize("arguments", [["trian"], ["train", "--shrading"], []], ids=str)
def test_a_wrong_command_line_exits_2(jaxpar, arguments):
    assert jaxpar(*arguments).code == 2


def test_a_run_directory_in_use_exits_2_and_names_the_user(jaxpar, tmp_path):
    (tmp_path / "run").mkdir()
    with RunLock(tmp_path / "run"):
        result = jaxpar("train", "tiny.toml")
    assert result.code == 2
    assert "error: run.dir" in result.err
    assert "another run is using it: process" in result.err
    assert "choose another run.dir" in result.err
    assert not (tmp_path / "run" / "config.toml").exists()


def test_a_loss_that_is_not_finite_exits_1_and_names_step_and_checkpoint(jaxpar, tmp_path, monkeypatch):
    second_batch = GlobalOrder(ROWS, seed=0, shuffle=True).rows(0, BATCH, 2 * BATCH)
    poison(monkeypatch, {second_batch[0]})
    result = jaxpar("train", "tiny.toml", "checkpoint.every=1")
    assert result.code == 1
    last_line = result.err.splitlines()[-1]
    assert last_line.startswith("error: step 2: loss inf")
    assert f"the newest checkpoint is step 1 in {tmp_path / 'run' / 'checkpoints'}" in last_line
    assert "Traceback" not in result.err
    assert column(rows_of(tmp_path / "run" / "metrics.jsonl"), "step") == [1, 2]


@pytest.mark.parametrize("error", [RunFailed, StartError, CheckpointError])
def test_failures_with_a_message_for_the_user_exit_1_without_a_traceback(jaxpar, monkeypatch, error):
    def fail(self):
        raise error("the network is gone")

    monkeypatch.setattr(Trainer, "run", fail)
    result = jaxpar("train", "tiny.toml")
    assert (result.code, result.err) == (1, "error: the network is gone\n")


def test_a_bug_is_not_hidden(jaxpar, monkeypatch):
    def fail(self):
        raise ZeroDivisionError

    monkeypatch.setattr(Trainer, "run", fail)
    with pytest.raises(ZeroDivisionError):
        jaxpar("train", "tiny.toml")


def test_json_is_the_only_thing_on_standard_output(jaxpar, tmp_path):
    result = jaxpar("train", "tiny.toml", "train.stop_at=2", "--json")
    assert result.code == 0
    outcome = json.loads(result.out)
    last = rows_of(tmp_path / "run" / "metrics.jsonl")[-1]
    seconds = outcome.pop("seconds")
    assert seconds["total_s"] > last["step_s"]
    assert outcome == {
        "reason": "none",
        "step": 2,
        "loss": last["loss"],
        "eval_loss": None,
        "checkpoint": str(tmp_path / "run" / "checkpoints" / "2"),
        "run_dir": str(tmp_path / "run"),
    }
    assert "step 2/2" in result.err


def test_a_run_ends_with_where_things_are_and_commands_that_work(jaxpar, tmp_path):
    """With a directory that needs quotes, and an override that a suggestion has to replace."""
    (tmp_path / "tiny.toml").rename("my tiny.toml")
    given = ["my tiny.toml", "run.dir=my run"]
    result = jaxpar("train", *given, "train.stop_at=1")
    assert result.code == 0
    assert "my run/metrics.jsonl" in result.err
    assert "my run/checkpoints/1" in result.err
    # All devices on fsdp would not divide four rows of a microbatch: that mesh is not suggested.
    further, sharding = suggestions(result.err)
    assert load(further) == load([*given, "train.stop_at=none"])
    assert sharding == [*given, "train.stop_at=1", "--sharding"]

    result = jaxpar("train", *given, "train.stop_at=1")
    assert "done at step 1\n" in result.err
    assert column(rows_of(tmp_path / "my run" / "metrics.jsonl"), "step") == [1]


def test_what_is_suggested_after_the_last_step_is_legal(jaxpar, monkeypatch):
    done = Outcome(reason=StopReason.NONE, step=STEPS, loss=3.0, eval_loss=None, checkpoint=None, run_dir=Path("run"))
    monkeypatch.setattr(Trainer, "run", lambda self: done)
    given = ["tiny.toml", f"train.steps={STEPS}", "train.microbatches=1", "mesh.data=2"]
    result = jaxpar("train", *given)
    assert f"done at step {STEPS}: training loss 3.0000" in result.err
    assert "none was written" in result.err
    longer, other_mesh, _ = suggestions(result.err)
    assert load(longer).train.steps == 2 * STEPS
    assert (load(other_mesh).mesh.data, load(other_mesh).mesh.fsdp) == (1, -1)
    assert load(other_mesh).run.dir != load(given).run.dir
    for arguments in (longer, other_mesh):
        check(load(arguments))


def suggestions(err: str) -> list[list[str]]:
    """Arguments of the ``jaxpar train`` commands that a run ends with."""
    commands = [shlex.split(line, comments=True) for line in err.partition("next:\n")[2].splitlines()]
    assert all(command[:2] == ["jaxpar", "train"] for command in commands)
    return [command[2:] for command in commands]


def load(arguments: list[str]):
    return load_config(*split_path(arguments))


def test_sharding_prints_every_array_and_trains_nothing(jaxpar, tmp_path):
    result = jaxpar("train", "tiny.toml", "--sharding")
    assert result.code == 0
    assert "params.embedding" in result.out
    assert "bytes of training state per device" in result.out
    assert "no axis shards" in result.out
    assert not (tmp_path / "run").exists()


def test_sharding_as_json_adds_up(jaxpar):
    report = json.loads(jaxpar("train", "tiny.toml", "--sharding", "--json").out)
    assert report["mesh"] == {"pipeline": 1, "data": 2, "fsdp": 2, "expert": 1, "context": 1, "tensor": 2}
    assert sum(leaf["bytes_per_device"] for leaf in report["leaves"]) == report["bytes_per_device"]
    embedding = next(leaf for leaf in report["leaves"] if leaf["path"] == "params.embedding")
    assert embedding["shape"] == [152, 32]
    assert embedding["bytes_per_device"] == 152 * 32 * 4 // (2 * 2)  # over fsdp and tensor
    assert embedding["num_copies"] == 2  # over data
    assert 0 < report["unsharded_share"] < 0.1


def test_help_is_enough_to_start(jaxpar):
    general = jaxpar("--help")
    assert general.code == 0
    assert all(word in general.out for word in ("train", "config", "Exit codes"))
    text = " ".join(jaxpar("train", "--help").out.split())
    for fact in (
        "jaxpar train configs/quickstart.toml",
        "KEY=VALUE",
        "--sharding",
        "--json",
        "metrics.jsonl",
        "checkpoints/",
        "jaxpar config --reference",
        "runtime.coordinator=HOST:PORT",
        "0 done, 1 failed, 2 bad input, 75 preempted (SIGTERM) and saved, 130 interrupted",
    ):
        assert fact in text


def test_bad_input_does_not_wait_for_jax(tmp_path):
    """Importing JAX takes seconds; a typo, a rule of the mesh, and help are answered before."""
    program = (
        "import sys; from jaxpar.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as leaving: print('jax' in sys.modules, leaving.code)"
    )
    model = ["model.preset=tiny-bytes", "runtime.cpu_devices=8"]
    cases = {
        ("train", *model, "mesh.fsdq=8"): "False 2",
        ("train", *model, "mesh.fsdp=4"): "False 2",
        ("train", "--help"): "False 0",
    }
    processes = [start(*arguments, cwd=tmp_path, program=("-c", program)) for arguments in cases]
    results = [finish(process).out.splitlines()[-1] for process in processes]
    assert results == list(cases.values())
