"""Pipelines as the CUDA compiler makes them for H100s, without a GPU: transfers, lanes, memory, attention kernels."""

import pytest

from tests.h100.test_h100_programs import LLAMA_8B, MIB, large_in_loops, report_of

pytestmark = pytest.mark.proof

SIZE = (
    *(*LLAMA_8B[:1], "data.seq_len=4096", "mesh.pipeline=4", "mesh.fsdp=2", "pipeline.gather=per_microbatch"),
    *("--devices", "8", "--gpu", "h100"),
)
PROGRAMS = {
    "1f1b": ("model.num_layers=8", "data.pack=false", "train.microbatches=4", "train.global_batch_size=8"),
    "1f1b, 32": ("model.num_layers=8", "data.pack=false", "train.microbatches=32", "train.global_batch_size=64"),
    "gpipe, 32": (
        *("model.num_layers=8", "data.pack=false", "train.microbatches=32", "train.global_batch_size=64"),
        "pipeline.schedule=gpipe",
    ),
    "interleaved": (
        *("model.num_layers=16", "train.microbatches=8", "train.global_batch_size=16"),
        *("pipeline.schedule=interleaved", "pipeline.chunks=2"),
    ),
}
"""8B with fewer layers; unpacked by cuDNN, the last packed by tokamax."""

SYNCHRONOUS = {
    # Nothing stands between the end of a tick and the next: what one lane computes is the other stages' next input.
    ("collective-permute", "pipeline", "forward"),
    # Between lanes, which are conditionals: the embedding's and the head's parts of all stages.
    ("all-reduce", "pipeline", "forward"),
    ("all-to-all", "fsdp", "forward"),
}
"""Collectives of 1 MiB or more in the loop over ticks that are not async in every instance."""


def compiled_of(name):
    return report_of(*SIZE, *PROGRAMS[name])["compiled"]


@pytest.fixture(params=PROGRAMS, scope="module")
def compiled(request):
    return compiled_of(request.param)


def test_transfers_are_async_but_for_those_stated(compiled):
    synchronous = {(row["op"], row["axis"], row["loop"]) for row in large_in_loops(compiled) if not row["async"]}
    assert synchronous == SYNCHRONOUS
    permutes = [row for row in large_in_loops(compiled) if row["op"] == "collective-permute"]
    # Activations on, gradients back: one of the two runs beside work.
    assert sorted((row["count"], row["async"]) for row in permutes) == [(1, False), (1, True)]


def test_lanes_stay_conditionals(compiled):
    """Embedding, forward, loss, embedding again, backward, gradient of the embedding."""
    assert compiled["conditionals"] == 6


def test_weights_are_gathered_in_the_loops_in_the_compute_type(compiled):
    gathers = [row for row in compiled["collectives"] if row["op"] == "all-gather" and row["axis"] == "fsdp"]
    assert all(row["loop"] and row["async"] for row in gathers if row["bytes"] / row["count"] >= MIB)
    assert {row["dtype"] for row in gathers if row["bytes"] / row["count"] >= MIB} == {"bf16"}
    # Among them those for gathers of whole stacks, and for float32 on the wire.
    assert compiled["lints"] == []


def test_weights_gathered_once_per_step_leave_nothing_over_fsdp_in_the_loop():
    arguments = [argument.replace("per_microbatch", "per_step") for argument in SIZE]
    compiled = report_of(*arguments, *PROGRAMS["1f1b"])["compiled"]
    rows = [row for row in compiled["collectives"] if row["axis"] == "fsdp" and row["bytes"] / row["count"] >= MIB]
    assert {(row["op"], row["dtype"], row["loop"]) for row in rows} == {
        ("all-gather", "bf16", None),
        ("reduce-scatter", "f32", None),
    }
    assert "gather of stacked weights" not in {lint["rule"] for lint in compiled["lints"]}
    assert abs(compiled["difference"]) <= 0.05, compiled["difference"]


def test_memory_is_what_the_arithmetic_says(compiled):
    """With few layers per stage; with 8 the copies of transposed weights that XLA keeps are 6% (tests/plan)."""
    assert abs(compiled["difference"]) <= 0.05, compiled["difference"]


def test_memory_of_1f1b_does_not_grow_with_microbatches():
    few, many, gpipe = (compiled_of(name)["temp_bytes"] for name in ("1f1b", "1f1b, 32", "gpipe, 32"))
    assert many <= 1.1 * few
    # gpipe keeps the inputs and the output gradients of 32 microbatches, bfloat16 [4096, 4096].
    assert gpipe >= many + 2 * 24 * 2 * 4096 * 4096


def test_attention_runs_forward_three_times(compiled):
    """In the forward lane, in the backward lane, and for its log-sums; a tokamax kernel's backward pass is two."""
    calls = compiled["custom_calls"]
    if tokamax := sum(count for name, count in calls.items() if name.startswith("mosaic_gpu")):
        assert tokamax == 3 + 2
    else:
        assert (calls["__cudnn$fmhaSoftmax"], calls["__cudnn$fmhaSoftmaxBackward"]) == (3, 1)
