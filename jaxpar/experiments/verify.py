"""``jaxpar verify``: a config's layout, shrunk, on a mesh of fake devices against one device.

``verify`` runs in a process whose fake devices are there; ``python -m jaxpar.experiments.verify`` is that process.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import jax

from jaxpar.config import Config, ConfigError, load_config
from jaxpar.config.schema import MeshConfig
from jaxpar.events.metrics import json_number
from jaxpar.experiments.children import end_with_parent
from jaxpar.experiments.parity import TOLERANCE, Comparison, compare, run_steps
from jaxpar.plan.resolve import resolve
from jaxpar.program import Program
from jaxpar.runtime.start import start

NUM_STEPS = 3
"""Enough for moments and clipping to matter."""


def verify(config: Config) -> Comparison:
    """Some steps of a config on its mesh, compared with the same steps on one device.

    Args:
        config: A small one in float32 (``jaxpar.experiments.shrink``); its mesh is written out.

    Raises:
        ConfigError: It is not legal.
    """
    on_mesh = run_steps(_program(config), num_steps=NUM_STEPS)
    return compare(on_mesh, run_steps(_program(single_device(config)), num_steps=NUM_STEPS))


def single_device(config: Config) -> Config:
    """The same run without any layout."""
    runtime = dataclasses.replace(config.runtime, cpu_devices=1)
    return dataclasses.replace(config, mesh=MeshConfig(), pipeline=type(config.pipeline)(), runtime=runtime)


def _program(config: Config) -> Program:
    num_devices = config.runtime.cpu_devices
    return Program.build(resolve(config, num_devices=num_devices), jax.devices()[:num_devices])


def report(comparison: Comparison) -> dict:
    """A comparison as JSON has it; what is not finite is None."""
    what, difference = comparison.worst
    return {
        "equal": comparison.equal,
        "tolerance": TOLERANCE,
        "steps": NUM_STEPS,
        "worst": {"what": what, "difference": json_number(difference)},
        "loss": json_number(comparison.loss),
        "grad_norm": json_number(comparison.grad_norm),
        "grads": {name: json_number(value) for name, value in comparison.grads.items()},
        "params": {name: json_number(value) for name, value in comparison.params.items()},
        "not_compared": list(comparison.unmoved),
    }


def main(config_file: str, result_file: str) -> None:
    """Verify a config file and write the report."""
    end_with_parent()
    config = load_config(config_file)
    start(config.runtime)
    Path(result_file).write_text(json.dumps(report(verify(config))), encoding="utf-8")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"error: {error}")
