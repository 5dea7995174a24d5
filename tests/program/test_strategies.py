"""What the compiled step of each fsdp strategy gathers, scatters and holds."""

import collections
import math

import pytest

from jaxpar.audit import weight_sized_all_reduces
from tests.parity.harness import build, parity_config
from tests.program.test_compiled_step import (
    COLLECTIVE,
    LAYER_WEIGHTS,
    MODEL,
    NUM_LAYERS,
    PADDED_VOCAB,
    D,
    compiled_report,
)

MICROBATCHES = 3
ROWS = 8 * MICROBATCHES
TABLES = [D * PADDED_VOCAB] * 2
STACKED = [NUM_LAYERS * size for size in LAYER_WEIGHTS]


def strategy_report(strategy: str, mesh: dict = {"fsdp": 8}, microbatches: int = MICROBATCHES, **sections):  # noqa: B006
    train = {"microbatches": microbatches, "global_batch_size": 8 * microbatches, **sections.pop("train", {})}
    return compiled_report({**mesh, "fsdp_strategy": strategy}, train=train, **sections)


def elements(collective) -> int:
    return sum(math.prod(array.dims) for array in collective.arrays)


def assert_gathers_each_weight_once(report) -> None:
    gathers = report.select("all-gather", axes="fsdp")
    assert not [found for found in gathers if found.in_loop]
    assert sorted(size for found in gathers for size in sizes_of(found)) == sorted(STACKED + TABLES)


def sizes_of(collective) -> list[int]:
    return [math.prod(array.dims) for array in collective.arrays]


@pytest.fixture(scope="module")
def grads():
    return strategy_report("grads")


def test_grads_gathers_once_and_scatters_per_block(grads):
    assert_gathers_each_weight_once(grads)
    blocks = [size for found in grads.select("reduce-scatter", axes="fsdp", in_loop=True) for size in sizes_of(found)]
    assert sorted(8 * size for size in blocks) == sorted(LAYER_WEIGHTS + TABLES), "not an eighth of each weight"
    (backward,) = grads.per_layer(NUM_LAYERS)  # of the loops over layers, only this one communicates
    assert backward.is_backward
    assert backward.counts == {("reduce-scatter", ("fsdp",)): 7}
    assert weight_sized_all_reduces(grads, weight_bytes=4 * min(LAYER_WEIGHTS)) == ()


@pytest.mark.proof
def test_optimizer_gathers_once_and_scatters_once():
    report = strategy_report("optimizer")
    assert_gathers_each_weight_once(report)
    scattered = report.select("reduce-scatter", axes="fsdp")
    assert not [found for found in scattered if found.in_loop]
    assert sorted(8 * size for found in scattered for size in sizes_of(found)) == sorted(STACKED + TABLES)
    assert weight_sized_all_reduces(report, weight_bytes=4 * min(LAYER_WEIGHTS)) == ()
    # Microbatches communicate no more than their loss.
    assert sum(elements(found) for found in report.select(in_loop=True)) <= 3


@pytest.mark.proof
@pytest.mark.parametrize("strategy", ["grads", "optimizer"])
def test_hybrid_sends_only_shards_over_data(strategy):
    report = strategy_report(strategy, {"data": 2, "fsdp": 4})
    assert_gathers_each_weight_once(report)
    reduced = [found for found in report.select("all-reduce", axes="data") if elements(found) > 3]
    assert not [found for found in reduced if found.in_loop]
    assert sum(elements(found) for found in reduced) == pytest.approx(sum(STACKED + TABLES) / 4, rel=0.01)


@pytest.mark.parametrize("strategy", ["grads", "optimizer"])
def test_types_on_the_wire(strategy):
    """As handed to the compiler; the CPU backend widens bfloat16 collectives."""
    mesh = {"fsdp": 8, "fsdp_strategy": strategy}
    program = build(parity_config(mesh, model=MODEL, precision={"compute": "bfloat16", "reduce": "float32"}))
    found = COLLECTIVE.findall(program.lower_train_step().as_text())
    assert collections.Counter(found) == {("all_gather", "bf16"): 9, ("reduce_scatter", "f32"): 9}


WIDE = {"embed_dim": 128, "mlp_dim": 512, "num_layers": 8, "head_dim": 16, "num_kv_heads": 8}
WIDE_BYTES = 4 * (8 * (4 * 128 * 128 + 3 * 128 * 512) + 2 * 128 * PADDED_VOCAB)


@pytest.mark.proof
def test_memory_is_what_each_strategy_keeps_whole():
    """With few tokens memory is weights: grads keeps one copy of the model more than full, optimizer two or three."""
    temp = {
        (name, m): strategy_report(name, microbatches=m, model=WIDE).memory.temp / WIDE_BYTES
        for name in ("full", "grads", "optimizer")
        for m in (1, 2)
    }
    assert temp["full", 1] < 0.5, temp
    assert 1 < temp["grads", 1] - temp["full", 1] < 1.25, temp
    assert 1 < temp["grads", 2] - temp["full", 2] < 1.25, temp
    assert 1.7 < temp["optimizer", 1] - temp["full", 1] < 2.25, temp
    assert 2.5 < temp["optimizer", 2] - temp["full", 2] < 3.25, temp


def test_strategy_of_a_config():
    strategy = build(parity_config({"fsdp": 2, "fsdp_strategy": "grads"}, precision={"reduce": "bfloat16"})).strategy
    assert (strategy.name, str(strategy.compute), str(strategy.reduce)) == ("grads", "float32", "bfloat16")


def test_a_run_says_how_often_its_stages_gather():
    mesh, train = {"pipeline": 2, "fsdp": 2}, {"microbatches": 2}
    for gather, name, said in (
        ("auto", "full", "once per microbatch (auto: the memory of these devices is not known)"),
        ("per_step", "optimizer", "once per step (pipeline.gather)"),
    ):
        program = build(parity_config(mesh, train=train, pipeline={"gather": gather}))
        assert program.strategy.name == name
        assert f"stages gather weights {said}" in program.notes
