"""A training state in small: params in two types, padded vocabulary, AdamW moments, on an explicit mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

SPECS = {
    "embedding": P("tensor", "fsdp"),
    "layers": {"q": P(None, "fsdp", "tensor"), "norm": P()},
}
PADDED = dict.fromkeys(("params/embedding", "optimizer/0/mu/embedding", "optimizer/0/nu/embedding"), (13, 8))


def explicit_mesh(fsdp: int, tensor: int) -> Mesh:
    devices = np.array(jax.devices()[: fsdp * tensor]).reshape(fsdp, tensor)
    return Mesh(devices, ("fsdp", "tensor"), axis_types=(AxisType.Explicit,) * 2)


MESH = explicit_mesh(2, 4)


REPLICATED = P()


def put(value, spec=REPLICATED, mesh=MESH):
    return jax.device_put(value, NamedSharding(mesh, spec))


def make_params(seed: int) -> dict:
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal(shape, np.float32)  # noqa: E731
    embedding = np.concatenate([draw(13, 8), np.zeros((3, 8), np.float32)])  # 13 rows, padded to 16
    values = {"embedding": embedding, "layers": {"q": draw(3, 8, 4, 2), "norm": draw(3, 8)}}
    return jax.tree.map(put, values, SPECS)


def make_state(seed: int = 0) -> dict:
    """Params in float32 and one in bfloat16, AdamW moments, replicated scalars."""
    params = make_params(seed)
    params["layers"]["norm"] = params["layers"]["norm"].astype(jnp.bfloat16)
    optimizer = optax.adamw(1e-3).init(params)
    mu, nu = make_params(seed + 1), make_params(seed + 2)
    optimizer = (optimizer[0]._replace(count=put(np.int32(seed + 7)), mu=mu, nu=nu), *optimizer[1:])
    return {"params": params, "optimizer": optimizer, "step": put(np.int32(seed))}


def abstract(state, mesh=MESH):
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, leaf.sharding.spec)),
        state,
    )
