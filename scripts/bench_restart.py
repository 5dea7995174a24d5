#!/usr/bin/env python3
"""What the compilation cache saves a restart: start of the process to the first step, with it empty and with it full.

    .venv/bin/python scripts/bench_restart.py --rounds 3

Each round trains three steps of a config twice in processes of their own, with an empty cache and then with what the
first process left there, and compares; printed are medians over the rounds, and the losses, which must be the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 900
STEPS = 3


def first_step_s(run_dir: Path, cache: Path, arguments: list[str]) -> tuple[float, list[float]]:
    """Seconds from the start of `jaxpar train` until metrics.jsonl has its first row, and the losses."""
    settings = [f"run.dir={run_dir}", f"train.stop_at={STEPS}", "train.eval_every=0", "data.validation_fraction=0.0"]
    settings += ["checkpoint.every=0", "checkpoint.final=false"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    metrics = run_dir / "metrics.jsonl"
    first = 0.0
    with (run_dir.parent / f"{run_dir.name}.log").open("w+") as log:
        started = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxpar", "train", *arguments, *settings],
            cwd=ROOT,
            env={**environment, "XDG_CACHE_HOME": str(cache)},
            stdout=log,
            stderr=log,
        )
        while process.poll() is None:
            if not first and metrics.exists() and metrics.stat().st_size:
                first = time.perf_counter() - started
            if time.perf_counter() - started > TIMEOUT_S:
                process.kill()
            time.sleep(0.005)
        log.seek(0)
        if process.returncode:
            raise RuntimeError(f"training failed with {process.returncode}:\n{log.read()[-4000:]}")
    return first, [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("arguments", nargs="*", default=["configs/quickstart.toml"], help="config file and overrides")
    given = parser.parse_args()
    cold, warm = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(given.rounds):
            place = Path(scratch) / str(number)
            place.mkdir()
            seconds, losses = first_step_s(place / "cold", place / "cache", given.arguments)
            cold.append(seconds)
            seconds, again = first_step_s(place / "warm", place / "cache", given.arguments)
            warm.append(seconds)
            if losses != again:
                raise RuntimeError(f"the losses differ: {losses} and {again}")
            print(f"round {number + 1}: empty {cold[-1]:.1f} s, full {warm[-1]:.1f} s", flush=True)
    ratio = statistics.median(w / c for c, w in zip(cold, warm, strict=True))
    medians = f"empty {statistics.median(cold):.1f} s, full {statistics.median(warm):.1f} s"
    print(f"start to first step: {medians}, {ratio:.2f}x")


if __name__ == "__main__":
    main()
