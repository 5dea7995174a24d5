"""Two processes of four devices against one process of eight: every gradient leaf, parameters after three steps."""

import numpy as np
import pytest

from tests.cli.command import finish_all
from tests.cli.test_two_processes import start_both
from tests.parity.harness import gradient_errors
from tests.trainer.runs import MESH, run, saved_arrays

pytestmark = pytest.mark.proof


# The context axis of eight goes through both processes, which then hold the same rows.
@pytest.mark.parametrize("mesh", [MESH, {"context": 8, "context_mode": "ring"}], ids=str)
def test_two_processes_equal_one(tmp_path, mesh):
    both, alone = tmp_path / "run", tmp_path / "alone"
    overrides = [f"mesh.{key}={value}" for key, value in {**dict.fromkeys(MESH, 1), **mesh}.items()]
    for stop_at in (1, 3):
        results = finish_all(start_both(tmp_path, f"train.stop_at={stop_at}", "checkpoint.keep=3", *overrides))
        assert [result.code for result in results] == [0, 0], results[0].err
        run(alone, train={"stop_at": stop_at}, checkpoint={"keep": 3})

    # After one step the first moment is (1 - b1) times the clipped gradient.
    moments, expected = (
        {name: array for name, array in saved_arrays(directory, 1).items() if "/mu/" in name}
        for directory in (both, alone)
    )
    assert len(expected) > 10
    errors = gradient_errors(moments, expected)
    assert max(errors.values()) <= 1e-5, errors

    params = saved_arrays(both, 3)
    for name, want in saved_arrays(alone, 3).items():
        if name.startswith("params/"):
            np.testing.assert_allclose(params[name], want, atol=1e-5 * float(np.abs(want).max()), err_msg=name)
