"""One run that goes on with other numbers of processes: samples, numbers and arrays of the run that never stopped."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxpar.checkpoint.store import Store
from tests.cli.command import finish_all, start_all
from tests.recovery.expected import assert_rows_equal
from tests.trainer.runs import STEPS, rows_of, saved_arrays, tiny

pytestmark = pytest.mark.proof

LEGS = ((4, 2), (2, 5), (1, 9), (4, STEPS))
"""(processes, last step): stopped in the middle of an epoch, of the next one, and where one begins."""


def test_four_processes_then_two_then_one_then_four(tmp_path: Path, tmp_path_factory, uninterrupted):
    cache = str(tmp_path_factory.getbasetemp() / "compiled_for_several")
    begun_at = 0
    for num_processes, stop_at in LEGS:
        config = tiny(
            Path("run"),
            runtime={"cpu_devices": 8 // num_processes, "compilation_cache": cache},
            train={"stop_at": stop_at},
            checkpoint={"keep": 20},
        )
        counts = [tmp_path / f"counts-{stop_at}-{i}.json" for i in range(num_processes)]
        programs = [("-m", "tests.recovery.counting", str(path)) for path in counts]
        results = finish_all(start_all(config, cwd=tmp_path, programs=programs))
        assert [result.code for result in results] == [0] * num_processes, [result.err[-2000:] for result in results]
        assert (f"resumed from step {begun_at} of" in results[0].err) == (begun_at > 0)
        compilations = [json.loads(path.read_text()) for path in counts]
        assert [counted["train_step"] for counted in compilations] == [1] * num_processes
        with Store(tmp_path / "run" / "checkpoints") as store:
            metadata = store.metadata(stop_at)
        assert metadata["processes"] == num_processes
        begun_at = stop_at

    assert_rows_equal(rows_of(tmp_path / "run" / "metrics.jsonl"), uninterrupted.rows)
    arrays, expected = saved_arrays(tmp_path / "run", STEPS), saved_arrays(uninterrupted.directory, STEPS)
    assert arrays.keys() == expected.keys()
    assert any("/mu/" in name for name in expected)
    assert any("/nu/" in name for name in expected)
    errors = {
        name: float(np.max(np.abs(arrays[name] - want))) / float(np.max(np.abs(want)))
        for name, want in expected.items()
    }
    assert {name: error for name, error in errors.items() if error > 1e-5} == {}
