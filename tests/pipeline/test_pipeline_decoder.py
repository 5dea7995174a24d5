"""The decoder's own blocks, embedding and cross entropy as the functions of a pipeline: the same loss and gradients as
the decoder on one device. Sequence parallel, packed rows, qk-norm, z-loss and loss chunks are all in it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.loss import LossOptions, next_token_loss, token_cross_entropy
from jaxpar.mesh import make_mesh
from jaxpar.model.attention import SequenceInfo
from jaxpar.model.decoder import Decoder
from jaxpar.model.layers import embed, rms_norm, rope_angles, rope_frequencies
from jaxpar.pipeline import value_and_grad
from jaxpar.schedule import build_schedule
from jaxpar.sharding import batch_entry, spec_for
from tests.parity.harness import parity_config, random_batch

NUM_MICROBATCHES = 4
LOSS = {"z_loss": 1e-3, "chunk_tokens": 24}

MESHES = {
    "1f1b": ("1f1b", {"pipeline": 2, "fsdp": 2, "tensor": 2}, 1),
    "interleaved": ("interleaved", {"pipeline": 2, "data": 2, "tensor": 2}, 2),
    "gpipe": ("gpipe", {"pipeline": 4, "data": 2}, 1),
}


@functools.cache
def setting():
    """(decoder without values, its parameters by path, batch)."""
    config = parity_config(
        {}, model={"num_layers": 4}, train={"microbatches": NUM_MICROBATCHES, "global_batch_size": 16}
    )
    create = lambda: Decoder(config.model, config.precision, "full", nnx.Rngs(0))  # noqa: E731
    with jax.set_mesh(make_mesh({}, jax.devices()[:1])):
        params = jax.device_get(jax.jit(lambda: nnx.state(create()))())
    return nnx.eval_shape(create), params, random_batch(config)


@functools.cache
def on_one_device():
    """Loss and gradients of the decoder itself."""
    decoder, params, batch = setting()
    graph = nnx.graphdef(decoder)

    def total(params):
        def add(total, microbatch):
            return total + next_token_loss(nnx.merge(graph, params), microbatch, **LOSS)[0], None

        return lax.scan(add, 0.0, batch)[0]

    with jax.set_mesh(make_mesh({}, jax.devices()[:1])):
        return jax.device_get(jax.jit(jax.value_and_grad(total))(params))


def functions(decoder):
    """embed, stage and loss of the decoder."""
    model, numerics = decoder.model, decoder.numerics
    block = nnx.graphdef(decoder.layers)
    options = LossOptions(vocab_size=model.vocab_size, numerics=numerics, tied=False, **LOSS)

    def stage(weights, x, side):
        angles = rope_angles(side["positions"], rope_frequencies(model.head_dim, model.rope_theta, None))
        info = SequenceInfo(*angles, side["segment_ids"])
        layer = jax.checkpoint(lambda x, weights: (nnx.merge(block, weights)(x, info), None))
        return lax.scan(layer, x, weights)[0], 0.0

    def loss(ends, y, side):
        x = rms_norm(y, ends["final_norm"][...], model.norm_eps)
        value, _ = token_cross_entropy(options, x, ends["head"][...], side["labels"], side["weights"])
        return value, {"tokens": jnp.sum(side["weights"])}

    return {
        "embed": lambda ends, side: embed(ends["embedding"][...], side["tokens"], numerics.compute),
        "stage": stage,
        "loss": loss,
    }


def placed(mesh, num_chunks):
    """(weights, ends, sides) on the mesh; layers as [chunks, stages, places, ...]."""
    decoder, params, batch = setting()
    logical = {path: leaf.get_metadata()["logical_axes"] for path, leaf in nnx.to_flat_state(nnx.state(decoder))}

    def place(path, leaf):
        array = leaf[...]
        spec = spec_for(".".join(map(str, path)), logical[path], array.shape, mesh)
        if path[0] == "layers":
            array = array.reshape(num_chunks, mesh.shape["pipeline"], -1, *array.shape[1:])
            spec = P(None, "pipeline", None, *spec.partitions[1:])
        return leaf.replace(jax.device_put(array, NamedSharding(mesh, spec)))

    state = nnx.from_flat_state([(path, place(path, leaf)) for path, leaf in nnx.to_flat_state(params)])
    rows = NamedSharding(mesh, P(None, batch_entry(mesh)))
    ends = nnx.State({name: state[name] for name in state if name != "layers"})
    return state["layers"], ends, {name: jax.device_put(array, rows) for name, array in batch.items()}


@pytest.mark.proof
@pytest.mark.parametrize("case", MESHES)
def test_the_decoder_in_a_pipeline_equals_the_decoder(case):
    kind, sizes, num_chunks = MESHES[case]
    mesh = make_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values())))])
    schedule = build_schedule(
        kind, num_stages=sizes["pipeline"], num_microbatches=NUM_MICROBATCHES, num_chunks=num_chunks
    )
    replica_axes = ("data",) if "data" in sizes else ()
    function = value_and_grad(schedule, **functions(setting()[0]), replica_axes=replica_axes)
    with jax.set_mesh(mesh):
        result = jax.device_get(jax.jit(function)(*placed(mesh, num_chunks)))
    loss, gradients = on_one_device()
    assert result.loss == pytest.approx(loss, rel=1e-6)
    assert result.sums["tokens"] == setting()[2]["weights"].sum()
    norm = np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(gradients)))
    found = {("layers", *path): leaf for path, leaf in nnx.to_flat_state(result.weight_grads)}
    found |= dict(nnx.to_flat_state(result.end_grads))
    for path, leaf in nnx.to_flat_state(gradients):
        wanted = leaf[...]
        error = np.abs(found[path][...].reshape(wanted.shape) - wanted).max()
        assert error <= 1e-5 * max(np.linalg.norm(wanted), 1e-3 * norm), path
