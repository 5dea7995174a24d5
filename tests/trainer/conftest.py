from pathlib import Path

import pytest

from tests.trainer.fixtures import compiled_programs, train_steps  # noqa: F401
from tests.trainer.runs import Run, run


@pytest.fixture(scope="package")
def uninterrupted(compiled_programs, tmp_path_factory) -> Run:  # noqa: F811
    """Twelve steps without a stop, from a fresh directory."""
    return run(tmp_path_factory.mktemp("uninterrupted"), checkpoint={"resume": "never"})


@pytest.fixture(scope="package")
def every_third(compiled_programs, tmp_path_factory) -> Path:  # noqa: F811
    """Directory of a run of nine steps with checkpoints 3, 6 and 9; not to be changed."""
    directory = tmp_path_factory.mktemp("every_third") / "run"
    run(directory, train={"stop_at": 9}, checkpoint={"every": 3})
    return directory
