"""A run of a mixture of experts: what it reports, and that its checkpoint does not know the size of the expert axis."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from jaxpar import resume
from jaxpar.checkpoint.paths import leaves_by_path, path_string
from jaxpar.checkpoint.store import Store
from jaxpar.checkpoint.unpad import leading_box
from jaxpar.config.schema import MeshConfig
from jaxpar.loop import ROUTER_METRICS, RunFailed
from jaxpar.plan.resolve import resolve
from jaxpar.program import Program
from tests.parity.test_experts import SIGMOID
from tests.pipeline.test_pipeline_axes import SIGMOID_4
from tests.trainer.runs import column, run, saved_arrays, tiny

MESH = {"data": 1, "fsdp": 2, "expert": 4, "tensor": 1}
STEPS = 3


@pytest.mark.proof
def test_routers_are_reported_and_every_expert_size_restores_the_same_bits(tmp_path):
    sections = {"model": SIGMOID, "train": {"steps": STEPS, "microbatches": 1, "global_batch_size": 8}}
    ended = run(tmp_path / "run", mesh=MESH, **sections)
    assert set(ROUTER_METRICS) <= set(ended.rows[-1])
    assert all(0 < entropy <= 1 for entropy in column(ended.rows, "load_entropy"))
    assert column(ended.rows, "overflow") == column(ended.rows, "dropped") == [0.0] * STEPS
    assert "tokens exchanged by all_to_all" in (ended.directory / "log.txt").read_text()
    saved = saved_arrays(ended.directory, STEPS)
    bias = saved["params/layers/moe/balance_bias"]
    assert set(np.round(np.abs(bias) / SIGMOID["balance_rate"]).astype(int).ravel()) <= set(range(STEPS + 1))
    assert bias.any()
    assert not saved["optimizer/0/mu/layers/moe/balance_bias"].any()
    for mesh in ({}, {"expert": 2}, {"expert": 8}, {"expert": 2, "tensor": 2, "fsdp": 2}):
        config = dataclasses.replace(tiny(tmp_path, runtime={"cpu_devices": 0}, **sections), mesh=MeshConfig(**mesh))
        num_devices = int(np.prod(list(mesh.values()), dtype=int))
        program = Program.build(resolve(config, num_devices=num_devices), jax.devices()[:num_devices])
        with Store(ended.directory / "checkpoints") as store:
            state, _ = resume.restore(store, STEPS, program)
        parts = {"params": state.params, "optimizer": state.optimizer}
        shapes, found = resume.stored_shapes(program, parts), 0
        for (section, tree), name in itertools.product(parts.items(), saved):
            for path, array in leaves_by_path(tree, section).items():
                if path_string(section, path) == name:
                    assert np.array_equal(np.asarray(leading_box(array, shapes.get(name, array.shape))), saved[name])
                    found += 1
        assert found == len(saved)


@pytest.mark.proof
def test_a_run_that_moves_into_a_pipeline_and_out_of_it_is_the_run_that_stayed(tmp_path):
    sections = {"model": SIGMOID_4, "train": {"steps": STEPS, "microbatches": 2, "global_batch_size": 8}}
    flat = {"data": 1, "fsdp": 2, "expert": 2, "tensor": 2}
    staged = {"data": 1, "fsdp": 1, "tensor": 1, "pipeline": 2, "expert": 2, "context": 2}
    stayed = run(tmp_path / "stayed", mesh=flat, **sections)
    for stop_at, mesh in ((2, staged), (STEPS, flat)):
        moved = run(tmp_path / "moved", mesh=mesh, **{**sections, "train": {**sections["train"], "stop_at": stop_at}})
    for name in ("loss", "grad_norm", *ROUTER_METRICS):
        np.testing.assert_allclose(column(moved.rows, name), column(stayed.rows, name), rtol=1e-5, err_msg=name)
    wanted = saved_arrays(stayed.directory, STEPS)
    found = saved_arrays(moved.directory, STEPS)
    assert found.keys() == wanted.keys()
    for name in wanted:
        if name.startswith("params/"):
            size = np.abs(wanted[name]).max()
            np.testing.assert_allclose(found[name], wanted[name], atol=1e-5 * float(size), err_msg=name)


@pytest.mark.proof
def test_rows_without_room_end_the_run(tmp_path):
    sections = {"model": SIGMOID, "train": {"steps": STEPS, "microbatches": 1, "global_batch_size": 8}}
    with pytest.raises(RunFailed, match=r"found no room.*expert_receive_factor = 0.5.*there is no checkpoint"):
        run(tmp_path / "run", mesh={**MESH, "expert_receive_factor": 0.5}, **sections)
