"""The training state is created sharded, lies where its abstract form says, and has the same bits on every mesh."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.config.schema import OptimConfig
from jaxpar.mesh import make_mesh
from jaxpar.optim import make_optimizer
from jaxpar.program import Program
from jaxpar.state import ModelDefinition, TrainState, make_init
from tests.parity.harness import build, parity_config

MESHES = {
    "one device": {},
    "data8": {"data": 8},
    "fsdp8": {"fsdp": 8},
    "fsdp4 x tensor2": {"fsdp": 4, "tensor": 2},
}
LARGEST = 2048 * 1024
"""Elements of the largest leaf of ``TwoWeights``: 8 MiB."""


class TwoWeights(nnx.Module):
    """One large matrix, one of awkward size, and a norm scale."""

    def __init__(self, rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.02)
        self.large = nnx.Param(init(rngs.params(), (2048, 1024), jnp.float32), logical_axes=("embed", "mlp"))
        self.awkward = nnx.Param(init(rngs.params(), (496, 62), jnp.float32), logical_axes=("embed", "mlp"))
        self.norm = nnx.Param(jnp.ones((248,)), logical_axes=("norm",))


@functools.cache
def program_on(mesh_name: str) -> Program:
    """A production program of the small model."""
    sizes = MESHES[mesh_name]
    definition = ModelDefinition(TwoWeights)
    return dataclasses.replace(
        build(parity_config(sizes)),
        definition=definition,
        optimizer=make_optimizer(OptimConfig(), definition.logical_axes),
    )


@functools.cache
def created(mesh_name: str) -> TrainState:
    return program_on(mesh_name).init(0)


def compiled_init(program: Program) -> jax.stages.Compiled:
    """What ``Program.init`` runs."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, program.abstract_state)
    with jax.set_mesh(program.mesh):
        init = jax.jit(make_init(program.definition, program.optimizer, program.mesh), out_shardings=shardings)
        return init.lower(jax.random.key(0)).compile()


def bytes_held(state: TrainState) -> dict[jax.Device, int]:
    """Bytes of the state on each device."""
    held = dict.fromkeys(jax.devices(), 0)
    for leaf in jax.tree.leaves(state):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return held


def largest_array(compiled: jax.stages.Compiled) -> int:
    """Elements of the largest array anywhere in the program of one device."""
    shapes = re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", compiled.as_text())
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


@pytest.mark.parametrize("mesh", MESHES)
def test_state_lies_where_its_abstract_form_says(mesh):
    abstract, state = program_on(mesh).abstract_state, created(mesh)
    assert jax.tree.structure(abstract) == jax.tree.structure(state)
    for expected, leaf in zip(jax.tree.leaves(abstract), jax.tree.leaves(state), strict=True):
        assert (leaf.shape, leaf.dtype) == (expected.shape, expected.dtype)
        assert leaf.sharding == expected.sharding
        assert leaf.committed


@pytest.mark.parametrize("mesh", ["data8", "fsdp8", "fsdp4 x tensor2"])
def test_initial_values_do_not_depend_on_the_mesh(mesh):
    jax.tree.map(np.testing.assert_array_equal, created(mesh), created("one device"))


def test_initial_values_depend_on_the_seed_and_the_weight():
    first, other = jax.device_get((created("fsdp8").params, program_on("fsdp8").init(1).params))
    for one, two in ((first["awkward"], other["awkward"]), (first["awkward"], first["large"][:496, :62])):
        assert (one != two).mean() > 0.99


