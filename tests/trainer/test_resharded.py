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
from jaxpar.checkpoint import commit
from jaxpar.checkpoint.arrays import StepArrays
from jaxpar.checkpoint.errors import CheckpointError, DamagedCheckpointError
from jaxpar.checkpoint.verify import verify_step
from jaxpar.cli.reshard import Request, parse_mesh
from jaxpar.cli.reshard import run as command
from jaxpar.config import ConfigError
from jaxpar.plan.resolve import resolve
from jaxpar.program import Program
from jaxpar.reshard import Resharding, plan_resharding, reshard
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


def kill_at_half(planned: Resharding, destination: Path) -> None:
    """Copies, and is killed when half of the bytes are there."""
    copied = 0

    def until_half(num_bytes: int) -> None:
        nonlocal copied
        copied += num_bytes
        if copied > planned.num_bytes / 2:
            raise Killed

    with pytest.raises(Killed):
        reshard(planned, str(destination), max_memory=MEMORY, progress=until_half)


def test_a_copy_that_was_killed_goes_on_where_it_was(source, tmp_path, monkeypatch):
    planned = plan_resharding(str(source), mesh=TARGET)
    kill_at_half(planned, tmp_path / "new")
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


@pytest.mark.parametrize("slab_bytes", [20_000, 5_000])
def test_a_killed_copy_goes_on_with_another_bound_on_memory(source, tmp_path, monkeypatch, slab_bytes):
    """Its slabs are then cut otherwise: those of the array it was at do not count."""
    planned = plan_resharding(str(source), mesh=TARGET)
    monkeypatch.setattr("jaxpar.reshard.slab_bytes_within", lambda _: 8_000)
    kill_at_half(planned, tmp_path / "new")
    monkeypatch.setattr("jaxpar.reshard.slab_bytes_within", lambda _: slab_bytes)
    written = reshard(planned, str(tmp_path / "new"), max_memory=MEMORY)
    before, after = (saved_arrays_of(step) for step in (source / "checkpoints" / "9", written))
    assert all(np.array_equal(before[name], after[name]) for name in before)
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


def test_damaged_metadata_is_not_copied_under_a_fresh_mark(source, tmp_path):
    """A flipped digit of the data position, say: the copy would be whole, and go on at another sample."""
    damaged = shutil.copytree(source, tmp_path / "damaged")
    metadata = damaged / "checkpoints/9/_CHECKPOINT_METADATA"
    assert '"offset": 0' in metadata.read_text()
    metadata.write_text(metadata.read_text().replace('"offset": 0', '"offset": 8'))
    with pytest.raises(DamagedCheckpointError, match="file _CHECKPOINT_METADATA is damaged"):
        plan_resharding(str(damaged))
    (damaged / "checkpoints/6/optimizer/_METADATA").write_text('{"tree_metadata": {}}')
    with pytest.raises(CheckpointError, match="step 6"):
        plan_resharding(str(damaged), step=6)


def test_a_newer_format_is_not_copied(source, tmp_path):
    newer = shutil.copytree(source, tmp_path / "newer") / "checkpoints" / "9"
    metadata = newer / "_CHECKPOINT_METADATA"
    metadata.write_text(metadata.read_text().replace('"format_version": 2', '"format_version": 9'))
    commit.write_commit_mark(newer, checksums=commit.read_commit_mark(newer).checksums)
    with pytest.raises(CheckpointError, match="format version 9; this jaxpar reads up to 2"):
        plan_resharding(str(newer))


def test_chunks_that_are_too_big_for_the_bound_are_said(source, tmp_path):
    planned = dataclasses.replace(plan_resharding(str(source)), largest_chunk=2**33)
    with pytest.raises(CheckpointError, match=r"chunks of 8192 MiB, too big .*\n-> give \d+ MiB more"):
        reshard(planned, str(tmp_path / "new"), max_memory=MEMORY)
    assert not (tmp_path / "new").exists()


def test_places_may_be_relative(source, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command(request(source, Path("new"), mesh="fsdp=2"))
    assert verify_step(tmp_path / "new" / "9").faults == ()


def test_one_copy_at_a_time_goes_to_a_directory(source, tmp_path):
    planned = plan_resharding(str(source))

    def meanwhile(_: int) -> None:
        with pytest.raises(CheckpointError, match="another process is writing a copy"):
            reshard(plan_resharding(str(source), step=6), str(tmp_path / "new"), max_memory=MEMORY)
        raise Killed

    with pytest.raises(Killed):
        reshard(planned, str(tmp_path / "new"), max_memory=MEMORY, progress=meanwhile)


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
        ({"gpu": "abacus", "mesh": "fsdp=2", "dry_run": True}, "not in the catalogue"),
        ({"gpu": "h100", "mesh": "fsdp=2"}, "leave out --gpu"),
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


def test_the_same_command_goes_on_with_the_step_that_it_began(source, tmp_path, capsys):
    """The run has saved newer ones since."""
    kill_at_half(plan_resharding(str(source), mesh=TARGET, step=6), tmp_path / "new")
    command(request(source, tmp_path / "new", mesh="fsdp=4,tensor=2"))
    said = capsys.readouterr()
    assert json.loads(said.out)["step"] == 6
    assert "goes on with step 6, whose copy was interrupted" in said.err
    assert [path.name for path in (tmp_path / "new").iterdir() if path.is_dir()] == ["6"]
    command(request(source, tmp_path / "new", mesh="fsdp=4,tensor=2", verify=False))
    assert json.loads(capsys.readouterr().out)["step"] == STEP
