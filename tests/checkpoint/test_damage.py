"""Every kind of damage to a step is found and named by leaf, file or step; none is ever restored silently."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.checkpoint import commit
from jaxpar.checkpoint.errors import CheckpointError, DamagedCheckpointError, NoCheckpointError
from jaxpar.checkpoint.places import choose_step, locate
from jaxpar.checkpoint.store import Store
from jaxpar.checkpoint.verify import verify_step
from tests.checkpoint.samples import MESH, abstract, put

# Reads that fail leave Orbax's own tasks behind, which complain when they are collected.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
]

STEP = 30
PADDED = {"params/embedding": (509, 16), "optimizer/mu/embedding": (509, 16)}


def make_state(seed: int) -> dict:
    """Arrays whose chunks are too big to be put among the index: half a megabyte in all."""
    rng = np.random.default_rng(seed)

    def params() -> dict:
        embedding = np.concatenate([rng.standard_normal((509, 16), np.float32), np.zeros((3, 16), np.float32)])
        return {
            "embedding": put(embedding, P("tensor", "fsdp")),
            "layers": {
                "q": put(rng.standard_normal((3, 64, 64), np.float32), P(None, "fsdp", "tensor")),
                "norm": put(rng.standard_normal((3, 64), np.float32).astype(jnp.bfloat16)),
            },
        }

    return {
        "params": params(),
        "optimizer": {"count": put(np.int32(seed)), "mu": params()},
        "step": put(np.int32(seed)),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A checkpoints directory with steps 20 and 30."""
    directory = tmp_path_factory.mktemp("saved") / "checkpoints"
    with Store(directory) as store:
        for step in (20, STEP):
            store.save(step, make_state(step), {"tokens": 3}, stored_shapes=PADDED)
    return directory


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    return shutil.copytree(saved, tmp_path / "checkpoints")


def files_of(step: Path) -> list[Path]:
    return sorted(path for path in step.rglob("*") if path.is_file() and path.stat().st_size)


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def largest(step: Path, section: str = "params") -> Path:
    return max((step / section).rglob("d/*"), key=lambda path: path.stat().st_size)


def restored_equal(directory: Path) -> bool:
    """Whether restoring gives what was saved; a state that differs is the one outcome that must not be."""
    state = make_state(STEP)
    with Store(directory) as store:
        out = store.restore(STEP, abstract(state, MESH), stored_shapes=PADDED)
    pairs = zip(jax.tree.leaves(out), jax.tree.leaves(state), strict=True)
    return all(np.array_equal(np.asarray(got), np.asarray(want)) for got, want in pairs)


def test_a_whole_step_is_whole(saved):
    verdict = verify_step(saved / str(STEP))
    assert verdict.faults == verdict.notes == ()
    assert verdict.num_leaves == 8
    assert restored_equal(saved)


def test_every_random_bit_flip_is_found_and_none_is_restored(copy):
    rng = random.Random(0)
    step = copy / str(STEP)
    named_leaf = 0
    for _ in range(60):
        path = rng.choice(files_of(step))
        bit = rng.randrange(path.stat().st_size * 8)
        flip(path, bit)
        verdict = verify_step(step)
        assert verdict.faults, f"bit {bit} of {path}"
        relative = path.relative_to(step).as_posix()
        assert any(relative in fault for fault in verdict.faults), verdict.faults
        named_leaf += any(fault.startswith(("params/", "optimizer/", "step")) for fault in verdict.faults)
        flip(path, bit)
    assert named_leaf >= 10
    assert verify_step(step).faults == ()


def test_a_flip_in_an_array_names_it_on_verifying_and_on_restoring(copy):
    step, saved = copy / str(STEP), np.asarray(make_state(STEP)["params"]["layers"]["q"])
    data = largest(step)
    flip(data, 8 * data.read_bytes().index(saved[1, 40, 50].tobytes()) + 3)
    faults = verify_step(step).faults
    assert any(fault.startswith("params/layers/q: its data is not what was saved") for fault in faults)
    with pytest.raises(DamagedCheckpointError, match=r"step 30 .*the data of params/layers/q is.*\n.*another step: 20"):
        restored_equal(copy)
    with Store(copy) as store:
        out = store.restore(STEP, abstract(make_state(0), MESH), stored_shapes=PADDED, verify=False)
    changed = np.argwhere(np.asarray(out["params"]["layers"]["q"]) != saved)
    assert changed.tolist() == [[1, 40, 50]]


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def zeroed(path: Path) -> None:
    path.write_bytes(b"\0" * path.stat().st_size)


def swapped_section(step: Path) -> None:
    """The optimizer of another step: every file is whole, and it is not what was saved."""
    shutil.rmtree(step / "optimizer")
    shutil.copytree(step.parent / "20" / "optimizer", step / "optimizer")


