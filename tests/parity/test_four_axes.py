"""Any four axes together, two devices on each: sixteen fake devices against one."""

import itertools
import os
import subprocess
import sys

import pytest

from jaxpar.config import AXES
from tests.parity.harness import assert_same, build, model_key, parity_config, single_device, train
from tests.parity.test_experts import SOFTMAX

MICROBATCHES, ROWS = 2, 16


def case(axes: tuple[str, ...]) -> tuple[dict, dict, dict]:
    """Mesh, model and pipeline of a run: experts where their axis is, whole weights in stages where they are legal."""
    is_plain = not {"expert", "context"} & {*axes}
    return (
        dict.fromkeys(axes, 2),
        SOFTMAX if "expert" in axes else {},
        {"gather": "per_step"} if is_plain and "pipeline" in axes else {},
    )


CASES = {" x ".join(axes): case(axes) for axes in itertools.combinations(AXES, 4)}


def check(mesh: dict, model: dict, pipeline: dict) -> None:
    rows = {"microbatches": MICROBATCHES, "global_batch_size": ROWS}
    config = parity_config(mesh, model=dict(model_key(model)), train=rows, pipeline=pipeline)
    assert_same(train(build(config)), single_device(model_key(model), MICROBATCHES, "full", ROWS))


@pytest.mark.proof
@pytest.mark.parametrize(("mesh", "model", "pipeline"), CASES.values(), ids=CASES)
def test_sixteen_devices_equal_one(mesh, model, pipeline):
    """In a process of its own: a process has the same fake devices for life."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=16"
    child = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import check; check{(mesh, model, pipeline)}"],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert child.returncode == 0, child.stderr[-3000:]
