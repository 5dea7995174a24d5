import pytest

from tests.trainer.runs import share_compiled_programs


@pytest.fixture(scope="package", autouse=True)
def compiled_programs(tmp_path_factory):
    yield from share_compiled_programs(tmp_path_factory.getbasetemp() / "compiled")
