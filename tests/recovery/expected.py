"""What a run that was interrupted must have in common with one that was not."""

import numpy as np

from tests.trainer.runs import column


def assert_rows_equal(rows: list[dict], expected: list[dict]) -> None:
    """The same steps, each once, on the same samples, with the same numbers up to the order of additions."""
    for name in ("step", "ids", "tokens"):
        assert column(rows, name) == column(expected, name), name
    for name in ("loss", "grad_norm", "lr"):
        np.testing.assert_allclose(column(rows, name), column(expected, name), rtol=1e-5, err_msg=name)
