"""How arrays lie on disk: chunks that other meshes can read cheaply, and padding cut off while staying sharded."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp

from jaxpar.checkpoint.arrays import StepArrays
from jaxpar.checkpoint.chunks import grid_amplification
from jaxpar.checkpoint.store import Store
from jaxpar.checkpoint.unpad import leading_box

MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("fsdp", "tensor"), axis_types=(AxisType.Explicit,) * 2)


def put(value, spec):
    return jax.device_put(value, NamedSharding(MESH, spec))


def test_chunks_are_finer_than_shards_in_the_dims_that_the_mesh_cuts(tmp_path):
    params = {
        "mlp": put(np.zeros((3, 1024, 2048), np.float32), P(None, "fsdp", "tensor")),
        "kv": put(np.zeros((4, 256, 4, 32), np.float32), P(None, ("fsdp", "tensor"))),  # layers too small to be cut
        "embedding": put(np.zeros((4096, 256), np.float32), P(None, "fsdp")),
        "whole": put(np.zeros((2, 1024, 2048), np.float32), P()),
        "norms": put(np.zeros((4, 512), np.float32), P()),
    }
    with Store(tmp_path) as store:
        store.save(1, {"params": params}, {})
    stored = ocp.checkpointables_metadata(tmp_path / "1").metadata["params"]
    chunks = {name: leaf.storage_metadata.chunk_shape for name, leaf in stored.items()}
    assert chunks == {
        "mlp": (3, 128, 128),
        "kv": (4, 32, 4, 32),
        "embedding": (4096, 32),
        "whole": (1, 64, 2048),  # its 8 replicas write an eighth each
        "norms": (4, 512),
    }


@pytest.mark.parametrize("spec", [P(None, ("fsdp", "tensor")), P(None, "fsdp"), P()])
@pytest.mark.parametrize("finer", [1, 2, 4])
def test_readers_with_finer_shards_fetch_no_more_than_they_need(tmp_path, spec, finer):
    array = put(np.zeros((2, 2048, 4096), np.float16), spec)
    with Store(tmp_path) as store:
        store.save(1, {"params": {"w": array}}, {})
    stored = StepArrays(tmp_path / "1").types["params/w"]
    layers, rows, columns = array.sharding.shard_shape(array.shape)
    needed, fetched = grid_amplification(array.shape, (layers, rows // finer, columns), stored.read_chunk, 2)
    assert fetched == needed


@pytest.mark.parametrize(
    ("shape", "spec", "box", "want"),
    [
        ((16, 8), P("tensor", "fsdp"), (13, 8), P(None, ("fsdp", "tensor"))),
        ((16, 12), P("tensor", "fsdp"), (13, 12), P(None, "fsdp")),  # 12 does not divide by 8: tensor is dropped
        ((8, 16), P("fsdp", "tensor"), (8, 13), P(("fsdp", "tensor"), None)),
        ((3, 16, 8), P(None, ("tensor", "fsdp")), (3, 13, 8), P(None, None, ("tensor", "fsdp"))),
        ((16, 8), P(), (13, 8), P(None, None)),
    ],
)
def test_padding_is_cut_off_without_gathering(shape, spec, box, want):
    full = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    cut = leading_box(put(full, spec), box)
    assert cut.sharding.is_equivalent_to(NamedSharding(MESH, want), cut.ndim)
    assert np.array_equal(np.asarray(cut), full[tuple(slice(n) for n in box)])


def test_an_array_without_padding_is_not_copied():
    array = put(np.ones((16, 8), np.float32), P("tensor", "fsdp"))
    assert leading_box(array, [16, 8]) is array


def test_an_array_on_one_device_is_cut_too():
    assert leading_box(jax.numpy.arange(6).reshape(3, 2), (2, 2)).tolist() == [[0, 1], [2, 3]]
