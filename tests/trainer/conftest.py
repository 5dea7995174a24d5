from pathlib import Path

import pytest

from tests.trainer.runs import Run, reuse_train_steps, run, share_compiled_programs


@pytest.fixture(scope="package", autouse=True)
def compiled_programs(tmp_path_factory):
    yield from share_compiled_programs(tmp_path_factory.getbasetemp() / "compiled")


@pytest.fixture(autouse=True)
def train_steps(monkeypatch):
    """For single tests; fixtures of a wider scope trace and compile as users do."""
    reuse_train_steps(monkeypatch)


@pytest.fixture(scope="package")
def uninterrupted(compiled_programs, tmp_path_factory) -> Run:
    """Twelve steps without a stop, from a fresh directory."""
    return run(tmp_path_factory.mktemp("uninterrupted"), checkpoint={"resume": "never"})


@pytest.fixture(scope="package")
def every_third(compiled_programs, tmp_path_factory) -> Path:
    """Directory of a run of nine steps with checkpoints 3, 6 and 9; not to be changed."""
    directory = tmp_path_factory.mktemp("every_third") / "run"
    run(directory, train={"stop_at": 9}, checkpoint={"every": 3})
    return directory
