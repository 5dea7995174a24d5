"""One `jaxpar train` in a process of its own, watched from outside; what the benchmarks of whole runs share."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


def timed_run(
    run_dir: Path, settings: Sequence[str], *, timeout_s: float, environment: Mapping[str, str] | None = None
) -> tuple[float, list[dict]]:
    """Trains, with ``run.dir`` and no checkpoints set on top of ``settings`` (which may begin with a config file).

    Returns:
        Seconds from the start of the process until metrics.jsonl has its first row, and all of its rows.
    """
    metrics, first_step_s = run_dir / "metrics.jsonl", 0.0
    own = [f"run.dir={run_dir}", "checkpoint.every=0", "checkpoint.final=false"]
    command = [sys.executable, "-m", "jaxpar", "train", *settings, *own]
    with run_dir.with_name(f"{run_dir.name}.log").open("w+") as log:
        started = time.perf_counter()
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        while process.poll() is None:
            if not first_step_s and metrics.exists() and metrics.stat().st_size:
                first_step_s = time.perf_counter() - started
            if time.perf_counter() - started > timeout_s:
                process.kill()
            time.sleep(0.005)
        if process.returncode:
            log.seek(0)
            raise RuntimeError(f"{' '.join(command)} failed with {process.returncode}:\n{log.read()[-4000:]}")
    return first_step_s, [json.loads(line) for line in metrics.read_text().splitlines()]
