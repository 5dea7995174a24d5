"""The training step as the CUDA compiler makes it for H100s, without a GPU. Fails where that compiler is missing."""

import functools
import json

import pytest
import typer
from typer.testing import CliRunner

from jaxpar.cli.plan import plan

pytestmark = pytest.mark.proof

LLAMA_8B = ("model.preset=llama-3.1-8b", "data.seq_len=8192")
LLAMA_1B = ("model.preset=llama-3.2-1b", "data.seq_len=8192", "data.pack=false")
MESHES = {
    "fsdp8": ("mesh.fsdp=8", "train.global_batch_size=8"),
    "fsdp64": ("mesh.fsdp=64", "train.global_batch_size=64"),
    "fsdp4 tensor2": ("mesh.fsdp=4", "mesh.tensor=2", "train.global_batch_size=4"),
    "hybrid 2x8": ("mesh.data=2", "mesh.fsdp=8", "train.global_batch_size=16"),
}
PROGRAMS = {
    **{f"8b {name}": (*LLAMA_8B, *mesh) for name, mesh in MESHES.items()},
    **{f"1b {name}": (*LLAMA_1B, *mesh) for name, mesh in MESHES.items()},
}
"""8B packed, by tokamax; 1B unpacked, by cuDNN."""

EXPOSED = {
    # Sequence parallel: products, reduce-scatter, norm, gather and the next products each wait for the one before; only
    # gathers and gradients of weights can come between, and a small block has few.
    # Options that hide it leave the once-per-step all-reduces over data and the head's reduce-scatter exposed instead.
    "8b hybrid 2x8": {("all-gather", "fsdp", "backward")},
    "8b fsdp4 tensor2": {("reduce-scatter", "tensor", "backward")},
    "1b fsdp4 tensor2": {
        ("all-gather", "tensor", "forward"),
        ("reduce-scatter", "tensor", "forward"),
        ("reduce-scatter", "tensor", "backward"),
    },
}
"""In-loop collectives of 1 MiB or more that nothing hides: (op, axis, loop)."""

HIDDEN = {"8b fsdp8": 0.97, "8b fsdp64": 0.97, "1b fsdp8": 0.97, "1b fsdp64": 0.97, "1b fsdp4 tensor2": 0.8}
"""Share of the bytes that something hides, at least; of the others 0.9."""

MIB = 2**20


@functools.cache
def report_of(*arguments):
    app = typer.Typer()
    app.command()(plan)
    result = CliRunner().invoke(app, [*arguments, "--compile", "gpu", "--json"])
    assert result.exit_code == 0, result.exception
    return json.loads(result.stdout)


@pytest.fixture(params=PROGRAMS, scope="module")
def program(request):
    """Name and ``compiled`` of a program."""
    return request.param, report_of(*PROGRAMS[request.param], "--gpu", "h100")["compiled"]


def large_in_loops(compiled):
    return [row for row in compiled["collectives"] if row["loop"] and row["bytes"] / row["count"] >= MIB]


def test_collectives_in_loops_are_hidden(program):
    name, compiled = program
    exposed = {
        (row["op"], row["axis"], row["loop"])
        for row in large_in_loops(compiled)
        if not (row["async"] and row["overlapped"])
    }
    assert exposed == EXPOSED.get(name, set())
    assert compiled["hidden_share"] > HIDDEN.get(name, 0.9)


def test_types_on_the_wire(program):
    _, compiled = program
    for row in compiled["collectives"]:
        is_reduction = row["op"] in ("reduce-scatter", "all-reduce")
        if row["bytes"] / row["count"] >= MIB and not (is_reduction and row["dtype"] == "f32"):
            assert set(row["dtype"].split("+")) <= {"bf16", "s32"}, row


def test_gradients_are_reduce_scattered(program):
    _, compiled = program
    loops = large_in_loops(compiled)
    assert any((row["op"], row["axis"], row["loop"]) == ("reduce-scatter", "fsdp", "backward") for row in loops)
    assert not [row for row in loops if row["op"] == "all-reduce"]


def test_attention_is_the_kernel_that_was_chosen(program):
    name, compiled = program
    kernel, target = ("mosaic_gpu", "mosaic_gpu") if name.startswith("8b") else ("cudnn", "__cudnn$fmhaSoftmax")
    assert compiled["attention"].startswith(f"attention {kernel} (auto")
    assert any(target in called for called in compiled["custom_calls"]), compiled["custom_calls"]


def test_memory_is_what_the_arithmetic_says(program):
    _, compiled = program
    assert abs(compiled["difference"]) <= 0.05, compiled["difference"]


def test_no_lint_but_the_stated_exposures(program):
    name, compiled = program
    assert {lint["rule"] for lint in compiled["lints"]} <= ({"collective not overlapped"} if name in EXPOSED else set())


@pytest.mark.parametrize(
    ("gpu", "arguments", "kernel"),
    [
        ("a100", (*LLAMA_8B, *MESHES["fsdp8"], "model.num_layers=2"), "triton"),
        ("b200", (*LLAMA_1B, *MESHES["fsdp8"], "model.num_layers=2"), "cudnn"),
    ],
)
def test_other_generations_compile(gpu, arguments, kernel):
    compiled = report_of(*arguments, "--gpu", gpu)["compiled"]
    assert compiled["attention"].startswith(f"attention {kernel} (auto")
    assert compiled["peak_bytes"] > compiled["argument_bytes"] > 0


def test_8b_on_64_compiles_in_a_minute_and_two_gigabytes():
    """Processor time of two cores, since a loaded machine has less of them."""
    compiled = report_of(*PROGRAMS["8b fsdp64"], "--gpu", "h100")["compiled"]
    assert compiled["cpu_s"] < 120
    assert compiled["max_rss_bytes"] < 2e9


KERNELS = {"cudnn": ("data.pack=false", "__cudnn$fmhaSoftmax"), "tokamax": ("data.pack=true", "mosaic_gpu_v2")}
"""What chooses a kernel, and the custom call of its forward pass (tokamax: of its backward passes too)."""


@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_is_not_run_again_when_it_is_kept(kernel):
    packing, call = KERNELS[kernel]
    size = ("model.preset=llama-3.2-1b", "model.num_layers=5", "data.seq_len=4096", packing)
    mesh = ("mesh.fsdp=8", "train.global_batch_size=16", "--devices", "8", "--gpu", "h100")
    counts = {
        remat: report_of(*size, *mesh, f"train.attention={kernel}", f"train.remat={remat}")["compiled"]["custom_calls"]
        for remat in ("full", "selective", "offload")
    }
    calls = {remat: sum(n for name, n in found.items() if name.split()[0] == call) for remat, found in counts.items()}
    assert calls["selective"] == calls["offload"] == calls["full"] - 1


def test_gradients_cross_the_data_axis_in_the_type_that_was_asked_for():
    """Shards of weights; sums of norm scales and losses are smaller."""
    size = ("model.preset=llama-3.2-1b", "model.num_layers=2", "data.seq_len=1024", "data.pack=false")
    mesh = ("mesh.data=2", "mesh.fsdp=4", "train.global_batch_size=8", "--devices", "8", "--gpu", "h100")
    rows = report_of(*size, *mesh, "precision.reduce=bfloat16")["compiled"]["collectives"]
    reductions = [row for row in rows if row["op"] in ("all-reduce", "reduce-scatter")]
    large = [row for row in reductions if row["bytes"] / row["count"] >= MIB]
    assert {(row["op"], row["axis"]) for row in large} >= {("all-reduce", "data"), ("reduce-scatter", "fsdp")}
    assert {row["dtype"] for row in large} == {"bf16"}, large
