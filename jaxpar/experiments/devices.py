"""Starts JAX as a run of a config would, alone, and writes down what it found: a process of its own, for ``doctor``."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import jax

from jaxpar.config import load_config
from jaxpar.experiments.children import end_with_parent
from jaxpar.runtime.arrival import StartError
from jaxpar.runtime.start import start


def main(config_file: str, result_file: str) -> None:
    """Write platform, device_kind, number of devices and notes."""
    end_with_parent()
    runtime = load_config(config_file).runtime
    # The other processes are not there, and need not be.
    processes = start(dataclasses.replace(runtime, num_processes=1, process_id=0, coordinator=None))
    found = {
        "platform": processes.platform,
        "device_kind": processes.device_kind,
        "devices": processes.local_devices,
        "jax": jax.__version__,
        "notes": list(processes.notes),
    }
    Path(result_file).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except StartError as error:
        sys.exit(f"error: {error}")
