"""An interrupted run is the run that was not interrupted: losses, parameters, order of the data, metrics, programs."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest

from jaxpar import Trainer
from jaxpar.config import ConfigError
from jaxpar.runtime.lock import RunLock
from tests.trainer.runs import BATCH, ROWS, SEQ_LEN, STEPS, Run, column, copied, rows_of, run, saved_arrays, tiny


@dataclasses.dataclass(frozen=True)
class Legs:
    """Twelve steps in four runs, each going on from the one before."""

    runs: list[Run]
    after_step_1: Path
    """A copy of the run directory as the first of them left it."""

    @property
    def last(self) -> Run:
        return self.runs[-1]


@pytest.fixture(scope="module")
def legs(tmp_path_factory) -> Legs:
    """Stops in the middle of the first epoch, in the middle of the second, and where the third begins."""
    root = tmp_path_factory.mktemp("legs")
    directory = root / "run"
    runs = [run(directory, train={"stop_at": 1})]
    after_step_1 = copied(directory, root / "after_step_1")
    for stop_at, resume in ((4, "must"), (6, str(directory / "checkpoints")), (None, "auto")):
        runs.append(run(directory, train={"stop_at": stop_at}, checkpoint={"resume": resume}))
    return Legs(runs, after_step_1)


@pytest.fixture
def stopped(legs, tmp_path) -> Path:
    """Directory of a run that was stopped after its first step."""
    return copied(legs.after_step_1, tmp_path / "stopped")


def test_losses_and_norms_are_those_of_the_uninterrupted_run(legs, uninterrupted):
    for name in ("loss", "grad_norm", "lr", "cross_entropy"):
        expected = column(uninterrupted.rows, name)
        np.testing.assert_allclose(column(legs.last.rows, name), expected, rtol=1e-6, err_msg=name)


def test_parameters_and_moments_are_those_of_the_uninterrupted_run(legs, uninterrupted):
    arrays = saved_arrays(legs.last.directory, STEPS)
    for name, expected in saved_arrays(uninterrupted.directory, STEPS).items():
        np.testing.assert_allclose(arrays[name], expected, rtol=1e-6, atol=1e-8, err_msg=name)
    assert arrays["optimizer/0/count"] == STEPS


def test_the_same_samples_in_the_same_order(legs, uninterrupted):
    assert column(legs.last.rows, "ids") == column(uninterrupted.rows, "ids")


def test_metrics_have_every_step_once(legs):
    assert column(legs.last.rows, "step") == list(range(1, STEPS + 1))


def test_each_leg_ends_where_it_was_told_to(legs):
    assert [leg.outcome.step for leg in legs.runs] == [1, 4, 6, STEPS]
    assert all(leg.outcome.reason.name == "NONE" for leg in legs.runs)


def test_each_leg_compiles_one_program_and_initialises_only_at_first(legs):
    assert [leg.compilations.count("train_step") for leg in legs.runs] == [1, 1, 1, 1]
    assert [leg.compilations.count("init") for leg in legs.runs] == [1, 0, 0, 0]


def test_a_finished_run_started_again_trains_nothing(legs, tmp_path):
    directory = copied(legs.last.directory, tmp_path / "finished")
    again = run(directory)
    assert (again.outcome.step, again.outcome.loss) == (STEPS, None)
    assert again.rows == legs.last.rows


def test_another_batch_size_goes_on_at_the_next_sample_in_a_run_of_its_own(legs, uninterrupted, stopped, tmp_path):
    """Eight samples are done; two batches of sixteen follow: the rest of the first epoch, and part of the second."""
    source = str(stopped / "checkpoints")
    train = {"global_batch_size": 2 * BATCH, "microbatches": 4, "stop_at": 3}
    other = run(tmp_path / "other", train=train, checkpoint={"resume": source})
    order = list(itertools.chain.from_iterable(column(uninterrupted.rows, "ids")))
    rows = other.rows
    assert column(rows, "step") == [2, 3]
    assert list(itertools.chain.from_iterable(column(rows, "ids"))) == order[BATCH : BATCH + 4 * BATCH]
    assert other.outcome.checkpoint == tmp_path / "other" / "checkpoints" / "3"
    assert column(rows_of(stopped / "metrics.jsonl"), "step") == [1]
    # lr belongs to the optimizer step, not to samples or microbatches.
    assert column(rows, "lr") == column(uninterrupted.rows, "lr")[1:3]

    # The same command goes on from the run's own checkpoint, not once more from where it came from.
    again = run(tmp_path / "other", train={**train, "stop_at": 4}, checkpoint={"resume": source})
    assert column(again.rows, "step") == [2, 3, 4]
    assert again.rows[:2] == rows


@pytest.mark.parametrize(
    ("changed", "key", "before", "now"),
    [
        ({"run": {"seed": 1}}, "run.seed", 0, 1),
        ({"data": {"shuffle": False}}, "data.shuffle", True, False),
        ({"data": {"num_samples": ROWS + 8}}, "data (rows)", None, None),
        ({"data": {"validation_fraction": 0.2}}, "data (rows)", None, None),
        ({"data": {"seq_len": 2 * SEQ_LEN}}, "data.seq_len", SEQ_LEN, 2 * SEQ_LEN),
        ({"model": {"mlp_dim": 128}}, "model.mlp_dim", 64, 128),
        ({"model": {"rope_theta": 5e5}}, "model.rope_theta", 1e4, 5e5),  # fits every array, and is another model
        ({"precision": {"params": "bfloat16"}}, "precision.params", "float32", "bfloat16"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_run_than_the_checkpoint_s_is_refused_before_anything_is_written(stopped, changed, key, before, now):
    found = contents(stopped)
    with pytest.raises(ConfigError) as error:
        run(stopped, **changed)
    (problem,) = (p for p in error.value.problems if p.key == key)
    if now is not None:
        assert problem.value == now
        assert f"trained with {before!r}" in problem.message
    assert "step 1 of" in problem.message
    assert "another run.dir" in problem.remedy
    assert contents(stopped) == found


def contents(directory: Path) -> dict[Path, tuple[bytes, int]]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_never_refuses_a_directory_with_checkpoints(stopped):
    found = contents(stopped)
    with pytest.raises(ConfigError, match="already has step 1") as error:
        run(stopped, checkpoint={"resume": "never"})
    assert "another run.dir" in str(error.value)
    assert contents(stopped) == found


def test_must_refuses_a_directory_without(tmp_path):
    with pytest.raises(ConfigError, match="no complete checkpoint") as error:
        run(tmp_path / "fresh", checkpoint={"resume": "must"})
    assert "resume = auto" in str(error.value)
    assert not (tmp_path / "fresh").exists()


def test_a_path_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no complete checkpoint") as error:
        run(tmp_path / "fresh", checkpoint={"resume": str(tmp_path)})
    assert "name a run" in error.value.problems[0].remedy
    assert not (tmp_path / "fresh").exists()


@pytest.mark.parametrize("inside", ["", "checkpoints", "checkpoints/1"])
def test_a_run_its_checkpoints_or_one_step_may_be_named(stopped, tmp_path, inside):
    other = run(tmp_path / "other", train={"stop_at": 2}, checkpoint={"resume": str(stopped / inside)})
    assert column(other.rows, "step") == [2]


def test_a_step_that_is_not_there_is_refused_with_those_that_are(stopped, tmp_path):
    (stopped / "checkpoints" / "7").mkdir()
    (stopped / "checkpoints" / "7" / "_CHECKPOINT_METADATA").touch()
    with pytest.raises(ConfigError, match="step 7 is not a complete checkpoint: its save was not completed") as error:
        run(tmp_path / "fresh", checkpoint={"resume": str(stopped / "checkpoints" / "7")})
    assert "complete steps: [1]" in str(error.value)


def test_a_damaged_checkpoint_is_passed_over_and_metrics_after_the_one_before_are_written_again(legs, tmp_path):
    """The newest checkpoint has lost a file, and the last line of the metrics was cut off: resumed from step 6."""
    directory = copied(legs.last.directory, tmp_path / "damaged")
    next((directory / "checkpoints" / str(STEPS)).rglob("d/*")).unlink()
    with (directory / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 13, "lo')
    again = run(directory, train={"stop_at": 7})
    assert column(again.rows, "step") == list(range(1, 8))
    assert again.rows[:6] == legs.last.rows[:6]
    for name in ("loss", "ids"):
        assert again.rows[6][name] == legs.last.rows[6][name]
    assert f"checkpoint of step {STEPS} is passed over: file" in (directory / "log.txt").read_text()


def test_a_directory_in_use_is_refused_with_who_uses_it(stopped):
    with RunLock(stopped), pytest.raises(ConfigError, match="another run is using it: process") as error:
        run(stopped)
    assert error.value.problems[0].key == "run.dir"
    assert column(rows_of(stopped / "metrics.jsonl"), "step") == [1]


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be created"):
        Trainer(tiny(tmp_path / "file" / "run")).run()
