#!/usr/bin/env python3
"""What the compilation cache saves a restart: start of the process to the first step, with it empty and with it full.

    .venv/bin/python scripts/bench_restart.py --rounds 3

Each round trains three steps of a config twice in processes of their own, with an empty cache and then with what the
first process left there, and compares; printed are medians over the rounds, and the losses, which must be the same.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path

from timed_run import timed_run

TIMEOUT_S = 900
STEPS = 3


def first_step_s(run_dir: Path, cache: Path, arguments: list[str]) -> tuple[float, list[float]]:
    """Seconds from the start of `jaxpar train` until metrics.jsonl has its first row, and the losses."""
    settings = [f"train.stop_at={STEPS}", "train.eval_every=0", "data.validation_fraction=0.0"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment["XDG_CACHE_HOME"] = str(cache)
    seconds, rows = timed_run(run_dir, [*arguments, *settings], timeout_s=TIMEOUT_S, environment=environment)
    return seconds, [row["loss"] for row in rows]


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
