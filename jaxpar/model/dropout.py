"""Dropout (Srivastava et al. 2014) whose mask is a function of what an element is, not of where it is computed.

The bits of an element come from a hash of (seed, step, row of the global batch, position in the row), one key per
token, and of (layer, place in the block, feature). So every mesh, accumulation and recomputation has the same mask, and
a resumed run goes on with those that it would have had. Integer operations only: bit-equal on every backend.

Shapes: M microbatches, B rows, S sequence, D embed.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from jaxpar.collectives import spec_of

KEYS = "dropout_keys"
"""Name of the token keys among the arrays of a batch; without them nothing is dropped."""

EMBEDDING, ATTENTION, MLP = range(3)
"""Places where something is dropped: after the embedding, and what attention and MLP add to the residual stream."""

_ODD = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
"""Multipliers that spread small integers over 32 bits (xxHash)."""


def token_keys(seed: int, step: jax.Array, like_mbs: jax.Array) -> jax.Array:
    """uint32 [M, B, S]: a key per token of a global batch, sharded like ``like_mbs``.

    Args:
        seed: ``run.seed``.
        step: int32 scalar: optimizer steps done.
        like_mbs: an array of the batch, [M, B, S], natural order of tokens.
    """
    sharding = jax.typeof(like_mbs).sharding
    microbatch, row, place = (
        lax.broadcasted_iota(jnp.uint32, like_mbs.shape, dim, out_sharding=sharding) for dim in range(3)
    )
    run = mixed(jnp.uint32(seed & 0xFFFFFFFF) * jnp.uint32(_ODD[0]) + step.astype(jnp.uint32))
    rows = mixed(run + (microbatch * jnp.uint32(like_mbs.shape[1]) + row) * jnp.uint32(_ODD[1]))
    return mixed(rows + place * jnp.uint32(_ODD[2]))


def layer_keys(keys_bs: jax.Array, layer: jax.Array) -> jax.Array:
    """The keys of one layer's tokens; ``layer`` is its number in the model."""
    return mixed(keys_bs + (layer.astype(jnp.uint32) + 1) * jnp.uint32(_ODD[1]))


def dropped(x_bsd: jax.Array, keys_bs: jax.Array | None, place: int, rate: float) -> jax.Array:
    """``x_bsd`` with a share ``rate`` of its elements 0 and the others scaled up to the same mean.

    Args:
        x_bsd: as between blocks.
        keys_bs: uint32 [B, S]: keys of the tokens (of one layer); None: nothing is dropped.
        place: ``EMBEDDING``, ``ATTENTION`` or ``MLP``.
        rate: probability of an element to be dropped, in [0, 1).
    """
    if keys_bs is None or not rate:
        return x_bsd
    tokens = spec_of(x_bsd).partitions[:2]
    if spec_of(keys_bs).partitions != tokens:  # whole over tensor, which splits the sequence between blocks
        keys_bs = reshard(keys_bs, P(*tokens))
    features = mixed(jnp.arange(x_bsd.shape[-1], dtype=jnp.uint32) * jnp.uint32(_ODD[0]) + jnp.uint32(place))
    bits = mixed(keys_bs[..., None] ^ features)
    is_kept = bits >= jnp.uint32(round(rate * 2**32))
    return jnp.where(is_kept, x_bsd / jnp.asarray(1 - rate, x_bsd.dtype), jnp.zeros((), x_bsd.dtype))


def mixed(x: jax.Array) -> jax.Array:
    """A permutation of the 32-bit integers that changes every bit with probability near 1/2 (lowbias32, C. Wellons)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
