"""``jaxpar sweep``: its file, its rows whatever becomes of a trial, and that it goes on where it was stopped."""

import csv
import json
import signal
import time
from pathlib import Path

import pytest

from jaxpar.config import ConfigError, load_config
from jaxpar.experiments import sweep as sweep_module
from jaxpar.experiments import sweep_plots
from jaxpar.experiments.sweep_file import read_sweep
from tests.cli.command import ROOT, Command, ended, finish, start, wait_until
from tests.experiments import light_sweep

BASE = """
[model]
embed_dim = 32
num_layers = 2
num_heads = 4
mlp_dim = 64
vocab_size = 151
[data]
seq_len = 16
num_samples = 64
[train]
steps = 40
eval_every = 20
[mesh]
fsdp = 2
[precision]
compute = "float32"
"""
SWEEP = """
[sweep]
base = "base.toml"
out = "out"
steps = 5
warmup = 2
gpu = "h100"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.toml").write_text(BASE)
    return tmp_path


def write(folder: Path, text: str) -> str:
    (folder / "sweep.toml").write_text(text)
    return str(folder / "sweep.toml")


def rows_of(folder: Path) -> list[dict]:
    with (folder / "out" / "results.csv").open() as file:
        return list(csv.DictReader(file))


def starts(folder: Path) -> list[str]:
    return (folder / "started.txt").read_text().splitlines()


GRID = """
[grid]
mesh = [{fsdp = 2}, {data = 3, fsdp = 2}, {fsdp = 4}]
"train.remat" = ["full", "none"]
[[run]]
name = "by hand"
overrides = ["mesh.fsdp=8", "train.z_loss=1e-4"]
"""


def test_a_file_is_a_list_and_a_grid_over_a_base(folder):
    path = write(folder, SWEEP + 'overrides = ["train.z_loss=0.1", "run.seed=7"]\n' + GRID)
    found = read_sweep(path, fake_devices=True)
    assert [trial.name for trial in found.trials[:3]] == [
        "by hand", "mesh.fsdp=2 train.remat=full", "mesh.fsdp=2 train.remat=none",
    ]  # fmt: skip
    assert len(found.trials) == 7
    by_hand = found.trials[0]
    assert (by_hand.config.train.z_loss, by_hand.config.run.seed) == (1e-4, 7)
    assert by_hand.config.train.steps == 40
    short = by_hand.short
    assert (short.train.steps, short.train.stop_at, short.train.eval_every) == (40, 5, 0)
    assert (short.checkpoint.every, short.checkpoint.final, short.runtime.cpu_devices) == (0, False, 8)
    assert len({trial.fingerprint for trial in found.trials}) == 7
    assert found.gpu.name == "H100 SXM"
    illegal = [trial for trial in found.trials if trial.objection]
    assert [trial.name.split()[0] for trial in illegal] == ["mesh.data=3", "mesh.data=3"]
    assert "8 rows (batch dim 0) do not divide by 6 batch shards" in illegal[0].objection
    on_gpus = read_sweep(path, fake_devices=False)
    assert on_gpus.trials[0].short.runtime.cpu_devices == 0
    rest = read_sweep(write(folder, SWEEP + '[grid]\n"mesh.fsdp" = [-1]\n'), fake_devices=True)
    assert "sweep.devices" in rest.trials[0].objection
    rest = read_sweep(write(folder, SWEEP + 'devices = 4\n[grid]\n"mesh.fsdp" = [-1]\n'), fake_devices=True)
    assert (rest.trials[0].objection, rest.trials[0].num_devices) == (None, 4)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[sweep\n", "sweep.toml:1"),
        ("[grid]\n", "sweep.base"),
        (SWEEP + "stps = 3\n[grid]\n", "sweep.stps"),
        (SWEEP.replace("5", "2") + '[grid]\n"mesh.fsdp" = [2]\n', "sweep.steps"),
        (SWEEP.replace("5", '"5"') + '[grid]\n"mesh.fsdp" = [2]\n', "sweep.steps"),
        (SWEEP.replace("h100", "h1000000x") + '[grid]\n"mesh.fsdp" = [2]\n', "sweep.gpu"),
        (SWEEP + "timeout_s = 0\n", "sweep.timeout_s"),
        (SWEEP, "grid"),
        (SWEEP + '[grid]\n"mesh.fdsp" = [2]\n', "grid.mesh.fdsp"),
        (SWEEP + '[grid]\n"mesh.fsdp" = 2\n', "grid.mesh.fsdp"),
        (SWEEP + '[grid]\n"mesh.fsdp" = [2, "two"]\n', "mesh.fsdp"),
        (SWEEP + '[[run]]\noverrides = "mesh.fsdp=2"\n', "run 1.overrides"),
        (SWEEP + '[[run]]\noverride = ["mesh.fsdp=2"]\n', "run 1.override"),
        (SWEEP + '[[run]]\noverrides = ["mesh.fdsp=2"]\n', "mesh.fdsp"),
        (SWEEP + "[runs]\n", "runs"),
        (SWEEP.replace("base.toml", "no.toml") + '[grid]\n"mesh.fsdp" = [2]\n', "no.toml"),
    ],
)
def test_bad_files_are_named_before_anything_runs(folder, text, key):
    with pytest.raises(ConfigError) as caught:
        read_sweep(write(folder, text), fake_devices=True)
    assert key in caught.value.problems[0].key
    assert caught.value.problems[0].remedy


FATES = """
[grid]
"run.seed" = [1, 2, 3, 4]
[[run]]
overrides = ["mesh.data=3"]
[[run]]
overrides = []
[[run]]
overrides = ["mesh.fsdp=4"]
"""


def test_every_fate_is_a_row_and_finished_rows_stay(folder, monkeypatch, capsys):
    monkeypatch.setattr(sweep_module, "run_child", light_sweep.run_light)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    jaxpar = Command(monkeypatch, capsys)
    path = write(folder, SWEEP + "timeout_s = 10\n" + FATES)
    result = jaxpar("sweep", path, "--best", "best.toml", "--json")
    assert result.code == 0, result.err
    report = json.loads(result.out)
    rows = rows_of(folder)
    assert [row["status"] for row in rows] == [
        "illegal", "ok", "ok", "out of memory", "failed", "timeout", "failed",
    ]  # fmt: skip
    reasons = [row["reason"] for row in rows]
    assert "do not divide" in reasons[0]
    assert "RESOURCE_EXHAUSTED" in reasons[3]
    assert "RuntimeError: no luck" in reasons[4]
    assert "timed out after 10 s" in reasons[5]
    assert "not finite" in reasons[6]
    assert (float(rows[1]["step_s"]), rows[1]["peak_bytes"], rows[1]["data"]) == (0.5, str(2**30), "1")
    assert rows[1]["predicted_gpu"] == "H100 SXM"
    assert 0 < float(rows[1]["predicted_step_s"]) < 1
    assert float(rows[1]["tokens_per_s_per_device"]) == 100
    assert report["best"] == "mesh.fsdp=4"
    best = load_config("best.toml")
    assert (best.mesh.fsdp, best.train.steps, best.train.eval_every) == (4, 40, 20)
    assert (folder / "out" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert len(starts(folder)) == 6

    monkeypatch.setattr(sweep_plots, "save_plots", lambda _rows, _path: False)
    assert jaxpar("sweep", path).code == 0
    assert len(starts(folder)) == 6
    (folder / "out" / "trials" / next(name for name in file_names(folder) if ok(folder, name))).unlink()
    assert jaxpar("sweep", path).code == 0
    assert len(starts(folder)) == 7
    printed = jaxpar("sweep", write(folder, SWEEP + '[grid]\n"run.seed" = [2]\n'), "--retry")
    assert printed.code == 1
    assert len(starts(folder)) == 8
    assert "failed: RuntimeError: no luck" in printed.out


def file_names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "out" / "trials").glob("*.json"))


def ok(folder: Path, name: str) -> bool:
    return json.loads((folder / "out" / "trials" / name).read_text())["status"] == "ok"


def wait_until_gone(process_id: int) -> None:
    """Until a process is not there any more, or dead and waiting to be reaped."""
    deadline = time.monotonic() + 60
    command_line = Path(f"/proc/{process_id}/cmdline")
    while command_line.exists() and command_line.read_bytes():
        assert time.monotonic() < deadline, "the trial outlived its sweep"
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_sweep_that_was_stopped_goes_on(folder, number):
    path = write(folder, SWEEP + '[grid]\n"run.seed" = [0, 5, 6]\n')
    program = ("-m", "tests.experiments.light_sweep")
    process = start("sweep", path, cwd=folder, program=program)
    with ended(process):
        wait_until(lambda: (folder / "hangs.txt").exists() and (folder / "hangs.txt").read_text(), process)
        process.send_signal(number)
        result = finish(process)
    assert result.code == (130 if number == signal.SIGINT else -number)
    wait_until_gone(int((folder / "hangs.txt").read_text()))
    if number == signal.SIGINT:
        assert "the same command goes on" in result.err
    assert [row["status"] for row in rows_of(folder)] == ["ok", "not run", "not run"]
    result = finish(start("sweep", path, cwd=folder, program=program))
    assert result.code == 0, result.err
    assert [row["status"] for row in rows_of(folder)] == ["ok", "ok", "ok"]
    assert starts(folder) == ["2 0", "2 5", "2 5", "2 6"]


@pytest.mark.proof
def test_real_trainings_are_measured(folder):
    grid = '[grid]\n"mesh.fsdp" = [2, 4]\n[[run]]\noverrides = ["optim.lr=1e30"]\n'
    result = finish(start("sweep", write(folder, SWEEP + grid), "--json", cwd=folder))
    assert result.code == 0, result.err
    bad, *rows = json.loads(result.out)["rows"]
    assert bad["status"] == "failed"
    assert [(row["status"], row["devices"], row["platform"]) for row in rows] == [("ok", 2, "cpu"), ("ok", 4, "cpu")]
    assert all(row["step_s"] > 0 and 4 < row["loss"] < 6 and row["peak_bytes"] > 100_000 for row in rows)
    assert rows[0]["peak_bytes"] > rows[1]["peak_bytes"]
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], rel=1e-4)
