"""kill -9 in the middle of a save, of one process and of all: the step before is resumed as if nothing had happened."""

import time
from pathlib import Path

import pytest

from jaxpar.checkpoint.store import Store
from tests.cli.command import PROGRAM, Command, ended, finish, finish_all, start_all, wait_until
from tests.recovery.expected import assert_rows_equal
from tests.recovery.pausing import PAUSED
from tests.trainer.runs import rows_of

KILLED_AT = 4
LONGEST_WAIT_S = 60
"""A collective with a lost process fails at once; without one, JAX would notice its silence after 100 s."""

CUT_OFF = "its save was interrupted (4.orbax-checkpoint-tmp"
NOT_MARKED = "its save was not completed (no jaxpar_files.json)"


def pausing(place: str) -> tuple[str, ...]:
    return ("-m", "tests.recovery.pausing", place, str(KILLED_AT))


@pytest.mark.proof
@pytest.mark.parametrize(
    ("programs", "killed", "why"),
    [
        pytest.param((PROGRAM, pausing("arrays")), {1}, CUT_OFF, id="one, writing its arrays"),
        pytest.param((pausing("tree"), PROGRAM), {0}, CUT_OFF, id="process 0, finishing"),
        pytest.param((pausing("mark"), PROGRAM), {0}, NOT_MARKED, id="process 0, committing"),
        pytest.param((PROGRAM, pausing("arrays")), {0, 1}, CUT_OFF, id="all, writing"),
        pytest.param((pausing("mark"), PROGRAM), {0, 1}, NOT_MARKED, id="all, committing"),
    ],
)
def test_killed_in_a_save(on_two_devices, uninterrupted, jaxpar: Command, tmp_path: Path, programs, killed, why):
    processes = start_all(on_two_devices, cwd=tmp_path, programs=programs)
    with ended(*processes):
        (paused,) = (process for process, program in zip(processes, programs, strict=True) if program != PROGRAM)
        wait_until((tmp_path / PAUSED).exists, paused)
        for i in killed:
            processes[i].kill()
        killed_at = time.monotonic()
        codes = [finish(process).code for process in processes]
        assert time.monotonic() - killed_at < LONGEST_WAIT_S
    assert all(code != 0 for code in codes)
    with Store(tmp_path / "run" / "checkpoints") as store:
        assert store.steps() == [2]

    first, second = finish_all(start_all(on_two_devices, "train.stop_at=6", cwd=tmp_path))
    assert (first.code, second.code) == (0, 0), (first.err, second.err)
    assert f"warning: checkpoint of step {KILLED_AT} is passed over: {why}" in first.err
    assert "resumed from step 2 of" in first.err
    assert_rows_equal(rows_of(tmp_path / "run" / "metrics.jsonl"), uninterrupted.rows[:6])
    with Store(tmp_path / "run" / "checkpoints") as store:
        assert store.steps() == [2, KILLED_AT, 6]
        assert store.skipped() == []
    verified = jaxpar("verify-checkpoint", tmp_path / "run", "--step", str(KILLED_AT))
    assert verified.code == 0, verified.err
