"""A user's own module, compiled for 8 H100s in its own process: ``python -m tests.h100.own_step KEY=VALUE... FILE``.

A residual network as anybody would write it, with weights large enough that their collectives matter.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpar.audit import audit
from jaxpar.config import load_config
from jaxpar.experiments.children import end_with_parent
from jaxpar.experiments.compile.pretend import as_if_on
from jaxpar.experiments.compile.targets import gpu_target
from jaxpar.experiments.compile.worker import GPU_OPTIONS, collective_rows, target_devices
from jaxpar.own_model import OwnModel, OwnProgram
from jaxpar.plan.catalogue import gpu_named
from jaxpar.plan.resolve import resolve_own
from jaxpar.plan.topology import make_cluster

WIDTH, LAYERS, ROWS = 4096, 8, 4096


class Residual(nnx.Module):
    def __init__(self, rngs):
        def linear():
            return nnx.Linear(
                WIDTH, WIDTH, rngs=rngs, use_bias=False, kernel_metadata={"logical_axes": ("embed", "mlp")}
            )

        self.layers = nnx.List([linear() for _ in range(LAYERS)])

    def __call__(self, x):
        for layer in self.layers:
            x = x + jax.nn.gelu(layer(x))
        return x


class Rows:
    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        return {"x": np.zeros(WIDTH, np.float32)}


def loss_fn(model, batch):
    return jnp.square(model(batch["x"].astype(jnp.bfloat16)).astype(jnp.float32)).mean(-1).sum(), batch["x"].shape[0]


def main(*arguments: str) -> None:
    *overrides, result = arguments
    end_with_parent()
    config = load_config(None, [f"train.global_batch_size={ROWS}", *overrides], own_model=True)
    target = gpu_target(make_cluster(gpu_named("h100"), num_devices=8))
    devices = target_devices(target)
    own = OwnModel(make=Residual, loss_fn=loss_fn, train_data=Rows())
    with as_if_on(devices[0]):
        program = OwnProgram.of(own, resolve_own(config, num_devices=8, num_rows=ROWS), devices)
        compiled = program.lower_train_step().compile(compiler_options=GPU_OPTIONS)
    Path(result).write_text(json.dumps([row.to_dict() for row in collective_rows(audit(compiled, program.mesh))]))


if __name__ == "__main__":
    main(*sys.argv[1:])
