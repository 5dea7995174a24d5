"""The practical limit: a hand-tuned training step in pure JAX, which scripts/bench_step.py compares jaxpar with.

    python scripts/baseline_step.py --fsdp 8 --steps 20

A Llama-like decoder, AdamW, float32, random tokens; one jit per step. Layers are scanned, each is recomputed in the
backward pass, and its weights are gathered just before use by sharding constraints (ZeRO-3 in automatic mode). It has
nothing that a trainer needs besides: no configuration, clipping, metrics, data, checkpoints or checks.

Prints one JSON object: seconds of tracing, compiling and of each step, losses, and the compiler's FLOPs.

Letters in shapes: B rows, S sequence, D embed, n query heads, k kv heads, g = n / k, w head width, F mlp, V vocab,
L layers.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the model and of a batch; the defaults have 20.3 million parameters and 4096 tokens a step."""

    vocab_size: int = 32000
    embed_dim: int = 256
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 32
    mlp_dim: int = 1024
    seq_len: int = 256
    rows: int = 16

    def weights(self) -> dict:
        """Array shapes of the parameters; ``layers`` are stacked along L."""
        d, h, f, layers = self.embed_dim, self.head_dim, self.mlp_dim, self.num_layers
        return {
            "embed": (self.vocab_size, d),
            "head": (d, self.vocab_size),
            "norm": (d,),
            "layers": {
                "query": (layers, d, self.num_heads, h),
                "key": (layers, d, self.num_kv_heads, h),
                "value": (layers, d, self.num_kv_heads, h),
                "out": (layers, self.num_heads, h, d),
                "gate": (layers, d, f),
                "up": (layers, d, f),
                "down": (layers, f, d),
                "norm_attention": (layers, d),
                "norm_mlp": (layers, d),
            },
        }


SPECS = {
    "embed": P("fsdp", None),
    "head": P("fsdp", "tensor"),
    "norm": P(None),
    "layers": {
        "query": P(None, "fsdp", "tensor", None),
        "key": P(None, "fsdp", "tensor", None),
        "value": P(None, "fsdp", "tensor", None),
        "out": P(None, "tensor", None, "fsdp"),
        "gate": P(None, "fsdp", "tensor"),
        "up": P(None, "fsdp", "tensor"),
        "down": P(None, "tensor", "fsdp"),
        "norm_attention": P(None, None),
        "norm_mlp": P(None, None),
    },
}
BATCH = P(("data", "fsdp"))
LEARNING_RATE, B1, B2, EPS, WEIGHT_DECAY = 3e-4, 0.9, 0.95, 1e-8, 0.1


def constrain(array: jax.Array, spec: P) -> jax.Array:
    """Asks the partitioner for a sharding; without a mesh of several devices there is nothing to ask."""
    return array if jax.sharding.get_abstract_mesh().size == 1 else lax.with_sharding_constraint(array, spec)


def gather(weight: jax.Array, spec: P) -> jax.Array:
    """The weight whole along fsdp, and still sharded along tensor."""
    return constrain(weight, P(*(None if axis == "fsdp" else axis for axis in spec)))


def rms_norm(x_bsd: jax.Array, scale_d: jax.Array) -> jax.Array:
    """Root-mean-square normalisation over D."""
    return x_bsd * lax.rsqrt(jnp.mean(x_bsd * x_bsd, axis=-1, keepdims=True) + 1e-5) * scale_d


