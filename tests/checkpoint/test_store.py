"""Store: round trips on explicit meshes, strictness, damage, unfinished steps, failing disks."""

from __future__ import annotations

import functools
import re
import resource
import shutil
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.checkpoint import commit
from jaxpar.checkpoint.contents import FORMAT_VERSION
from jaxpar.checkpoint.errors import CheckpointError, DamagedCheckpointError
from jaxpar.checkpoint.store import Store
from tests.checkpoint.samples import MESH, PADDED, REPLICATED, abstract, explicit_mesh, make_state, put

# Reads and writes that fail leave Orbax's own tasks behind, which complain when they are collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def assert_restored(restored, saved, target) -> None:
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    for got, want, form in zip(*map(jax.tree.leaves, (restored, saved, target)), strict=True):
        assert got.sharding == form.sharding
        assert got.dtype == want.dtype
        assert np.array_equal(np.asarray(got), np.asarray(want))


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory) -> Path:
    """A directory with complete steps 10, 20 and 30; tests damage copies of it."""
    directory = tmp_path_factory.mktemp("three") / "checkpoints"
    with Store(directory) as store:
        for step in (10, 20, 30):
            store.save(step, make_state(step), {"tokens": step * 100}, stored_shapes=PADDED)
    return directory


@pytest.fixture
def copy(three_steps, tmp_path) -> Path:
    return shutil.copytree(three_steps, tmp_path / "checkpoints")


def restore(directory: Path, step: int, target, **options):
    with Store(directory) as store:
        return store.restore(step, target, stored_shapes=PADDED, **options)


# --- round trips ---------------------------------------------------------------------------------------------------


def test_round_trip_is_exact_and_carries_the_target_sharding(three_steps):
    saved = make_state(20)
    assert_restored(restore(three_steps, 20, abstract(saved)), saved, abstract(saved))


@pytest.mark.parametrize(("fsdp", "tensor"), [(8, 1), (1, 1), (2, 2)])
def test_another_mesh_and_device_count_restores_the_same_bits(three_steps, fsdp, tensor):
    saved = make_state(20)
    mesh = explicit_mesh(fsdp, tensor)
    assert_restored(restore(three_steps, 20, abstract(saved, mesh)), saved, abstract(saved, mesh))


def test_arrays_lie_unpadded_under_names_without_container_classes(three_steps):
    leaves = Store(three_steps).leaves(10)
    assert leaves["params/embedding"].shape == (13, 8)
    assert leaves["optimizer/0/mu/embedding"].shape == (13, 8)
    assert leaves["optimizer/0/count"].shape == ()
    assert leaves["params/layers/norm"].dtype == jnp.bfloat16
    assert leaves["step"].dtype == jnp.int32
    assert len(leaves) == 3 * 3 + 2


def test_padding_comes_back_as_zeros_whatever_was_there(tmp_path):
    array = put(np.ones((16, 8), np.float32), P("tensor", "fsdp"))
    with Store(tmp_path) as store:
        store.save(1, {"params": {"w": array}}, {}, stored_shapes={"params/w": (13, 8)})
        for rows in (16, 24, 13):
            form = jax.ShapeDtypeStruct((rows, 8), jnp.float32, sharding=NamedSharding(MESH, P(None, "fsdp")))
            out = store.restore(1, {"params": {"w": form}}, stored_shapes={"params/w": (13, 8)})["params"]["w"]
            assert np.array_equal(np.asarray(out), np.pad(np.ones((13, 8), np.float32), ((0, rows - 13), (0, 0))))


def test_saved_values_survive_donation_of_the_state(tmp_path):
    state = {"params": {"w": put(np.arange(2.0**20, dtype=np.float32).reshape(64, -1), P("fsdp", "tensor"))}}
    before = np.array(state["params"]["w"])
    update = jax.jit(functools.partial(jax.tree.map, lambda x: x * 2 + 1), donate_argnums=0)
    form = abstract(state)
    with Store(tmp_path) as store:
        store.save(1, state, {})
        jax.block_until_ready(update(state))
        assert np.array_equal(np.asarray(store.restore(1, form)["params"]["w"]), before)


def wipe(section: Path, pattern: str) -> None:
    """Zeroes files without changing their sizes, so that only reading them can tell."""
    for path in section.glob(pattern):
        path.write_bytes(b"\0" * path.stat().st_size)


