from pathlib import Path

import pytest

from jaxpar.config import Config
from tests.cli.command import Command
from tests.trainer.fixtures import compiled_programs, train_steps  # noqa: F401
from tests.trainer.runs import Run, run, tiny


@pytest.fixture
def jaxpar(monkeypatch, capsys) -> Command:
    """The command, in this process."""
    return Command(monkeypatch, capsys)


@pytest.fixture
def uninterrupted(train_steps, tmp_path_factory) -> Run:  # noqa: F811
    """Twelve steps without a stop, in one process of eight devices; saves every second one."""
    if not _uninterrupted:
        directory = tmp_path_factory.mktemp("uninterrupted") / "run"
        _uninterrupted.append(run(directory, checkpoint={"every": 2, "keep": 20}))
    return _uninterrupted[0]


_uninterrupted: list[Run] = []
"""Not a fixture of a wider scope: those cannot use the train step that other tests have compiled."""


@pytest.fixture(scope="session")
def on_two_devices(tmp_path_factory) -> Config:
    """A run for two processes of one device that saves every second step, in its working directory."""
    return tiny(
        Path("run"),
        runtime={"cpu_devices": 1, "compilation_cache": str(tmp_path_factory.getbasetemp() / "compiled_for_two")},
        mesh={"data": 1, "fsdp": 2, "tensor": 1},
        checkpoint={"every": 2, "keep": 20},
    )