def rotate(x_bsnw: jax.Array) -> jax.Array:
    """Rotary positions 0 to S - 1, halves convention."""
    half = x_bsnw.shape[-1] // 2
    angle = jnp.arange(x_bsnw.shape[1])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    sin, cos = jnp.sin(angle)[:, None, :], jnp.cos(angle)[:, None, :]
    first, second = x_bsnw[..., :half], x_bsnw[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attention(y_bsd: jax.Array, weights: dict) -> jax.Array:
    """Causal attention with grouped query heads; returns its output projection [B, S, D]."""
    query = rotate(jnp.einsum("bsd,dnw->bsnw", y_bsd, weights["query"]))
    key = rotate(jnp.einsum("bsd,dkw->bskw", y_bsd, weights["key"]))
    value = jnp.einsum("bsd,dkw->bskw", y_bsd, weights["value"])
    rows, seq, kv_heads, width = key.shape
    grouped = query.reshape(rows, seq, kv_heads, -1, width)
    scores = jnp.einsum("bqkgw,bskw->bkgqs", grouped, key) * width**-0.5
    causal = jnp.tril(jnp.ones((seq, seq), bool))
    probabilities = jax.nn.softmax(jnp.where(causal, scores, -1e30), axis=-1)
    mixed = jnp.einsum("bkgqs,bskw->bqkgw", probabilities, value).reshape(rows, seq, -1, width)
    # jnp.einsum contracts dims in alphabetical order: other letters for n and w would cost transposes in every layer.
    return jnp.einsum("bsnw,nwd->bsd", mixed, weights["out"])


def block(x_bsd: jax.Array, sharded: dict) -> jax.Array:
    """One Transformer block; gathers its own weights."""
    weights = {name: gather(weight, P(*SPECS["layers"][name][1:])) for name, weight in sharded.items()}
    x_bsd = constrain(x_bsd + attention(rms_norm(x_bsd, weights["norm_attention"]), weights), BATCH)
    y_bsd = rms_norm(x_bsd, weights["norm_mlp"])
    hidden_bsf = jax.nn.silu(y_bsd @ weights["gate"]) * (y_bsd @ weights["up"])
    return constrain(x_bsd + hidden_bsf @ weights["down"], BATCH)


def cross_entropy(x_bsd: jax.Array, head_dv: jax.Array, targets_bs: jax.Array) -> jax.Array:
    """Sum of the negative log-likelihoods of the targets."""
    logits_bsv = constrain(x_bsd @ head_dv, P(("data", "fsdp"), None, "tensor"))
    highest = lax.stop_gradient(logits_bsv.max(axis=-1))
    log_partition = jnp.log(jnp.exp(logits_bsv - highest[..., None]).sum(axis=-1)) + highest
    return (log_partition - jnp.take_along_axis(logits_bsv, targets_bs[..., None], axis=-1)[..., 0]).sum()


def loss(weights: dict, tokens: jax.Array, remat: str) -> jax.Array:
    """Mean next-token loss of tokens [B, S + 1]."""
    layer = block if remat == "none" else jax.checkpoint(block)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    x_bsd = constrain(jnp.take(gather(weights["embed"], SPECS["embed"]), inputs, axis=0), BATCH)
    x_bsd, _ = lax.scan(lambda x, weights: (layer(x, weights), None), x_bsd, weights["layers"])
    x_bsd = rms_norm(x_bsd, weights["norm"])
    return cross_entropy(x_bsd, gather(weights["head"], SPECS["head"]), targets) / targets.size


def adamw(weights: dict, first: dict, second: dict, gradients: dict, step: jax.Array) -> tuple[dict, dict, dict]:
    """AdamW with bias correction (Loshchilov and Hutter 2019); decay on every leaf."""
    first = jax.tree.map(lambda m, g: B1 * m + (1 - B1) * g, first, gradients)
    second = jax.tree.map(lambda v, g: B2 * v + (1 - B2) * g * g, second, gradients)
    correct1, correct2 = 1 - B1**step, 1 - B2**step

    def update(weight, m, v):
        return weight - LEARNING_RATE * (m / correct1 / (jnp.sqrt(v / correct2) + EPS) + WEIGHT_DECAY * weight)

    return jax.tree.map(update, weights, first, second), first, second


def train_step(state: tuple, tokens: jax.Array, *, remat: str = "full") -> tuple[tuple, jax.Array]:
    """One optimizer step: state is (weights, first moments, second moments, step count)."""
    weights, first, second, step = state
    value, gradients = jax.value_and_grad(loss)(weights, tokens, remat)
    step = step + 1
    return (*adamw(weights, first, second, gradients, step.astype(jnp.float32)), step), value


def init_state(shape: Shape, key: jax.Array) -> tuple:
    """Normal weights with standard deviation 1 / sqrt(fan in), 0.02 for the embedding; ones for norms; zero moments."""
    leaves, tree = jax.tree.flatten_with_path(shape.weights(), is_leaf=lambda node: isinstance(node, tuple))
    keys = jax.random.split(key, len(leaves))
    fan_in = {"out": shape.num_heads * shape.head_dim, "down": shape.mlp_dim}

    def leaf(path, size, leaf_key):
        name = path[-1].key
        if "norm" in name:
            return jnp.ones(size)
        scale = 0.02 if name == "embed" else fan_in.get(name, shape.embed_dim) ** -0.5
        return scale * jax.random.normal(leaf_key, size)

    weights = jax.tree.unflatten(tree, [leaf(path, size, k) for (path, size), k in zip(leaves, keys, strict=True)])
    return weights, jax.tree.map(jnp.zeros_like, weights), jax.tree.map(jnp.zeros_like, weights), jnp.int32(0)


def random_batches(shape: Shape, count: int) -> list[np.ndarray]:
    """Batches of uniform random tokens [B, S + 1]; always the same."""
    rng = np.random.default_rng(0)
    size = (shape.rows, shape.seq_len + 1)
    return [rng.integers(0, shape.vocab_size, size, dtype=np.int32) for _ in range(count)]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Devices of each axis, and what the backward pass computes again."""

    data: int = 1
    """Replicas."""
    fsdp: int = 1
    """Devices that shard the weights; the batch is split over them and the replicas."""
    tensor: int = 1
    """Devices that shard heads, MLP width and vocabulary."""
    remat: str = "full"
    """``none`` or ``full``; jaxpar knows more."""

    @property
    def num_devices(self) -> int:
        """Devices of all axes."""
        return self.data * self.fsdp * self.tensor


@dataclass(frozen=True)
class BuiltStep:
    """A compiled step with the state and the batches that it is run on."""

    step: Callable[[object, object], tuple[object, jax.Array]]
    """(state, batch) -> (state, loss); calls ``compiled``."""
    compiled: jax.stages.Compiled
    state: object
    batches: Sequence[object]
    num_params: int
    trace_s: float
    compile_s: float


def build(shape: Shape, layout: Layout) -> BuiltStep:
    """Creates the state sharded and compiles the step."""
    sizes = (layout.data, layout.fsdp, layout.tensor)
    mesh = jax.make_mesh(sizes, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)

    def shardings(specs):
        is_spec = {"is_leaf": lambda node: isinstance(node, P)}
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, **is_spec)

    state_shardings = shardings((SPECS, SPECS, SPECS, P()))
    with jax.set_mesh(mesh):
        state = jax.jit(lambda key: init_state(shape, key), out_shardings=state_shardings)(jax.random.key(0))
        batches = [jax.device_put(batch, NamedSharding(mesh, BATCH)) for batch in random_batches(shape, 4)]
        started = time.perf_counter()
        step = jax.jit(
            partial(train_step, remat=layout.remat), donate_argnums=0, out_shardings=(state_shardings, shardings(P()))
        )
        lowered = step.lower(state, batches[0])
        traced = time.perf_counter()
        compiled = lowered.compile()
        compile_s = time.perf_counter() - traced
    num_params = sum(leaf.size for leaf in jax.tree.leaves(state[0]))
    return BuiltStep(compiled, compiled, state, batches, num_params, traced - started, compile_s)


def run(built: BuiltStep, steps: int) -> dict:
    """Runs steps and waits for each: lists of wall seconds, CPU seconds of the process, losses; time of the first."""
    state, seconds, cpu_seconds, losses = built.state, [], [], []
    first_step_at = 0.0
    for step in range(steps):
        wall, cpu = time.perf_counter(), time.process_time()
        state, value = built.step(state, built.batches[step % len(built.batches)])
        losses.append(float(value))
        seconds.append(time.perf_counter() - wall)
        cpu_seconds.append(time.process_time() - cpu)
        first_step_at = first_step_at or time.time()
    return {"step_s": seconds, "step_cpu_s": cpu_seconds, "losses": losses, "first_step_at": first_step_at}


def report(shape: Shape, built: BuiltStep, measured: dict) -> dict:
    """Everything measured, as JSON types; the medians leave out the first three steps."""
    steady = slice(min(3, len(measured["step_s"]) - 1), None)
    return {
        "shape": dataclasses.asdict(shape),
        "num_params": built.num_params,
        "trace_s": built.trace_s,
        "compile_s": built.compile_s,
        "median_step_s": statistics.median(measured["step_s"][steady]),
        "median_step_cpu_s": statistics.median(measured["step_cpu_s"][steady]),
        "compiler_flops": built.compiled.cost_analysis()["flops"],
        **measured,
    }


def use_fake_cpu_devices(count: int) -> None:
    """Runs this process on ``count`` fake CPU devices; call it before anything uses a device."""
    # On a loaded machine a fake device can be late for a collective; the default of 40 s then aborts the process.
    timeout = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {timeout}".strip()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def main(description: str, build_step: Callable[[Shape, Layout], BuiltStep]) -> None:
    """Command line: the mesh, the number of steps, every field of Shape, and where to write the compiled program.

    Args:
        description: what is measured, for --help.
        build_step: from (shape, layout) to the step to measure.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", type=int, default=1, help="replicas")
    parser.add_argument("--remat", default="full", help="what the backward pass computes again")
    parser.add_argument("--fsdp", type=int, default=1, help="devices that shard the batch and the weights")
    parser.add_argument("--tensor", type=int, default=1, help="devices that shard heads, MLP width and vocabulary")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--hlo", type=Path, help="write the text of the compiled program here")
    for field in dataclasses.fields(Shape):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    options = vars(parser.parse_args())
    layout = Layout(**{field.name: options.pop(field.name) for field in dataclasses.fields(Layout)})
    steps, hlo = options.pop("steps"), options.pop("hlo")
    use_fake_cpu_devices(layout.num_devices)
    shape = Shape(**options)
    built = build_step(shape, layout)
    if hlo:
        hlo.write_text(built.compiled.as_text())
    print(json.dumps(report(shape, built, run(built, steps))))


if __name__ == "__main__":
    main(__doc__.partition("\n")[0], build)