def test_metadata_is_read_without_arrays(copy):
    for section in ("params", "optimizer", "step"):
        wipe(copy / "20" / section, "ocdbt.process_0/d/*")
        wipe(copy / "20" / section, "d/*")
    assert Store(copy).metadata(20) == {"tokens": 2000, "step": 20, "format_version": FORMAT_VERSION}


def test_metadata_round_trips_as_json(tmp_path):
    metadata = {"data": {"epoch": 1, "samples": 2**40}, "seeds": [1, 2], "config": {"lr": 1e-4, "preset": None}}
    with Store(tmp_path) as store:
        store.save(5, {"params": {"w": put(np.ones(3, np.float32))}}, metadata)
        store.wait()
        assert store.metadata(5) == metadata | {"step": 5, "format_version": FORMAT_VERSION}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"step": 3}, "step"),
        ({"a": {1: "x"}}, "key 1"),
        ({"a": np.float32(1)}, "float32"),
        ({"loss": float("nan")}, "JSON"),
    ],
)
def test_metadata_that_would_not_come_back_is_refused(tmp_path, metadata, message):
    with Store(tmp_path) as store, pytest.raises(ValueError, match=message):
        store.save(5, {"params": {"w": put(np.ones(3, np.float32))}}, metadata)


# --- strictness (cases A9, A15, A16, A18) -----------------------------------------------------------------------------


def form(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(MESH, REPLICATED))


def test_one_message_lists_every_difference_with_both_sides(three_steps):
    target = abstract(make_state())
    layers = target["params"]["layers"]
    layers["q"] = form((4, 8, 4, 2))
    layers["norm"] = form((3, 8), jnp.float32)
    layers["extra"] = form((3, 5))
    optimizer = target["optimizer"][0]
    del optimizer.mu["layers"]["q"]
    with pytest.raises(CheckpointError) as caught:
        restore(three_steps, 10, target | {"step": form((), jnp.float32)})
    message = str(caught.value)
    for line in (
        "unexpected in the checkpoint: optimizer/0/mu/layers/q: float32[3,8,4,2]",
        "missing from the checkpoint: params/layers/extra: float32[3,5]",
        "wrong shape: params/layers/q: float32[3,8,4,2] in the checkpoint, float32[4,8,4,2] expected",
        "wrong dtype: params/layers/norm: bfloat16 in the checkpoint, float32 expected",
        "wrong dtype: step: int32 in the checkpoint, float32 expected",
    ):
        assert line in message
    assert "step 10" in message
    assert str(three_steps) in message


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bfloat16, jnp.float16])
def test_nothing_is_cast(three_steps, dtype):
    target = abstract(make_state())
    target["params"]["layers"]["q"] = form((3, 8, 4, 2), dtype)
    with pytest.raises(
        CheckpointError, match=rf"params/layers/q: float32 in the checkpoint, {dtype.__name__} expected"
    ):
        restore(three_steps, 10, target)


def test_a_padded_leaf_must_have_the_stored_true_shape(three_steps):
    target = abstract(make_state())
    shapes = PADDED | {"params/embedding": (14, 8)}
    with (
        Store(three_steps) as store,
        pytest.raises(CheckpointError, match=r"float32\[13,8\] in the checkpoint, float32\[14,8\]"),
    ):
        store.restore(10, target, stored_shapes=shapes)


def test_a_target_without_sharding_is_named(three_steps):
    target = abstract(make_state())
    target["params"]["layers"]["q"] = jax.ShapeDtypeStruct((3, 8, 4, 2), jnp.float32)
    with pytest.raises(CheckpointError, match="target without sharding: params/layers/q"):
        restore(three_steps, 10, target)


def test_a_missing_optimizer_section_is_named(tmp_path):
    state = make_state()
    with Store(tmp_path) as store:
        store.save(1, {"params": state["params"]}, {})
        with pytest.raises(CheckpointError, match="missing section: optimizer\n  missing section: step"):
            store.restore(1, abstract(state))
        restored = store.restore(1, {"params": abstract(state["params"])}, ignore={"optimizer"})
        assert_restored(restored["params"], state["params"], abstract(state["params"]))


