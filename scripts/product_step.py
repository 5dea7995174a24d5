"""jaxpar's own training step alone, without the loop around it, measured exactly as scripts/baseline_step.py is.

    python scripts/product_step.py --fsdp 8 --steps 20

Same model, batches and optimizer as the baseline. It does more than the baseline: gradient norm, clipping, document
masks, z-loss term, per-token weights and the check for numbers that are not finite.
"""

from __future__ import annotations

import time

import baseline_step
import jax
import numpy as np
from baseline_step import BuiltStep, Layout, Shape

from jaxpar.config import load_config
from jaxpar.plan.resolve import resolve
from jaxpar.program import Program


def overrides(shape: Shape, layout: Layout) -> list[str]:
    """Config overrides that make jaxpar train what the baseline trains."""
    values = {
        "model.vocab_size": shape.vocab_size,
        "model.embed_dim": shape.embed_dim,
        "model.num_layers": shape.num_layers,
        "model.num_heads": shape.num_heads,
        "model.num_kv_heads": shape.num_kv_heads,
        "model.head_dim": shape.head_dim,
        "model.mlp_dim": shape.mlp_dim,
        "mesh.data": layout.data,
        "mesh.fsdp": layout.fsdp,
        "mesh.tensor": layout.tensor,
        "data.seq_len": shape.seq_len,
        "train.global_batch_size": shape.rows,
        "train.remat": layout.remat,
        "precision.compute": "float32",
        "optim.schedule": "constant",
        "optim.lr": baseline_step.LEARNING_RATE,
        "optim.weight_decay": baseline_step.WEIGHT_DECAY,
        "runtime.cpu_devices": layout.num_devices,
    }
    return [f"{key}={value}" for key, value in values.items()]


def build(shape: Shape, layout: Layout) -> BuiltStep:
    """Creates the state sharded and compiles the step, as the Trainer does."""
    config = load_config(None, overrides(shape, layout))
    plan = resolve(config, num_devices=layout.num_devices)
    program = Program.build(plan)
    started = time.perf_counter()
    lowered = program.lower_train_step()
    traced = time.perf_counter()
    compiled = lowered.compile()
    compile_s = time.perf_counter() - traced

    def step(state, batch):
        state, metrics = compiled(state, batch)
        return state, metrics["loss"]

    batches = [_batch(program, tokens) for tokens in baseline_step.random_batches(shape, 4)]
    return BuiltStep(step, compiled, program.init(0), batches, plan.num_params, traced - started, compile_s)


def _batch(program: Program, tokens: np.ndarray) -> dict[str, jax.Array]:
    """One document per row, every token with weight 1, from tokens [B, S + 1]."""
    rows, seq_len = tokens.shape[0], tokens.shape[1] - 1
    arrays = {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "positions": np.tile(np.arange(seq_len), (rows, 1)),
        "segment_ids": np.ones((rows, seq_len)),
        "weights": np.ones((rows, seq_len)),
    }
    return {
        name: jax.device_put(arrays[name][None].astype(abstract.dtype), abstract.sharding)
        for name, abstract in program.abstract_batch.items()
    }


if __name__ == "__main__":
    baseline_step.main(__doc__.partition("\n")[0], build)
