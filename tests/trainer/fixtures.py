"""Fixtures of every package that trains tiny runs in the test's own process; their conftest.py imports them."""

import pytest

from tests.trainer.runs import reuse_train_steps, share_compiled_programs


@pytest.fixture(scope="package", autouse=True)
def compiled_programs(tmp_path_factory):
    yield from share_compiled_programs(tmp_path_factory.getbasetemp() / "compiled")


@pytest.fixture(autouse=True)
def train_steps(monkeypatch):
    """For single tests; fixtures of a wider scope trace and compile as users do."""
    reuse_train_steps(monkeypatch)
