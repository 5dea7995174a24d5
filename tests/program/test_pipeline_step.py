"""The compiled training step of a pipeline: what a stage computes, gathers and keeps."""

import collections
import functools
import math

import pytest

from jaxpar.audit import audit, gathers_of_stacked_weights, weight_sized_all_reduces
from jaxpar.audit.hlo import parse_module
from tests.parity.harness import TINY, build, parity_config
from tests.program.test_compiled_step import LAYER_WEIGHTS, PADDED_VOCAB

pytestmark = pytest.mark.proof

STAGES, LAYERS_PER_STAGE = 2, 3
MESH = {"pipeline": STAGES, "fsdp": 4}
LLAMA = {"family": "llama", "num_layers": STAGES * LAYERS_PER_STAGE}
GPT2 = {**LLAMA, "family": "gpt2", "num_kv_heads": 8, "max_positions": 16}
WEIGHTS = {"llama": 7, "gpt2": 6}
"""Matrices of a block, each of which one product reads."""
TICKS = 4 + 2 * (STAGES - 1)
"""Of 1f1b with 4 microbatches."""


@functools.cache
def step(family="llama", schedule="1f1b", microbatches=4, gather="per_microbatch"):
    """Compiled, and its report."""
    program = build(
        parity_config(
            MESH,
            model=LLAMA if family == "llama" else GPT2,
            pipeline={"schedule": schedule, "gather": gather},
            data={"num_samples": 4 * microbatches},
            train={"microbatches": microbatches, "global_batch_size": 4 * microbatches},
        )
    )
    compiled = program.lower_train_step().compile()
    return compiled.as_text(), audit(compiled, program.mesh)


def lanes(found):
    """Those of loops over layers inside the loop over ticks, by the layer loop: forward lane, then backward lane."""
    groups = collections.defaultdict(list)
    for item in found:
        if [loop.trips for loop in item.loops] == [TICKS, LAYERS_PER_STAGE]:
            groups[item.loops[-1].name].append(item)
    return list(groups.values())


@pytest.mark.parametrize("family", WEIGHTS)
def test_a_stage_runs_forward_twice_for_each_unit(family):
    """Once in the forward lane, once in the backward lane; attention's scores once more, for its four gradients."""
    text, _ = step(family)
    products = [site for site in parse_module(text).walk() if site.instruction.opcode == "dot"]
    forward, again, backward = (len(lane) for lane in lanes(products))
    assert forward == again == WEIGHTS[family] + 2
    assert backward == 2 * WEIGHTS[family] + 1 + 4


def test_weights_are_gathered_layer_by_layer_in_the_loops():
    _, report = step()
    gather, scatter = ("all-gather", ("fsdp",)), ("reduce-scatter", ("fsdp",))
    counts = [collections.Counter((found.op, found.axes) for found in lane) for lane in lanes(report.collectives)]
    forward, again, backward = counts
    assert forward[gather] == again[gather] == backward[gather] == backward[scatter] == WEIGHTS["llama"]
    assert forward[scatter] == again[scatter] == 0
    smallest = 4 * TINY["embed_dim"] * TINY["num_kv_heads"] * TINY["head_dim"]
    for layers in (LAYERS_PER_STAGE, LLAMA["num_layers"]):
        assert gathers_of_stacked_weights(report, num_layers=layers, min_bytes=layers * smallest) == ()
    assert weight_sized_all_reduces(report, weight_bytes=smallest) == ()


def test_weights_gathered_once_per_step_are_gathered_outside_the_loops():
    """However many microbatches there are, and gradients are reduce-scattered as often."""
    layers = [LAYERS_PER_STAGE * size for size in LAYER_WEIGHTS]
    tables = [TINY["embed_dim"] * PADDED_VOCAB // STAGES] * 2
    for microbatches in (2, 4):
        _, report = step(microbatches=microbatches, gather="per_step")
        for op, share in (("all-gather", 1), ("reduce-scatter", 4)):
            found = report.select(op, axes="fsdp")
            assert not [collective for collective in found if collective.in_loop]
            sizes = sorted(share * math.prod(array.dims) for collective in found for array in collective.arrays)
            assert sizes == sorted(layers + tables), (op, microbatches)
        assert weight_sized_all_reduces(report, weight_bytes=4 * min(LAYER_WEIGHTS)) == ()


def test_memory_of_1f1b_does_not_grow_with_microbatches():
    few, many, gpipe = (
        step(schedule=schedule, microbatches=microbatches)[1].memory.temp
        for schedule, microbatches in (("1f1b", 4), ("1f1b", 32), ("gpipe", 32))
    )
    assert many <= 1.1 * few
    # gpipe keeps the inputs and the output gradients of 32 microbatches, float32 [rows, sequence, embed].
    assert gpipe >= many + 2 * 24 * 4 * 16 * TINY["embed_dim"]
