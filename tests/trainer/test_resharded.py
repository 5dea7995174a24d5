"""Checkpoints rewritten for another mesh: the same bits, fewer bytes to read, and a run that goes on from them."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpar import resume
from jaxpar.checkpoint.arrays import StepArrays
from jaxpar.checkpoint.errors import CheckpointError, DamagedCheckpointError
from jaxpar.checkpoint.verify import verify_step
from jaxpar.cli.reshard import Request, parse_mesh
from jaxpar.cli.reshard import run as command
from jaxpar.config import ConfigError
from jaxpar.plan.resolve import resolve
from jaxpar.program import Program
from jaxpar.reshard import plan_resharding, reshard
from tests.trainer.runs import column, run, saved_arrays

MEMORY = 4 * 2**30
TARGET = {"fsdp": 4, "tensor": 2}


STEP = 9


@pytest.fixture
def source(every_third) -> Path:
    """A run with checkpoints 3, 6 and 9; its vocabulary divides by no mesh axis, so it is padded in memory."""
    return every_third


def test_the_same_bits_lie_in_chunks_that_the_target_mesh_reads_without_waste(source, tmp_path):
    planned = plan_resharding(str(source), mesh=TARGET)
    written = reshard(planned, str(tmp_path / "new"), max_memory=MEMORY)
    assert written == tmp_path / "new" / "9"
    before, after = (
        saved_arrays_of(source / "checkpoints" / "9"),
        saved_arrays_of(written),
    )
    assert before.keys() == after.keys()
    for name, values in before.items():
        assert values.dtype == after[name].dtype
        assert np.array_equal(values, after[name]), name
    assert verify_step(written).faults == ()
    stored = StepArrays(written).types
    assert planned.read_amplification({name: array.read_chunk for name, array in stored.items()}) == 1.0
    assert stored["params/layers/q"].sharding == "(None, fsdp, tensor, None) on fsdp=4 x tensor=2"
    assert not (tmp_path / "new" / "9.unfinished").exists()


def saved_arrays_of(step: Path) -> dict[str, np.ndarray]:
    return saved_arrays(step.parent, int(step.name), is_run=False)


def test_a_run_goes_on_from_it_on_the_target_mesh_as_if_nothing_had_happened(source, tmp_path, uninterrupted):
    reshard(plan_resharding(str(source), mesh=TARGET), str(tmp_path / "new"), max_memory=MEMORY)
    mesh = {"data": 1, "fsdp": 4, "tensor": 2}
    again = run(tmp_path / "run", mesh=mesh, checkpoint={"resume": str(tmp_path / "new")})
    expected = uninterrupted.rows[9:]
    assert column(again.rows, "ids") == column(expected, "ids")
    for name in ("loss", "grad_norm", "lr"):
        np.testing.assert_allclose(column(again.rows, name), column(expected, name), rtol=1e-5, err_msg=name)


def test_parameters_alone_in_another_type_start_a_new_run(source, tmp_path):
    planned = plan_resharding(str(source), params_only=True, dtype="bfloat16")
    reshard(planned, str(tmp_path / "weights"), max_memory=MEMORY)
    before = saved_arrays_of(source / "checkpoints" / "9")
    after = saved_arrays_of(tmp_path / "weights" / "9")
    assert after.keys() == {name for name in before if name.startswith("params/")}
    for name, values in after.items():
        assert values.dtype.name == "bfloat16"
        assert np.array_equal(values, before[name].astype(values.dtype)), name
    init = {"init_from": f"jaxpar:{tmp_path / 'weights'}"}
    started = run(tmp_path / "run", model=init, train={"stop_at": 1})
    assert started.rows[0]["step"] == 1
    program = Program.build(resolve(started.config, num_devices=8))
    state = program.start_from(resume.restore_params(str(tmp_path / "weights"), program)[0])
    assert int(state.step) == int(state.optimizer[0].count) == 0
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves((state.optimizer[0].mu, state.optimizer[0].nu)))
    up = np.asarray(state.params["layers"]["up"])
    assert up.dtype == np.float32
    assert np.array_equal(up, after["params/layers/up"].astype(np.float32))
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "converted from bfloat16 to float32); optimizer and step count start at 0" in log
    with pytest.raises(CheckpointError, match="missing section: optimizer"):
        run(tmp_path / "other", precision={"params": "bfloat16"}, checkpoint={"resume": str(tmp_path / "weights")})


class Killed(BaseException):
    """Stands in for a kill: nothing catches it."""


def test_a_copy_that_was_killed_goes_on_where_it_was(source, tmp_path, monkeypatch):
    planned = plan_resharding(str(source), mesh=TARGET)
    copied = 0

    def until_half(num_bytes: int) -> None:
        nonlocal copied
        copied += num_bytes
        if copied > planned.num_bytes / 2:
            raise Killed

    with pytest.raises(Killed):
        reshard(planned, str(tmp_path / "new"), max_memory=MEMORY, progress=until_half)
    assert not (tmp_path / "new" / "9").exists()
    journal = tmp_path / "new" / "9.unfinished" / "journal.jsonl"
    with journal.open("a") as file:
        file.write('{"name": "params/la')  # a line that was cut off
    read: list[str] = []
    original = StepArrays.read
    monkeypatch.setattr(StepArrays, "read", lambda self, name, index: read.append(name) or original(self, name, index))
    written = reshard(planned, str(tmp_path / "new"), max_memory=MEMORY, verify=False)
    assert 0 < len(read) < len(planned.arrays)
    assert len(set(read)) == len(read)
    assert verify_step(written).faults == ()


def test_an_unfinished_copy_of_something_else_is_not_gone_on_with(source, tmp_path):
    def at_once(num_bytes: int) -> None:
        raise Killed

    with pytest.raises(Killed):
        reshard(plan_resharding(str(source), mesh=TARGET), str(tmp_path), max_memory=MEMORY, progress=at_once)
    with pytest.raises(CheckpointError, match="unfinished copy of something else"):
        reshard(plan_resharding(str(source), mesh={"fsdp": 2}), str(tmp_path), max_memory=MEMORY)


def test_damage_in_the_source_stops_the_copy_and_names_the_leaf(source, tmp_path):
    damaged = shutil.copytree(source, tmp_path / "damaged")
    planned = plan_resharding(str(damaged), mesh=TARGET)
    data = max((damaged / "checkpoints/9/params").rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    wanted = saved_arrays_of(source / "checkpoints" / "9")["params/layers/up"][1, 3, 5].tobytes()
    content[content.index(wanted)] ^= 4
    data.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match="params/layers/up: its data is not what was saved"):
        reshard(planned, str(tmp_path / "new"), max_memory=MEMORY)
    assert not (tmp_path / "new" / "9").exists()


def test_nothing_is_overwritten(source, tmp_path):
    planned = plan_resharding(str(source))
    (tmp_path / "9").mkdir()
    with pytest.raises(CheckpointError, match="is there already; nothing is overwritten"):
        reshard(planned, str(tmp_path), max_memory=MEMORY)
    assert list((tmp_path / "9").iterdir()) == []


def test_too_little_memory_is_said_before_anything_is_written(source, tmp_path):
    with pytest.raises(CheckpointError, match=r"1 MiB of memory are too few; give at least \d+ MiB"):
        reshard(plan_resharding(str(source)), str(tmp_path / "new"), max_memory=2**20)
    assert not (tmp_path / "new").exists()


# --- the command ------------------------------------------------------------------------------------------------------


def request(source: Path, destination: Path, **changes: object) -> Request:
    plain = Request(
        source=str(source),
        destination=str(destination),
        mesh=None,
        config=None,
        to="jaxpar",
        key_map=None,
        tokenizer=None,
        params_only=False,
        dtype=None,
        step=None,
        max_memory="4GiB",
        gpu=None,
        dry_run=False,
        verify=True,
        as_json=True,
    )
    return dataclasses.replace(plain, **changes)


def test_a_dry_run_says_what_it_brings_and_writes_nothing(source, tmp_path, capsys):
    command(request(source, tmp_path / "new", mesh="fsdp=4,tensor=2", gpu="h100", dry_run=True))
    report = json.loads(capsys.readouterr().out)
    arrays = saved_arrays_of(source / "checkpoints" / "9")
    assert report["bytes"] == sum(values.nbytes for values in arrays.values())
    assert report["read_amplification_after"] == 1.0 < report["read_amplification_before"]
    # norms, counts and nothing else lie on every device whole
    assert report["bytes"] / 8 < report["bytes_per_device_after"] < report["bytes"] / 4
    assert report["gpu"]["name"] == "H100 SXM"
    assert report["gpu"]["fits"]
    assert not (tmp_path / "new").exists()
    command(request(source, tmp_path / "new", mesh="fsdp=4,tensor=2", dry_run=True, as_json=False))
    assert "dry run: nothing was written" in capsys.readouterr().out


def test_the_mesh_may_come_from_a_config(source, tmp_path, capsys):
    config = tmp_path / "config.toml"
    config.write_text(
        (source / "config.toml").read_text().replace("fsdp = 2", "fsdp = 1").replace("data = 2", "data = 4")
    )
    command(request(source, tmp_path / "new", config=str(config), dry_run=True))
    assert json.loads(capsys.readouterr().out)["bytes_per_device_after"] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh": "fdsp=2"}, "'fdsp' is not a mesh axis"),
        ({"mesh": "fsdp=0"}, "'0' is not a number of devices"),
        ({"mesh": "fsdp=-1"}, "'-1' is not a number of devices"),
        ({"mesh": "fsdp=2,fsdp=4"}, "given twice"),
        ({"mesh": "tensor=3"}, r"dim \d .* has size \d+, which tensor=3 = 3 does not divide"),
        ({"mesh": "fsdp=2", "config": "x.toml"}, "give one of the two"),
        ({"dtype": "int8"}, "one of float32, bfloat16"),
        ({"max_memory": "much"}, "write e.g. 4GiB"),
        ({"gpu": "abacus", "mesh": "fsdp=2"}, "not in the catalogue"),
    ],
)
def test_bad_arguments_are_named_before_anything_is_read(source, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        command(request(source, tmp_path / "new", **changes))
    assert not (tmp_path / "new").exists()


def test_a_mesh_is_axis_sizes():
    assert parse_mesh("fsdp=16, tensor=4") == {"fsdp": 16, "tensor": 4}


def test_steps_of_the_source_can_be_chosen(source, tmp_path, capsys):
    with pytest.raises(CheckpointError, match=r"step 4 .*complete steps: 3, 6, 9"):
        command(request(source, tmp_path / "new", step=4))
    command(request(source, tmp_path / "new", step=6, params_only=True))
    report = json.loads(capsys.readouterr().out)
    assert report["verified"]
    assert re.fullmatch(r".*/new/6", report["written"])
    assert report["step"] == 6