@pytest.mark.parametrize("mesh", ["fsdp8", "fsdp4 x tensor2"])
def test_every_device_holds_its_share_and_no_more(mesh):
    """An eighth of what is sharded, and the norm, its moments and the scalars whole."""
    state = created(mesh)
    replicated = 3 * 248 * 4 + 2 * 4
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert set(bytes_held(state).values()) == {(total - replicated) // 8 + replicated}


@pytest.mark.parametrize("mesh", ["fsdp8", "fsdp4 x tensor2"])
def test_no_leaf_is_ever_whole_on_a_device(mesh):
    """Not even on the way: no array of a device's program is larger than the largest shard."""
    compiled = compiled_init(program_on(mesh))
    assert largest_array(compiled) == LARGEST // 8
    memory = compiled.memory_analysis()
    assert memory.output_size_in_bytes < 1.01 * max(bytes_held(created(mesh)).values())
    assert memory.temp_size_in_bytes < LARGEST * 4 / 2


def test_no_leaf_of_a_decoder_is_ever_whole_on_a_device():
    """Embedding, MLP and head of 8 MiB each, with a vocabulary that does not divide."""
    model = {"vocab_size": 8191, "embed_dim": 256, "mlp_dim": 4096, "head_dim": 32}
    program = build(parity_config({"fsdp": 4, "tensor": 2}, model=model))
    assert max(math.prod(leaf.shape) for leaf in jax.tree.leaves(program.abstract_state)) == 2 * 2**20
    assert largest_array(compiled_init(program)) == 2 * 2**20 // 8


@pytest.mark.parametrize("sizes", [{}, {"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=str)
def test_every_leaf_of_the_abstract_state_is_on_the_mesh(sizes):
    """Scalars too: one left on a single device would compile the second step again."""
    program = build(parity_config(sizes))
    state = program.abstract_state
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        assert isinstance(leaf.sharding, NamedSharding), path
        assert leaf.sharding.mesh == program.mesh, path
        assert leaf.sharding.memory_kind in (None, "device", "unpinned_host"), path
    for scalar in (state.step, state.optimizer[0].count):
        assert (scalar.shape, scalar.dtype, scalar.sharding.spec) == ((), jnp.int32, P())
    for moments in (state.optimizer[0].mu, state.optimizer[0].nu):
        assert moments == state.params


def test_optimizer_state_takes_the_shardings_of_given_parameters():
    """What a run that starts from a checkpoint does: ``Program.start_from``."""
    program = build(parity_config({"fsdp": 4, "tensor": 2}))
    abstract = program.abstract_state
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: jax.device_put(rng.normal(size=leaf.shape).astype(leaf.dtype), leaf.sharding), abstract.params
    )
    expected = jax.device_get(params)
    state = program.start_from(params)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == jax.tree.map(lambda leaf: leaf.sharding, abstract)
    jax.tree.map(np.testing.assert_array_equal, state.params, expected)
    assert state.step == state.optimizer[0].count == 0
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(state.optimizer))


def test_a_parameter_without_logical_axes_is_named():
    class Forgetful(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.block = nnx.Linear(4, 4, rngs=rngs)

    definition = ModelDefinition(Forgetful)
    with pytest.raises(ValueError, match=r"parameter block\.(bias|kernel) has no logical axes; create it with"):
        _ = definition.logical_axes


def test_a_parameter_that_does_not_divide_is_named_by_its_path():
    class Uneven(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            del rngs
            self.inner = nnx.Dict(weight=nnx.Param(jnp.ones((6, 4)), logical_axes=("embed", "mlp")))

    with pytest.raises(ValueError, match=r"inner\.weight dim 0 \(embed\) has size 6, which fsdp=8 = 8"):
        ModelDefinition(Uneven).specs(make_mesh({"fsdp": 8}))


def test_binding_gives_the_module_with_these_parameters():
    definition = ModelDefinition(TwoWeights)
    params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 3.0), definition.abstract_params)
    module = definition.bind(params)
    assert isinstance(module, TwoWeights)
    assert (module.norm[...] == 3).all()
    # The definition itself is untouched.
    other = definition.bind(jax.tree.map(lambda leaf: 2 * leaf, params))
    assert (module.norm[...] == 3).all()
    assert (other.norm[...] == 6).all()
