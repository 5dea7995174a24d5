"""The sharding report: what every device holds, and what is replicated although an axis could shard it."""

import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.config import load_config
from jaxpar.mesh import make_mesh
from jaxpar.plan.resolve import resolve
from jaxpar.program import Program
from jaxpar.sharding import sharding_report
from jaxpar.state import ModelDefinition


def report_of(preset: str, *mesh: str):
    config = load_config(None, [f"model.preset={preset}", "train.global_batch_size=8", *mesh])
    program = Program.build(resolve(config, num_devices=8))
    state = program.abstract_state
    return program, sharding_report({"params": state.params, "optimizer": state.optimizer}, program.mesh)


@pytest.mark.parametrize("mesh", [("mesh.fsdp=8",), ("mesh.fsdp=4", "mesh.tensor=2"), ("mesh.tensor=8",)], ids=str)
def test_a_real_model_replicates_only_its_norms(mesh):
    program, report = report_of("llama-3.1-8b", *mesh)
    replicated = {leaf.path for leaf in report.leaves if leaf.num_copies == 8}
    assert {path.rpartition(".")[2] for path in replicated} == {"attention_norm", "mlp_norm", "final_norm", "count"}
    # Two norms per block and one at the end, float32, with two moments each; and the optimizer's count.
    assert report.unsharded_bytes == (2 * 32 + 1) * 4096 * 4 * 3 + 4
    assert report.unsharded_share < 0.001
    assert report.bytes_per_device == pytest.approx(program.plan.num_params * 12 / 8, rel=0.001)


def test_data_parallelism_alone_replicates_on_purpose():
    _, report = report_of("llama-3.1-8b", "mesh.data=8")
    assert report.unsharded_bytes == 0
    assert {leaf.num_copies for leaf in report.leaves} == {8}
    assert report.bytes_per_device == sum(leaf.total_bytes for leaf in report.leaves)


def test_hybrid_sharding_counts_the_copies():
    _, report = report_of("llama-3.1-8b", "mesh.data=2", "mesh.fsdp=4")
    (query,) = (leaf for leaf in report.leaves if leaf.path == "params.layers.q")
    assert (query.shape, query.dtype) == ((32, 4096, 32, 128), "float32")
    assert query.spec == "(None, fsdp, None, None)"
    assert query.total_bytes == 32 * 4096 * 4096 * 4
    assert (query.num_copies, query.bytes_per_device) == (2, query.total_bytes // 4)


class Careless(nnx.Module):
    """A matrix whose logical axes no mesh axis shards, next to one that is sharded."""

    def __init__(self, rngs: nnx.Rngs):
        init = nnx.initializers.normal()
        self.kept_whole = nnx.Param(init(rngs.params(), (64, 64), jnp.float32), logical_axes=("norm", "head_dim"))
        self.good = nnx.Param(init(rngs.params(), (64, 64), jnp.float32), logical_axes=("embed", "mlp"))


@pytest.mark.parametrize(
    ("sizes", "share"),
    [({"fsdp": 8}, 8 / 9), ({"tensor": 8}, 8 / 9), ({"data": 4, "fsdp": 2}, 2 / 3), ({"data": 8}, 0)],
)
def test_a_replicated_matrix_is_found(sizes, share):
    mesh = make_mesh(sizes)
    report = sharding_report(ModelDefinition(Careless).abstract_on(mesh), mesh)
    assert report.unsharded_share == pytest.approx(share)
    whole = {leaf.path: leaf.num_copies for leaf in report.leaves}["kept_whole"]
    assert whole == 8


def test_an_axis_that_shards_nothing_leaves_everything_replicated():
    """The tensor axis has eight devices, and no dim of the model names it."""
    mesh = make_mesh({"tensor": 8})
    leaf = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, P(None, None)))
    report = sharding_report({"w": leaf}, mesh)
    assert report.unsharded_share == 1
    assert report.unsharded_bytes == report.leaves[0].bytes_per_device == 64 * 64 * 4


def test_arrays_and_their_shapes_report_the_same():
    mesh = make_mesh({"fsdp": 4, "tensor": 2})
    abstract = ModelDefinition(Careless).abstract_on(mesh)
    arrays = jax.tree.map(lambda leaf: jax.device_put(jnp.zeros(leaf.shape), leaf.sharding), abstract)
    assert sharding_report(arrays, mesh) == sharding_report(abstract, mesh)
    held = sum(math.prod(leaf.addressable_shards[0].data.shape) * 4 for leaf in jax.tree.leaves(arrays))
    assert sharding_report(arrays, mesh).bytes_per_device == held