def test_params_alone_are_read_only_on_request(three_steps):
    saved = {"params": make_state(30)["params"]}
    shapes = {"params/embedding": (13, 8)}
    with Store(three_steps) as store:
        with pytest.raises(CheckpointError, match="unexpected section: optimizer\n  unexpected section: step"):
            store.restore(30, abstract(saved), stored_shapes=shapes)
        restored = store.restore(30, abstract(saved), stored_shapes=shapes, ignore={"optimizer", "step"})
    assert_restored(restored, saved, abstract(saved))


def test_another_optimizer_is_refused_leaf_by_leaf(three_steps):
    state = make_state()
    state["optimizer"] = jax.tree.map(put, optax.lion(1e-3).init(state["params"]))
    shapes = {name: shape for name, shape in PADDED.items() if "/nu/" not in name}
    with Store(three_steps) as store, pytest.raises(CheckpointError) as caught:
        store.restore(10, abstract(state), stored_shapes=shapes)
    assert "unexpected in the checkpoint: optimizer/0/nu/layers/q: float32[3,8,4,2]" in str(caught.value)


def write_commit_mark_anew(step: Path) -> None:
    """As the jaxpar of the newer format would have written it."""
    commit.write_commit_mark(step, checksums=commit.read_commit_mark(step).checksums)


def test_a_version_that_a_flipped_bit_made_newer_is_damage(copy):
    path = copy / "30" / "_CHECKPOINT_METADATA"
    path.write_text(path.read_text().replace(f'"format_version": {FORMAT_VERSION}', '"format_version": 9'))
    with pytest.raises(DamagedCheckpointError, match=r"is damaged: .* format version 9; this jaxpar reads up to"):
        Store(copy).metadata(30)


def test_a_newer_format_is_refused_by_name(copy):
    path = copy / "30" / "_CHECKPOINT_METADATA"
    content = path.read_text()
    newer = content.replace(f'"format_version": {FORMAT_VERSION}', f'"format_version": {FORMAT_VERSION + 1}')
    assert newer != content
    path.write_text(newer)
    write_commit_mark_anew(path.parent)
    store = Store(copy)
    assert store.latest() == 30
    for read in (store.metadata, store.leaves, lambda step: store.restore(step, {})):
        with pytest.raises(CheckpointError, match=rf"format version {FORMAT_VERSION + 1}; this jaxpar reads up to"):
            read(30)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"params": {"w": np.ones(3)}}, "params/w is ndarray"),
        ({"step": 3}, "step is int"),
        ({"rng": {"key": jax.random.key(0)}}, "rng/key"),
        ({"params": {"a/b": jnp.ones(3)}}, "cannot be stored"),
        ({"params": {"a.b": jnp.ones(3)}}, "cannot be stored"),
        ({"optimizer": optax.EmptyState()}, "no leaves"),
    ],
)
def test_a_state_that_cannot_be_stored_is_refused(tmp_path, state, message):
    with Store(tmp_path / "new") as store, pytest.raises(ValueError, match=message):
        store.save(1, state, {})
    assert not (tmp_path / "new").exists()


def test_stored_shapes_must_fit_and_name_leaves(tmp_path):
    state = {"params": {"w": put(np.ones((4, 2), np.float32))}}
    with Store(tmp_path) as store:
        for shapes in ({"params/w": (5, 2)}, {"params/w": (4,)}, {"params/v": (4, 2)}):
            with pytest.raises(ValueError, match="stored"):
                store.save(1, state, {}, stored_shapes=shapes)


# --- unfinished and damaged steps (cases A12, A14) --------------------------------------------------------------------


def largest_data_file(step: Path) -> Path:
    return max((step / "params").rglob("d/*"), key=lambda path: path.stat().st_size)


def truncate(step: Path) -> None:
    path = largest_data_file(step)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(step: Path) -> None:
    shutil.rmtree(step)
    step.mkdir()


