"""The zig-zag order: nothing lost, every member with the same causal work, the same tokens under the same names."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import make_mesh
from jaxpar.model.zigzag import from_zigzag, natural_order, split_sequence, to_zigzag, zigzag

SIZES = [(1, 3), (2, 1), (3, 2), (8, 4)]


@pytest.mark.parametrize(("num_members", "chunk"), SIZES)
def test_member_i_holds_chunks_i_and_2c_1_i(num_members, chunk):
    rows, length = 3, 2 * num_members * chunk
    row = np.arange(rows * length).reshape(rows, length)
    order = np.asarray(to_zigzag(row, num_members))
    chunks = row.reshape(rows, 2 * num_members, chunk)
    for member, part in enumerate(np.split(order, num_members, 1)):
        np.testing.assert_array_equal(part[:, :chunk], chunks[:, member])
        np.testing.assert_array_equal(part[:, chunk:], chunks[:, 2 * num_members - 1 - member])
    np.testing.assert_array_equal(from_zigzag(order, num_members), row)


@pytest.mark.parametrize(("num_members", "chunk"), SIZES)
def test_every_member_sees_as_many_keys(num_members, chunk):
    """Pairs of a query and a key that it may see, on each member: equal, where contiguous parts would differ c-fold."""
    length = 2 * num_members * chunk
    visible = np.tri(length, dtype=int)
    order = np.asarray(to_zigzag(np.arange(length)[None], num_members))[0]
    work = visible[order].reshape(num_members, -1).sum(1)
    assert set(work) == {length * (length + 1) // 2 // num_members}


def test_the_chunk_pairs_that_the_ring_computes_are_the_visible_ones():
    """Early keys for the late queries always; and the one pair that depends on which member comes first."""
    for num_members in (2, 3, 4, 8):
        for member, source in itertools.permutations(range(num_members), 2):
            queries, keys = ((i, 2 * num_members - 1 - i) for i in (member, source))
            wanted = {(q, k) for q, k in itertools.product(queries, keys) if q > k}
            second = (queries[0], keys[0]) if source < member else (queries[1], keys[1])
            assert wanted == {(queries[1], keys[0]), second}


@pytest.mark.parametrize("sizes", [{"context": 4}, {"data": 2, "context": 2, "tensor": 2}], ids=str)
def test_each_device_holds_its_own_chunks_of_its_own_rows(sizes):
    mesh = make_mesh(sizes, jax.devices()[: 4 if len(sizes) == 1 else 8])
    rows = "data" if "data" in sizes else None
    tokens = np.arange(4 * 16).reshape(4, 16)
    with jax.set_mesh(mesh):
        placed = jax.device_put(tokens, NamedSharding(mesh, P(rows, None)))
        split = jax.jit(split_sequence)(placed)
        back = jax.jit(lambda x: natural_order(zigzag(x)))(placed)
    assert split.sharding.spec == P(rows, "context")
    chunk = 16 // (2 * sizes["context"])
    for shard in split.addressable_shards:
        at = dict(zip(mesh.axis_names, np.argwhere(mesh.devices == shard.device)[0], strict=True))
        own = tokens[at["data"] * 2 :][:2] if rows else tokens
        late = 2 * sizes["context"] - 1 - at["context"]
        chunks = own.reshape(len(own), -1, chunk)
        np.testing.assert_array_equal(shard.data, np.hstack([chunks[:, at["context"]], chunks[:, late]]))
    np.testing.assert_array_equal(back, tokens)


def test_a_sequence_that_does_not_divide_is_named():
    mesh = make_mesh({"context": 4}, jax.devices()[:4])
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="12 tokens does not divide into 2 x context = 8 chunks"):
        jax.jit(split_sequence)(np.zeros((2, 12), np.int32))
