"""A user's own module, which knows nothing of meshes, as the CUDA compiler makes its step for 8 H100s."""

import json

import pytest

from jaxpar.experiments.children import run_child
from jaxpar.experiments.compile.launch import compiler_environment
from tests.h100.own_step import LAYERS, WIDTH

pytestmark = pytest.mark.proof

WEIGHTS = LAYERS * WIDTH * WIDTH
LARGE = 2**20


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """Collectives of 1 MiB or more of a step with these overrides, by (op, axis)."""

    def compiled(*overrides: str) -> dict[tuple[str, str], list[dict]]:
        folder = tmp_path_factory.mktemp("own")
        ended = run_child(
            ["tests.h100.own_step", *overrides, str(folder / "rows.json")],
            environment=compiler_environment(),
            timeout_s=300,
            log=folder / "log.txt",
        )
        assert ended.code == 0, ended.error
        found = {}
        for row in json.loads((folder / "rows.json").read_text()):
            if row["bytes"] / row["count"] >= LARGE:
                found.setdefault((row["op"], row["axis"]), []).append(row)
        return found

    return compiled


def assert_hidden(rows):
    assert all(row["async"] and row["overlapped"] for row in rows), rows


def test_weights_are_gathered_and_gradients_reduce_scattered_behind_other_work(step):
    found = step("mesh.fsdp=8")
    assert found.keys() == {("all-gather", "fsdp"), ("reduce-scatter", "fsdp")}
    gathers, scatters = found["all-gather", "fsdp"], found["reduce-scatter", "fsdp"]
    assert_hidden([*gathers, *scatters])
    assert {row["dtype"] for row in gathers} == {"bf16"}
    assert {row["dtype"] for row in scatters} == {"f32"}
    assert sum(row["bytes"] for row in gathers) == 2 * WEIGHTS
    assert sum(row["bytes"] for row in scatters) == 4 * WEIGHTS // 8


def test_only_shards_cross_the_data_axis_in_the_type_that_was_asked_for(step):
    found = step("mesh.data=2", "mesh.fsdp=4", "precision.reduce=bfloat16")
    assert found.keys() == {("all-gather", "fsdp"), ("reduce-scatter", "fsdp"), ("all-reduce", "data")}
    assert_hidden([*found["all-gather", "fsdp"], *found["reduce-scatter", "fsdp"]])
    for key in (("reduce-scatter", "fsdp"), ("all-reduce", "data")):
        assert {row["dtype"] for row in found[key]} == {"bf16"}
        assert sum(row["bytes"] for row in found[key]) == 2 * WEIGHTS // 4
