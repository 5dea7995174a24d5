"""How the ``context`` axis splits rows: zig-zag order, in which every member has the same causal attention to compute.

A row of S tokens is cut into 2c chunks for c members; member i holds chunk i and chunk 2c - 1 - i. A query of chunk j
attends to chunks 0 to j, so a member's two chunks have i + (2c - 1 - i) = 2c - 1 chunks before them, whatever i is.
Cut into c pieces instead, the last member would have c times the work of the first (arXiv 2311.09431).

Batches stay in natural order, whole on every member of a context group: token ids are small, and each member then takes
its own chunks without communication.

Shapes: B batch, S sequence.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from jaxpar.collectives import current_mesh, spec_of
from jaxpar.sharding import CONTEXT_AXIS, context_entry


def to_zigzag(x: jax.Array, num_members: int) -> jax.Array:
    """[B, S, ...] in natural order -> the chunks of member 0, of member 1, ...; 2 ``num_members`` divides S."""
    rows, length, *rest = x.shape
    chunks = x.reshape(rows, 2, num_members, length // (2 * num_members), *rest)
    pairs = jnp.stack([chunks[:, 0], chunks[:, 1, ::-1]], 2)
    return pairs.reshape(x.shape)


def from_zigzag(x: jax.Array, num_members: int) -> jax.Array:
    """The inverse of ``to_zigzag``."""
    rows, length, *rest = x.shape
    pairs = x.reshape(rows, num_members, 2, length // (2 * num_members), *rest)
    chunks = jnp.stack([pairs[:, :, 0], pairs[:, ::-1, 1]], 1)
    return chunks.reshape(x.shape)


def zigzag(x: jax.Array) -> jax.Array:
    """[B, S, ...], S whole, in the order of the current mesh's context axis."""
    num_members = current_mesh().shape[CONTEXT_AXIS]
    return x if num_members == 1 else to_zigzag(x, num_members)


def split_sequence(x: jax.Array) -> jax.Array:
    """Token array [B, S, ...] in natural order, S whole -> zig-zag order, S sharded over ``context``.

    Raises:
        ValueError: S does not divide by twice the context axis.
    """
    mesh = current_mesh()
    num_members = mesh.shape[CONTEXT_AXIS]
    if num_members == 1:
        return x
    if x.shape[1] % (2 * num_members):
        raise ValueError(
            f"a sequence of {x.shape[1]} tokens does not divide into 2 x context = {2 * num_members} chunks"
        )
    batch, _, *rest = spec_of(x).partitions
    return reshard(zigzag(x), P(batch, context_entry(mesh), *rest))


def natural_order(x: jax.Array) -> jax.Array:
    """[B, S, ...] in zig-zag order, S whole -> natural order."""
    num_members = current_mesh().shape[CONTEXT_AXIS]
    return x if num_members == 1 else from_zigzag(x, num_members)
