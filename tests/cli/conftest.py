import pytest

from jaxpar.config import config_to_toml
from tests.cli.command import Command
from tests.trainer.fixtures import compiled_programs, train_steps  # noqa: F401
from tests.trainer.runs import tiny


@pytest.fixture
def jaxpar(monkeypatch, capsys, tmp_path) -> Command:
    """The command, in a working directory of its own that holds tiny.toml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(config_to_toml(tiny(tmp_path / "run")))
    return Command(monkeypatch, capsys)
