import pytest

from jaxpar.config import config_to_toml
from tests.cli.command import Command
from tests.trainer.runs import reuse_train_steps, share_compiled_programs, tiny


@pytest.fixture(scope="package", autouse=True)
def compiled_programs(tmp_path_factory):
    yield from share_compiled_programs(tmp_path_factory.getbasetemp() / "compiled")


@pytest.fixture(autouse=True)
def train_steps(monkeypatch):
    """For single tests; fixtures of a wider scope trace and compile as users do."""
    reuse_train_steps(monkeypatch)


@pytest.fixture
def jaxpar(monkeypatch, capsys, tmp_path) -> Command:
    """The command, in a working directory of its own that holds tiny.toml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(config_to_toml(tiny(tmp_path / "run")))
    return Command(monkeypatch, capsys)
