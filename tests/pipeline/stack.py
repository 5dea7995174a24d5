"""A small stack of layers with tied embedding and head, once plainly and once cut into stages over a mesh.

Shapes: M microbatches, B rows, S sequence, D embed, F mlp, V vocabulary, L layers. The plain version is the oracle: no
mesh, no schedule, jax.grad.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from jaxpar.collectives import (
    current_mesh,
    defer_reduction,
    enter_block,
    finish_reduction,
    gather_weight,
    row_parallel,
)
from jaxpar.mesh import make_mesh
from jaxpar.model.layers import norm
from jaxpar.pipeline import value_and_grad
from jaxpar.schedule import build_schedule, split_layers
from jaxpar.sharding import batch_entry, sequence_entry

B, S, D, F, V = 4, 8, 16, 32, 24
EPS = 1e-5

LAYER_SPECS = {"scale": P(None), "up": P("fsdp", "tensor"), "down": P("tensor", "fsdp")}
END_SPECS = {"table": P("pipeline", "fsdp"), "scale": P(None)}


def problem(num_layers, num_microbatches, seed=0):
    """(layers, ends, sides) as numpy arrays; the last microbatch has no token that counts."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    layers = {
        "scale": 1 + 0.1 * normal(num_layers, D),
        "up": normal(num_layers, D, F) / D**0.5,
        "down": normal(num_layers, F, D) / F**0.5,
    }
    ends = {"table": normal(V, D), "scale": 1 + 0.1 * normal(D)}
    shape = (num_microbatches, B, S)
    sides = {
        "tokens": rng.integers(0, V, shape).astype(np.int32),
        "labels": rng.integers(0, V, shape).astype(np.int32),
        "weights": (rng.random(shape) < 0.6).astype(np.float32),
        "gain": 1 + 0.1 * normal(*shape),
    }
    sides["weights"][-1] = 0
    return layers, ends, sides


def normalise(x, scale):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPS) * scale


def plain(layers, ends, sides):
    """(loss + aux, (loss, aux, tokens, squares [L])) over all microbatches."""

    def microbatch(sums, side):
        def layer(carry, weights):
            x, aux = carry
            hidden = jnp.tanh(normalise(x, weights["scale"]) @ weights["up"]) * side["gain"][..., None]
            square = jnp.sum(hidden**2)
            return (x + hidden @ weights["down"], aux + 1e-4 * square), square

        loss, aux, squares = sums
        (x, aux), more = lax.scan(layer, (ends["table"][side["tokens"]], aux), layers)
        scores = jax.nn.log_softmax(normalise(x, ends["scale"]) @ ends["table"].T)
        picked = jnp.take_along_axis(scores, side["labels"][..., None], -1)[..., 0]
        return (loss - jnp.sum(side["weights"] * picked), aux, squares + more), None

    none = jnp.zeros(layers["scale"].shape[0])
    (loss, aux, squares), _ = lax.scan(microbatch, (0.0, 0.0, none), sides)
    return loss + aux, (loss, aux, sides["weights"].sum(), squares)


def stage(weights, x, side):
    """One chunk: layers whose mask is off do nothing."""
    gain = side["gain"][..., None]

    def layer(carry, weights):
        x, aux = carry
        up, down = (gather_weight(weights[name], jnp.float32, jnp.float32) for name in ("up", "down"))
        hidden = jnp.tanh(jnp.einsum("bsd,df->bsf", enter_block(norm("rms", x, [weights["scale"]], EPS)), up)) * gain
        square = jnp.sum(hidden**2)
        new = x + row_parallel("bsf,fd->bsd", hidden, down), aux + 1e-4 * square
        return jax.tree.map(lambda new, old: jnp.where(weights["mask"], new, old), new, carry), square

    start = (x, 0 * jnp.sum(x))  # a zero of the right type: each stage's and replica's own
    (y, aux), squares = lax.scan(jax.checkpoint(layer), start, weights)
    return y, aux, {"squares": squares}