DAMAGE = {
    "truncated data": (lambda step: truncated(largest(step)), "params/"),
    "zeroed data": (lambda step: zeroed(largest(step)), "params/"),
    "deleted data": (lambda step: largest(step).unlink(), "params/"),
    "deleted data of all": (lambda step: shutil.rmtree(step / "params" / "ocdbt.process_0"), "params/layers/q"),
    "deleted tree metadata": (lambda step: (step / "params/_METADATA").unlink(), "params/layers/q is gone"),
    "damaged tree metadata": (lambda step: zeroed(step / "params/_METADATA"), "_METADATA is damaged"),
    "deleted manifest": (lambda step: (step / "params/manifest.ocdbt").unlink(), "params/layers/q"),
    "damaged manifest": (lambda step: zeroed(step / "params/manifest.ocdbt"), "params/layers/q"),
    "deleted section": (lambda step: shutil.rmtree(step / "optimizer"), "optimizer/count is gone"),
    "another section": (swapped_section, "optimizer/"),
    "deleted checkpoint metadata": (lambda step: (step / "_CHECKPOINT_METADATA").unlink(), "_CHECKPOINT_METADATA"),
    "damaged checkpoint metadata": (lambda step: zeroed(step / "_CHECKPOINT_METADATA"), "_CHECKPOINT_METADATA"),
    "damaged mark": (lambda step: truncated(step / commit.COMMIT_MARK), "jaxpar_files.json is damaged"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_every_kind_of_damage_is_found_and_never_restored(copy, kind):
    damage, named = DAMAGE[kind]
    damage(copy / str(STEP))
    verdict = verify_step(copy / str(STEP))
    assert any(named in fault for fault in verdict.faults), verdict.faults
    with pytest.raises(CheckpointError, match="step 30"):
        restored_equal(copy)


def test_a_copy_under_another_number_is_no_checkpoint(copy):
    shutil.copytree(copy / "20", copy / "40")
    with Store(copy) as store:
        assert store.latest() == STEP
        assert store.skipped() == [(40, "it is a copy of step 20")]
    assert any("copy of step 20" in fault for fault in verify_step(copy / "40").faults)


def test_a_step_of_the_first_format_is_read_and_said_to_have_no_checksums(tmp_path):
    """As jaxpar wrote it before checksums: a mark with nothing but sizes, format_version 1."""
    state = {"params": {"w": put(np.arange(8, dtype=np.float32))}}
    with Store(tmp_path) as store:
        store.save(1, state, {})
    step = tmp_path / "1"
    metadata = step / "_CHECKPOINT_METADATA"
    metadata.write_text(metadata.read_text().replace('"format_version": 2', '"format_version": 1'))
    files = {name: (step / name).stat().st_size for name in commit.read_commit_mark(step).files}
    (step / commit.COMMIT_MARK).write_text(f'{{"files": {str(files).replace(chr(39), chr(34))}}}')
    with Store(tmp_path) as store:
        assert store.metadata(1)["format_version"] == 1
        out = store.restore(1, abstract(state, MESH))
    assert np.array_equal(np.asarray(out["params"]["w"]), np.arange(8, dtype=np.float32))
    verdict = verify_step(step)
    assert verdict.faults == ()
    assert "without checksums" in verdict.notes[0]


def test_what_stands_in_the_way_of_new_saves_is_cleared_and_nothing_is_lost(copy):
    truncated(largest(copy / str(STEP)))
    (copy / "40.orbax-checkpoint-tmp-3").mkdir()
    (copy / "50").mkdir()
    with Store(copy) as store:
        assert store.tidy() == [
            "step 30 is set aside as 30.damaged",
            "removed 40.orbax-checkpoint-tmp-3",
            "step 50 is set aside as 50.damaged",
        ]
        assert (store.steps(), store.skipped()) == ([20], [])
        assert files_of(copy / "30.damaged")
        store.save(STEP, make_state(1), {}, stored_shapes=PADDED)
        store.wait()
        assert store.steps() == [20, STEP]


def test_set_aside_steps_do_not_meet(copy):
    for number in ("30.damaged", "30.damaged-1", "30.damaged-2"):
        assert commit.set_aside(copy / "30").name == number
        shutil.copytree(copy / "20", copy / "30")


@pytest.mark.parametrize("inside", ["", "checkpoints", "checkpoints/20"])
def test_a_path_may_name_a_run_its_checkpoints_or_a_step(saved, inside):
    run = saved.parent
    expected = 20 if inside.endswith("20") else None
    assert locate(run / inside) == (saved, expected)
    assert choose_step(run / inside) == (saved, expected or STEP)


def test_a_step_that_is_not_there_or_not_whole_is_said_with_those_that_are(copy):
    with pytest.raises(NoCheckpointError, match=r"step 7 .*does not exist; complete steps: 20, 30"):
        choose_step(copy, 7)
    with pytest.raises(NoCheckpointError, match="is step 20, but step 30 is asked for"):
        choose_step(copy / "20", 30)
    with pytest.raises(NoCheckpointError, match="does not exist"):
        choose_step(copy / "nothing")
    truncated(largest(copy / "30"))
    with pytest.raises(DamagedCheckpointError, match=r"step 30 .*bytes, .* were written; complete steps: 20"):
        choose_step(copy, 30)
    for step in ("20", "30"):
        os.replace(copy / step / commit.COMMIT_MARK, copy / step / "elsewhere")
    with pytest.raises(DamagedCheckpointError, match="no complete checkpoint; step 20: its save was not completed"):
        choose_step(copy)
