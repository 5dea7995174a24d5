"""``jaxpar inspect`` and ``jaxpar verify-checkpoint`` as a user calls them: output and exit codes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as orbax_v0
import pytest

from jaxpar.checkpoint.describe import describe
from jaxpar.checkpoint.store import Store
from jaxpar.checkpoint.verify import Verdict, verify_step
from jaxpar.cli.main import main
from jaxpar.cli.verify_checkpoint import _print
from tests.checkpoint.samples import PADDED, make_state


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A run directory with steps 10 and 20, and the remnant of an interrupted save."""
    run = tmp_path_factory.mktemp("run")
    with Store(run / "checkpoints") as store:
        for step in (10, 20):
            metadata = {"position": {"epoch": 1, "offset": 8 * step}, "tokens_seen": 100 * step, "mesh": {"fsdp": 2}}
            store.save(step, make_state(step), metadata, stored_shapes=PADDED)
    return run


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    return shutil.copytree(saved, tmp_path / "run")


@pytest.fixture
def jaxpar(monkeypatch, capsys):
    """Calls the command; returns (exit code, standard output, standard error)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["jaxpar", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return call


def test_inspect_says_steps_arrays_and_position(saved, jaxpar):
    code, out, _ = jaxpar("inspect", saved, "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["steps"], found["latest"], found["complete"], found["skipped"]) == ([10, 20], 20, True, [])
    assert found["params"] == 13 * 8 + 3 * 8 * 8 + 3 * 8
    assert found["position"] == {"epoch": 1, "offset": 160}
    leaf = next(leaf for leaf in found["tree"] if leaf["name"] == "params/layers/q")
    assert (leaf["shape"], leaf["dtype"], leaf["bytes"]) == ([3, 8, 4, 2], "float32", 3 * 8 * 8 * 4)
    assert leaf["sharding"] == "(None, fsdp, tensor) on fsdp=2 x tensor=4"
    code, out, _ = jaxpar("inspect", saved / "checkpoints" / "10")
    assert code == 0
    assert "sample 80 of epoch 1, 1,000 tokens seen" in out
    assert "params/layers/norm" in out
    assert "bfloat16" in out


def test_inspect_needs_no_jax(saved):
    """So it works, and starts at once, on a machine where JAX finds nothing."""
    program = (
        "import sys; from jaxpar.cli.inspect import print_description; print_description(sys.argv[1], None, True); "
        "assert 'jax' not in sys.modules and 'orbax' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program, str(saved)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["latest"] == 20


def test_what_is_not_complete_is_said(copy, jaxpar):
    data = max((copy / "checkpoints/20/params").rglob("d/*"), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[:-10])
    (copy / "checkpoints" / "30").mkdir()
    code, out, _ = jaxpar("inspect", copy, "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["steps"], found["latest"], found["complete"]) == ([10], 10, False)
    assert [entry["step"] for entry in found["skipped"]] == [20, 30]
    code, out, _ = jaxpar("inspect", copy)
    assert "passed over  step 30: the directory is empty" in out


def test_inspect_says_what_lies_beside_the_steps(copy, jaxpar):
    directory = copy / "checkpoints"
    (directory / "20").rename(directory / "20.damaged")
    (directory / "30.unfinished").mkdir()
    code, out, _ = jaxpar("inspect", copy)
    assert code == 0
    assert "set aside    20.damaged: step 20 was damaged and set aside" in out
    assert "set aside    30.unfinished: a copy of step 30 that was interrupted" in out
    assert len(json.loads(jaxpar("inspect", copy, "--json")[1])["left_aside"]) == 2
    (directory / "10").rename(directory / "10.incomplete-1")
    code, out, err = jaxpar("inspect", copy)
    assert code == 2
    assert "has no complete checkpoint; 10.incomplete-1: step 10 was incomplete and set aside" in err
    assert "30.unfinished: a copy of step 30 that was interrupted; the same command goes on with it" in err


def test_verify_prints_a_line_per_fault_and_at_most_twenty(tmp_path, capsys):
    faults = tuple(f"params/layers/{number}: [tensorstore:\n" + "x" * 1000 for number in range(30))
    verdict = Verdict(step_directory=tmp_path / "7", faults=faults, notes=("n",), num_leaves=30, num_bytes=0)
    _print([verdict], [])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 7: DAMAGED: 30 faults"
    assert len(lines) == 1 + 20 + 1 + 1
    assert all(line.startswith(f"  params/layers/{number}: ") for number, line in enumerate(lines[1:21]))
    assert max(map(len, lines)) < 260
    assert lines[21] == "  and 10 more; --json lists all"


def test_verify_passes_a_whole_run_and_names_what_is_damaged(copy, jaxpar):
    code, out, _ = jaxpar("verify-checkpoint", copy)
    assert code == 0
    assert out.splitlines()[0].startswith("step 10: whole: 11 arrays")
    (copy / "checkpoints/10/optimizer/_METADATA").unlink()
    code, out, _ = jaxpar("verify-checkpoint", copy)
    assert code == 1
    assert "step 10: DAMAGED" in out
    assert "optimizer/0/mu/layers/q is gone" in out
    assert "step 20: whole" in out
    code, out, _ = jaxpar("verify-checkpoint", copy, "--step", 10, "--json")
    [verdict] = json.loads(out)["steps"]
    assert code == 1
    assert not verdict["whole"]
    assert "file optimizer/_METADATA is missing" in verdict["faults"]
    assert jaxpar("verify-checkpoint", copy, "--step", 20)[0] == 0
    assert jaxpar("verify-checkpoint", copy / "checkpoints" / "20")[0] == 0


def test_a_step_without_its_mark_is_not_whole(copy, jaxpar):
    """A run that is killed just before the mark; or somebody who removed it, and a bit that flipped besides."""
    (copy / "checkpoints" / "20" / "jaxpar_files.json").unlink()
    code, out, _ = jaxpar("verify-checkpoint", copy)
    assert code == 1
    assert "step 20: DAMAGED" in out
    assert "its save was not completed" in out
    shutil.rmtree(copy / "checkpoints" / "10")
    code, out, _ = jaxpar("inspect", copy, "--json", "--step", 20)
    found = json.loads(out)
    assert (found["by_jaxpar"], found["steps"], found["complete"]) == (True, [], False)


def test_a_first_save_that_was_interrupted_is_no_checkpoint(copy, jaxpar):
    shutil.rmtree(copy / "checkpoints" / "20")
    (copy / "checkpoints" / "10").rename(copy / "checkpoints" / "10.orbax-checkpoint-tmp-7")
    code, out, err = jaxpar("inspect", copy, "--json")
    assert (code, out) == (2, "")
    assert "has no complete checkpoint; step 10: its save was interrupted" in err


def test_an_interrupted_save_is_no_damage(copy, jaxpar):
    (copy / "checkpoints" / "30.orbax-checkpoint-tmp-1").mkdir()
    code, out, _ = jaxpar("verify-checkpoint", copy)
    assert code == 0
    assert "step 30: its save was interrupted" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("inspect", "nothing/here"), "nothing/here does not exist"),
        (("verify-checkpoint", "nothing/here"), "nothing/here does not exist"),
        (("inspect", "{run}", "--step", "7"), "has no step 7; steps: 10, 20"),
        (("verify-checkpoint", "{run}", "--step", "7"), "has no step 7; steps: 10, 20"),
        (("inspect", "gs://bucket/run"), "gs://bucket/run: object stores are not supported"),
        (("reshard", "nothing/here", "new"), "nothing/here does not exist"),
        (("reshard", "{run}", "new", "--step", "7"), "step 7 .*does not exist; complete steps: 10, 20"),
    ],
)
def test_what_is_not_there_is_bad_input(saved, jaxpar, arguments, message):
    code, out, err = jaxpar(*(argument.format(run=saved) for argument in arguments))
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert "-> name a run, its checkpoints directory or one step" in err
    assert message.replace(" .*", "") in err or message.split(" .*")[1] in err


# --- checkpoints of other trainers ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def foreign(tmp_path_factory) -> Path:
    """As trainers on older Orbax write: a manager's steps with one item, and a bare tree in separate zarr files."""
    directory = tmp_path_factory.mktemp("foreign")
    params = {"params": {"decoder": {"wi": jnp.arange(24.0).reshape(2, 3, 4), "norm": jnp.ones(3, jnp.bfloat16)}}}
    state = {"params": params, "opt_state": optax.adam(1e-3).init(params), "step": 5}
    with orbax_v0.CheckpointManager(directory / "manager") as manager:
        manager.save(5, args=orbax_v0.args.StandardSave(state))
    with orbax_v0.PyTreeCheckpointer(use_ocdbt=False) as checkpointer:
        checkpointer.save(directory / "tree", {"params": params, "name": "x", "nothing": None, "lr": 0.5})
    return directory


@pytest.mark.parametrize(("path", "steps"), [("manager", (5,)), ("manager/5", (5,)), ("tree", ())])
def test_orbax_checkpoints_of_others_are_described(foreign, path, steps):
    found = describe(str(foreign / path))
    assert not found.by_jaxpar
    assert found.steps == steps
    assert found.num_params == 24 + 3
    assert found.complete
    wi = next(leaf for name, leaf in found.leaves.items() if name.endswith("params/params/decoder/wi"))
    assert (wi.shape, wi.dtype) == ((2, 3, 4), np.float32)


def test_their_arrays_can_be_read_but_not_compared(foreign):
    verdict = verify_step(foreign / "manager" / "5")
    assert verdict.faults == ()
    assert "only seen that arrays can be read" in verdict.notes[0]
    assert verdict.num_leaves == 8
