import pytest

from tests.trainer.fixtures import compiled_programs, train_steps  # noqa: F401
from tests.trainer.runs import Run, run


@pytest.fixture(scope="package")
def uninterrupted(compiled_programs, tmp_path_factory) -> Run:  # noqa: F811
    """Twelve steps without a stop, from a fresh directory."""
    return run(tmp_path_factory.mktemp("uninterrupted"), checkpoint={"resume": "never"})
