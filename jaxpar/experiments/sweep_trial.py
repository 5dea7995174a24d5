"""One trial of a sweep, in a process of its own: trains a few steps and says what they took."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import jax

from jaxpar.audit import audit
from jaxpar.checkpoint.errors import CheckpointError
from jaxpar.config import Config, ConfigError, load_config
from jaxpar.experiments.children import BAD_CONFIG, end_with_parent
from jaxpar.loop import RunFailed
from jaxpar.plan.resolve import resolve
from jaxpar.program import Program
from jaxpar.runtime.arrival import StartError
from jaxpar.trainer import Trainer


def measure(config: Config, warmup: int) -> dict[str, object]:
    """Trains and reads the run's own metrics.

    Args:
        config: Few steps.
        warmup: Steps at the start that are not counted.

    Returns:
        Seconds of a step (median), tokens/s of all devices, MFU where the GPU's peak is known, the last loss, bytes of
        the fullest device as it counted them and as the compiler did, and devices.
    """
    Trainer(config).run()
    lines = (Path(config.run.dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    step_s = statistics.median(step["step_s"] for step in steps[warmup:])
    device = jax.devices()[0]
    utilisations = [step["mfu"] for step in steps[warmup:] if "mfu" in step]
    on_device, by_compiler = steps[-1].get("memory_peak_bytes"), compiled_bytes(config)
    return {
        "platform": device.platform,
        "device_kind": device.device_kind,
        "devices": jax.device_count(),
        "steps": len(steps),
        "step_s": step_s,
        "tokens_per_s": config.train.global_batch_size * config.data.seq_len / step_s,
        "mfu": statistics.median(utilisations) if utilisations else None,
        "loss": steps[-1]["loss"],
        "losses": [step["loss"] for step in steps],
        "peak_bytes": on_device or by_compiler,
        "peak_of": "device" if on_device else "compiler",
        "compiled_bytes": by_compiler,
    }


def compiled_bytes(config: Config) -> int | None:
    """Bytes of one device while a step runs, by the compiler's account."""
    resolved = load_config(Path(config.run.dir) / "config.toml")
    program = Program.build(resolve(resolved, num_devices=jax.device_count()))
    memory = audit(program.lower_train_step().compile(), program.mesh).memory
    return None if memory is None else memory.total


def main(config_file: str, warmup: str, result_file: str) -> None:
    """Run the trial of a config file and write its measurements."""
    end_with_parent()
    Path(result_file).write_text(json.dumps(measure(load_config(config_file), int(warmup))), encoding="utf-8")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(BAD_CONFIG)
    except (StartError, RunFailed, CheckpointError) as error:
        sys.exit(f"error: {error}")
