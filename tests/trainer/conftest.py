import pytest

from tests.trainer.runs import Run, run, share_compiled_programs


@pytest.fixture(scope="package", autouse=True)
def compiled_programs(tmp_path_factory):
    yield from share_compiled_programs(tmp_path_factory.getbasetemp() / "compiled")


@pytest.fixture(scope="package")
def uninterrupted(compiled_programs, tmp_path_factory) -> Run:
    """Twelve steps without a stop, from a fresh directory."""
    return run(tmp_path_factory.mktemp("uninterrupted"), checkpoint={"resume": "never"})
