"""How often the stages of a pipeline gather their weights: once per step where that fits with a margin."""

import pytest

from jaxpar.config import load_config
from jaxpar.plan.catalogue import find_gpu
from jaxpar.plan.evaluation import evaluate_config, gather_on
from jaxpar.plan.facts import Facts, gather_facts
from jaxpar.plan.search import layout_overrides
from jaxpar.plan.shape import shape_of
from jaxpar.plan.topology import make_cluster
from jaxpar.plan.variations import variations

H100 = "NVIDIA H100 80GB HBM3"
SMALL = ("model.preset=llama-3.1-8b", "mesh.pipeline=4", "mesh.fsdp=4")
LARGE = ("model.preset=llama-3.1-70b", "mesh.pipeline=8", "mesh.fsdp=8")
BATCH = ("train.global_batch_size=512", "train.microbatches=32", "data.seq_len=4096")


def facts_of(*overrides: str) -> Facts:
    settings = dict(setting.split("=", 1) for setting in (*BATCH, *overrides))
    return gather_facts(load_config(None, [f"{key}={value}" for key, value in settings.items()]))


def planned(*overrides: str):
    """(task, evaluation) on as many H100s as the mesh has."""
    facts = facts_of(*overrides)
    devices = facts.axes_product(tuple(facts.mesh))
    return evaluate_config(facts, shape_of(facts.model), make_cluster(find_gpu(H100), num_devices=devices))


@pytest.mark.parametrize(("model", "strategy"), [(SMALL, "optimizer"), (LARGE, "full")])
def test_auto_is_once_per_step_where_a_tenth_stays_free(model, strategy):
    _, once = planned(*model, "pipeline.gather=per_step")
    assert once.layout.strategy == "optimizer"
    assert once.fits_safely == (strategy == "optimizer")
    _, plan = planned(*model)
    assert plan.layout.strategy == strategy
    choice = gather_on(facts_of(*model), H100)
    assert choice.strategy == strategy
    assert f"{once.memory.total_bytes / 2**30:.1f} of 79.6 GiB" in choice.reason


def test_what_is_not_known_or_not_possible_is_once_per_microbatch():
    for device, model, why in (
        ("cpu", SMALL, "the memory of these devices is not known"),
        (H100, (*SMALL[:2], "mesh.context=4"), "neither a context nor an expert axis"),
    ):
        choice = gather_on(facts_of(*model), device)
        assert (choice.strategy, why in choice.reason) == ("full", True)


def test_what_is_asked_for_is_done_and_nothing_said_where_nothing_is_gathered():
    for setting, strategy in (
        ("pipeline.gather=per_microbatch", "full"),
        ("pipeline.gather=per_step", "optimizer"),
        ("mesh.fsdp_strategy=grads", "grads"),
    ):
        choice = gather_on(facts_of(*SMALL, setting), "cpu")
        assert (choice.strategy, choice.reason is None) == (strategy, False)
    assert gather_on(facts_of(SMALL[0], "mesh.pipeline=2"), H100).reason is None
    assert gather_on(facts_of(SMALL[0], "mesh.fsdp=8", "mesh.fsdp_strategy=grads"), H100).reason is None


def test_whole_weights_and_gradients_of_a_stage_are_counted():
    """8 B parameters on 4 stages, bfloat16: a copy of 2 bytes, gradients of 2 (of a microbatch) and 4 (their sum)."""
    (_, often), (_, once) = (
        planned(*SMALL, "pipeline.gather=per_microbatch"),
        planned(*SMALL, "pipeline.gather=per_step"),
    )
    params = shape_of(facts_of(*SMALL).model).block_params / 4
    more = once.memory.total_bytes - often.memory.total_bytes
    assert more == pytest.approx((2 + 2 + 4 - (4 + 4) / 4) * params, rel=0.2)
    sent = [sum(c.bytes for c in plan.time.collectives if c.axis == "fsdp") for plan in (often, once)]
    # Before the first tick and after the last.
    assert all(c.exposed_s == c.seconds for c in once.time.collectives if c.axis == "fsdp")
    # Forward lane, backward lane and its recomputation gather; both ways scatter float32.
    assert sent[0] == pytest.approx(32 * (3 * 2 + 4) / (2 + 4) * sent[1])


def test_overrides_give_the_layout_that_they_are_of():
    for setting in ("pipeline.gather=per_microbatch", "pipeline.gather=per_step"):
        task, plan = planned(*SMALL, setting)
        given = layout_overrides(plan.layout).split()
        assert planned(SMALL[0], *given)[1].layout == plan.layout
        changed = {variation.name: variation for variation in variations(task, plan.layout)}
        for name in ("shard over all of data", "no pipeline", "pipeline 4", "tensor 2"):
            if name in changed:
                overrides = changed[name].overrides.split()
                assert planned(*SMALL, *overrides)[1].layout == changed[name].evaluation.layout, name
