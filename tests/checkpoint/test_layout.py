"""How arrays lie on disk: chunks that other meshes can read cheaply, and padding cut off while staying sharded."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp

from jaxpar.checkpoint.store import CHUNK_BYTES, Store
from jaxpar.checkpoint.unpad import leading_box

MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("fsdp", "tensor"), axis_types=(AxisType.Explicit,) * 2)


def put(value, spec):
    return jax.device_put(value, NamedSharding(MESH, spec))


def test_big_layers_have_their_own_chunks_and_rows_of_an_embedding_do_not(tmp_path):
    params = {
        "layers": put(np.zeros((4, 512, 512), np.float32), P(None, "fsdp", "tensor")),
        "embedding": put(np.zeros((4096, 64), np.float32), P("tensor", "fsdp")),
        "norms": put(np.zeros((4, 512), np.float32), P()),
    }
    with Store(tmp_path) as store:
        store.save(1, {"params": params}, {})
    stored = ocp.checkpointables_metadata(tmp_path / "1").metadata["params"]
    chunks = {name: leaf.storage_metadata.chunk_shape for name, leaf in stored.items()}
    assert chunks == {"layers": (1, 256, 128), "embedding": (1024, 32), "norms": (4, 512)}
    assert CHUNK_BYTES == 32 * 2**20


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