def embed(ends, side):
    """Rows of the vocabulary lie on all stages: each looks up its own, and they are added."""
    table = ends["table"]
    local = reshard(side["tokens"], P(None, None)) - lax.axis_index("pipeline") * table.shape[0]
    mine = (local >= 0) & (local < table.shape[0])
    rows = table.at[jnp.where(mine, local, 0)].get(out_sharding=P(None, None, _fsdp()))
    rows = lax.psum(jnp.where(mine[..., None], rows, 0), "pipeline")
    return reshard(rows, P(batch_entry(current_mesh()), sequence_entry(current_mesh()), None))


def loss(ends, y, side):
    """Cross entropy, each stage with its own part of the vocabulary."""
    table = gather_weight(ends["table"], jnp.float32, jnp.float32)
    labels, weights = side["labels"], side["weights"]
    whole = reshard(norm("rms", y, [ends["scale"]], EPS), P(batch_entry(current_mesh()), None, None))
    logits = jnp.einsum("bsd,vd->bsv", whole, table)
    highest = lax.pmax(lax.stop_gradient(logits.max(-1)), "pipeline")
    total = lax.psum(jnp.exp(logits - highest[..., None]).sum(-1), "pipeline")
    own = lax.axis_index("pipeline") * table.shape[0] + jnp.arange(table.shape[0])
    picked = lax.psum(jnp.where(labels[..., None] == own, logits, 0).sum(-1), "pipeline")
    return jnp.sum(weights * (jnp.log(total) + highest - picked)), {"tokens": jnp.sum(weights)}


def _fsdp():
    return "fsdp" if current_mesh().shape["fsdp"] > 1 else None


class Pipelined:
    """The stack on a mesh, ready to be lowered: ``function(*arguments)`` under ``jax.set_mesh(mesh)``."""

    def __init__(self, kind, sizes, num_layers, num_microbatches, num_chunks=1, layers_per_stage="even"):
        stages = sizes["pipeline"]
        devices = jax.devices()[: int(np.prod(list(sizes.values())))]
        self.mesh = make_mesh(sizes, devices)
        self.split = split_layers(
            num_layers, num_stages=stages, num_chunks=num_chunks, layers_per_stage=layers_per_stage
        )
        layers, ends, sides = problem(num_layers, num_microbatches)
        weights = {
            name: self._place(leaf[self.split.layer_of_place], LAYER_SPECS[name]) for name, leaf in layers.items()
        }
        weights["mask"] = self._place(self.split.mask, P())
        with jax.set_mesh(self.mesh):
            rows = P(None, batch_entry(self.mesh))
        self.arguments = (
            weights,
            {name: self._put(leaf, END_SPECS[name]) for name, leaf in ends.items()},
            {name: self._put(leaf, rows) for name, leaf in sides.items()},
        )
        replica_axes = ("data",) if sizes.get("data", 1) > 1 else ()
        schedule = build_schedule(kind, num_stages=stages, num_microbatches=num_microbatches, num_chunks=num_chunks)
        run = value_and_grad(schedule, embed=embed, stage=stage, loss=loss, replica_axes=replica_axes)

        def function(weights, ends, sides):
            mask = {"mask": weights.pop("mask")}
            weights, ends = defer_reduction((weights, ends), replica_axes)
            return finish_reduction(run(weights | mask, ends, sides))

        self.function = jax.jit(function)

    def compile(self):
        with jax.set_mesh(self.mesh):
            return self.function.lower(*self.arguments).compile()

    def _put(self, leaf, spec):
        used = P(
            *(
                axis if axis is None or np.prod([self.mesh.shape[a] for a in np.atleast_1d(axis)]) > 1 else None
                for axis in spec
            )
        )
        return jax.device_put(leaf, NamedSharding(self.mesh, used))

    def _place(self, leaf, spec):
        """[chunks, stages, places, ...]"""
        return self._put(leaf, P(None, "pipeline", None, *spec))