DAMAGE = {
    "empty directory": (empty, "empty"),
    "truncated data": (truncate, "bytes, .* were written"),
    "deleted data": (lambda step: largest_data_file(step).unlink(), "params/.* is missing"),
    "deleted section": (lambda step: shutil.rmtree(step / "optimizer"), "optimizer/.* is missing"),
    "deleted tree metadata": (lambda step: (step / "params/_METADATA").unlink(), "params/_METADATA is missing"),
    "deleted metadata": (lambda step: (step / "_CHECKPOINT_METADATA").unlink(), "_CHECKPOINT_METADATA is missing"),
    "no commit mark": (lambda step: (step / commit.COMMIT_MARK).unlink(), "not completed"),
    "damaged commit mark": (lambda step: (step / commit.COMMIT_MARK).write_text("{"), "damaged"),
    "temporary name": (lambda step: step.rename(f"{step}.orbax-checkpoint-tmp-17"), "save was interrupted"),
    "interrupted removal": (lambda step: step.rename(f"{step}.removing"), "removal was interrupted"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_latest_step_is_skipped_and_said(copy, kind):
    damage, why = DAMAGE[kind]
    damage(copy / "30")
    store = Store(copy)
    assert store.latest() == 20
    assert store.steps() == [10, 20]
    [(step, reason)] = store.skipped()
    assert step == 30
    assert re.search(why, reason)
    with pytest.raises(CheckpointError, match=r"step 30 .*; complete steps: 10, 20"):
        store.restore(30, {})


@pytest.mark.parametrize("kind", ["empty directory", "truncated data", "no commit mark", "temporary name"])
def test_a_later_save_at_a_damaged_step_is_really_written(copy, kind):
    DAMAGE[kind][0](copy / "30")
    saved = make_state(99)
    with Store(copy) as store:
        store.save(30, saved, {}, stored_shapes=PADDED)
        assert_restored(store.restore(30, abstract(saved), stored_shapes=PADDED), saved, abstract(saved))
        assert store.steps() == [10, 20, 30]
        assert store.skipped() == []


def test_a_complete_step_is_never_overwritten(copy):
    with Store(copy) as store, pytest.raises(CheckpointError, match="already holds a complete checkpoint of step 30"):
        store.save(30, make_state(1), {}, stored_shapes=PADDED)
    assert_restored(restore(copy, 30, abstract(make_state())), make_state(30), abstract(make_state()))


def test_a_step_that_is_removed_while_others_look_is_not_there(copy, monkeypatch):
    """The run that writes removes old steps; a reader must neither fail nor call them damaged."""
    fault = commit.fault

    def remove_and_look(step_directory: Path) -> str | None:
        shutil.rmtree(step_directory)
        return fault(step_directory)

    def look_and_remove(step_directory: Path) -> str:
        shutil.rmtree(step_directory)
        return "file _METADATA is missing"

    for look in (remove_and_look, look_and_remove):
        monkeypatch.setattr(commit, "fault", look)
        assert commit.scan(copy) == ([], [])
        (copy / "50").mkdir()


def test_unrelated_entries_are_left_alone(copy):
    (copy / "notes").mkdir()
    (copy / "007").mkdir()
    (copy / "40").write_text("a file")
    store = Store(copy)
    assert store.steps() == [10, 20, 30]
    assert store.skipped() == []


def test_an_unreadable_tree_names_the_step_and_the_remedy(copy):
    wipe(copy / "30" / "params", "d/*")
    with pytest.raises(
        CheckpointError, match=r"step 30 .*section params is damaged\n-> resume from another step: 10, 20"
    ):
        restore(copy, 30, abstract(make_state()))


def test_unreadable_data_names_the_leaf(tmp_path):
    state = {"params": {"good": put(np.zeros((8, 4), np.float32)), "bad": put(np.random.random((512, 512)), P("fsdp"))}}
    with Store(tmp_path) as store:
        store.save(1, state, {})
        store.wait()
        [data] = [p for p in tmp_path.glob("1/params/ocdbt.process_0/d/*") if p.stat().st_size > 2**20]
        data.write_bytes(b"\0" * data.stat().st_size)
        with pytest.raises(CheckpointError, match=r"(?s)step 1 of .*bad.*resume from another step: there is none"):
            store.restore(1, abstract(state))


def test_an_empty_or_absent_directory_has_no_steps(tmp_path):
    store = Store(tmp_path / "absent")
    assert (store.steps(), store.skipped(), store.latest()) == ([], [], None)
    assert not (tmp_path / "absent").exists()
    with pytest.raises(CheckpointError, match=r"step 5 .* does not exist; it has no complete step"):
        store.metadata(5)


# --- background saves, retention ------------------------------------------------------------------------------------


def small(step: int) -> dict:
    return {"params": {"w": put(np.full((8, 4), step, np.float32), P("fsdp"))}}


def test_a_step_counts_only_when_its_save_is_complete(tmp_path):
    with Store(tmp_path) as store:
        store.save(1, small(1), {})
        assert store.steps() == []
        assert store.skipped() == []
        store.wait()
        assert store.steps() == [1]


def test_only_the_newest_are_kept_and_remnants_go(tmp_path):
    (tmp_path / "3.orbax-checkpoint-tmp-1").mkdir()
    (tmp_path / "2").mkdir()
    with Store(tmp_path, keep=2) as store:
        for step in (1, 4, 6, 9):
            store.save(step, small(step), {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["6", "9"]


def test_damaged_steps_do_not_count_as_kept(tmp_path):
    with Store(tmp_path, keep=2) as store:
        for step in (1, 2):
            store.save(step, small(step), {})
        store.wait()
        (tmp_path / "5").mkdir()
        store.save(3, small(3), {})
        store.wait()
        assert store.steps() == [2, 3]


def test_the_step_just_saved_is_kept_even_when_newer_ones_exist(tmp_path):
    with Store(tmp_path, keep=1) as store:
        for step in (9, 4):
            store.save(step, small(step), {})
    assert Store(tmp_path).steps() == [4, 9]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_failing_disk_surfaces_at_the_next_call_and_names_the_last_good_step(tmp_path):
    big = {"params": {"w": put(np.random.default_rng(0).random((512, 512), np.float32))}}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    store = Store(tmp_path)
    store.save(1, small(1), {})
    store.wait()
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**17, hard))  # a write beyond 128 KiB fails, as on a full disk
        store.save(2, big, {})
        with pytest.raises(CheckpointError, match=r"saving step 2 .*the last good checkpoint is step 1"):
            store.save(3, small(3), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.latest() == 1
    store.save(2, big, {})  # the same step, once there is room again
    store.close()
    assert store.steps() == [1, 2]


def test_a_failed_save_at_exit_is_an_error_but_never_hides_another(tmp_path):
    file = tmp_path / "file"
    file.write_text("not a directory")
    with (
        pytest.raises(CheckpointError, match=r"saving step 1 .*there is no complete checkpoint"),
        Store(file / "x") as store,
    ):
        store.save(1, small(1), {})


@pytest.mark.parametrize("step", [-1, 2.0, np.int64(3), "4"])
def test_a_step_is_a_natural_number(tmp_path, step):
    with Store(tmp_path) as store, pytest.raises(ValueError, match="step = "):
        store.save(step, small(1), {})


def test_names_of_directories_are_checked(tmp_path):
    with pytest.raises(CheckpointError, match="object stores are not supported yet"):
        Store("gs://bucket/run")
    with pytest.raises(ValueError, match="at least one"):
        Store(tmp_path, keep=0)


def test_ctrl_c_does_not_wait_for_a_save(tmp_path, monkeypatch):
    """The second Ctrl-C means now; the step that was being saved is passed over by the next run."""
    release = threading.Event()
    monkeypatch.setattr(Store, "_finish", lambda *_: release.wait(60))
    store = Store(tmp_path)
    started = time.monotonic()
    try:
        store.save(1, {"params": {"w": jnp.ones(4)}}, {})
        with pytest.raises(KeyboardInterrupt), store:
            raise KeyboardInterrupt
        assert time.monotonic() - started < 30
        assert store.latest() is None
    finally:
        release.set()


def test_old_steps_that_cannot_be_removed_are_a_warning(tmp_path, monkeypatch):
    """The newest step is safe; what is left is removed by the next save or the next run."""
    rmtree, broken = shutil.rmtree, True

    def failing(path, *arguments, **settings):
        if broken:
            raise OSError("Device or resource busy")
        rmtree(path, *arguments, **settings)

    warnings = []
    with Store(tmp_path, keep=1, warn=warnings.append) as store:
        store.save(1, {"params": {"w": put(np.ones(3))}}, {})
        store.wait()
        monkeypatch.setattr(commit.shutil, "rmtree", failing)
        store.save(2, {"params": {"w": put(np.ones(3))}}, {})
        store.wait()
        (warning,) = warnings
        assert warning.startswith("step 2 is saved in ")
        assert warning.endswith("older checkpoints could not be removed: Device or resource busy")
    with Store(tmp_path, keep=1, warn=warnings.append) as store:
        assert store.steps() == [2]
        assert store.tidy() == ["1.removing could not be removed: Device or resource busy"]
        broken = False
        store.save(3, {"params": {"w": put(np.ones(3))}}, {})
    assert len(warnings) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["3"]
