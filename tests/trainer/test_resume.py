"""An interrupted run is the run that was not interrupted: losses, parameters, order of the data, metrics, programs."""

import itertools

import numpy as np
import pytest

from jaxpar.checkpoint.store import Store
from jaxpar.config import ConfigError
from jaxpar.runtime.lock import RunLock
from tests.trainer.runs import BATCH, ROWS, STEPS, Run, column, copied, run, saved_arrays

STOPS = (1, 4, 6)
"""In the middle of the first epoch, in the middle of the second, and where the third begins."""


@pytest.fixture(scope="module")
def legs(tmp_path_factory) -> list[Run]:
    """The run of ``uninterrupted`` in four processes' worth of legs, each going on from the one before."""
    directory = tmp_path_factory.mktemp("legs") / "run"
    ends = [*STOPS, None]
    modes = ["auto", "must", str(directory / "checkpoints"), "auto"]
    return [
        run(directory, train={"stop_at": end}, checkpoint={"resume": mode})
        for end, mode in zip(ends, modes, strict=True)
    ]


@pytest.fixture
def stopped(legs, tmp_path) -> Run:
    """A run of its own that has stopped after step 1."""
    directory = copied(legs[0].directory, tmp_path / "stopped")
    for step in (4, 6, STEPS):
        remove_checkpoint(directory, step)
    return directory


def test_losses_and_norms_are_those_of_the_uninterrupted_run(legs, uninterrupted):
    rows, expected = legs[-1].rows, uninterrupted.rows
    for name in ("loss", "grad_norm", "lr", "cross_entropy"):
        np.testing.assert_allclose(column(rows, name), column(expected, name), rtol=1e-6, err_msg=name)


def test_parameters_and_moments_are_those_of_the_uninterrupted_run(legs, uninterrupted):
    arrays = saved_arrays(legs[-1].directory, STEPS)
    for name, expected in saved_arrays(uninterrupted.directory, STEPS).items():
        np.testing.assert_allclose(arrays[name], expected, rtol=1e-6, atol=1e-8, err_msg=name)
    assert arrays["optimizer/0/count"] == STEPS


def test_the_same_samples_in_the_same_order(legs, uninterrupted):
    assert column(legs[-1].rows, "ids") == column(uninterrupted.rows, "ids")


def test_metrics_have_every_step_once(legs):
    assert column(legs[-1].rows, "step") == list(range(1, STEPS + 1))
