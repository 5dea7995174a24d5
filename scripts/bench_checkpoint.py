"""What saving, restoring and resharding cost, next to what others take for the same bytes, all in one run.

    python scripts/bench_checkpoint.py                          # 2 GB of state, about ten minutes on 2 shared cores
    python scripts/bench_checkpoint.py --quick --json bench.json
    python scripts/bench_checkpoint.py --dir /dev/shm           # what the code costs, with no disk in the way

Every measurement is a process of its own, on fake CPU devices; the state is that of a Llama-like model: parameters and
AdamW moments, sharded as `jaxpar train` has them on fsdp=8. Measured are

- restore and save through jaxpar's Store, tensorstore alone (the same chunks and format) and safetensors, in turns;
- how long the training loop waits for a save, against one copy of the state in memory;
- bytes that devices read from files on other meshes, against what they need: as saved, and after `jaxpar reshard`;
- peak resident memory of `jaxpar reshard` against --max-memory, and its time against a plain copy of the files.

Files lie in the page cache when they are read. Ratios are taken within a round and their median is reported, since
seconds on a shared machine mean little. Goals: restore >= 0.9 x the fastest, blocked <= 1.5 x a copy, bytes read <=
1.05 x what is needed at 2 and 4 times finer shards, peak memory <= the bound. A missed goal is only shown.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

SCRIPTS = Path(__file__).resolve().parent
MIN_RESTORE_RATIO, MAX_BLOCKED_RATIO, MAX_READ_RATIO = 0.9, 1.5, 1.05
READERS = ("fsdp=8", "fsdp=16", "fsdp=32", "fsdp=8,tensor=2")
"""Meshes that read what fsdp=8 saved."""
FINER = ("fsdp=16", "fsdp=32")
"""Those that the goal is about."""
RESHARDED_TO = {"fsdp=8": "fsdp=32", "fsdp=16": "fsdp=32", "fsdp=32": "fsdp=32", "fsdp=8,tensor=2": "fsdp=8,tensor=2"}
"""What it is resharded to for each of them."""
DISK_BYTES_PER_STATE_BYTE = 4.5
"""Two checkpoints of the Store, tensorstore's, safetensors', and room."""
LEAST_MEMORY = 640 * 2**20
"""What the reshard process needs for any checkpoint, bytes."""
TIMEOUT_S = 1800


@dataclass(frozen=True)
class Speed:
    """The process that saves and restores in turns."""

    num_bytes: int
    num_chunks: int
    seconds: dict[str, list[float]]
    """Per round, by what was timed."""
    cpu_seconds: dict[str, list[float]]
    """The same in CPU seconds of all its threads, which other processes disturb less."""

    def ratio(self, over: str, *under: str, cpu: bool = False) -> float:
        """Median over rounds of the least of ``under`` / ``over``: speed relative to the fastest."""
        taken = self.cpu_seconds if cpu else self.seconds
        rounds = zip(taken[over], *(taken[name] for name in under), strict=True)
        return statistics.median(min(others) / ours for ours, *others in rounds)


@dataclass(frozen=True)
class Reshard:
    """One process of `jaxpar reshard`."""

    max_memory: int
    """Its bound, bytes."""
    peak_memory: int
    """Most resident memory it had, bytes."""
    seconds: float
    copy_seconds: float
    """What copying the step's files takes."""


def run_piece(piece: str, directory: Path, *options: str) -> dict:
    """Runs scripts/checkpoint_work.py; what it printed."""
    command = [sys.executable, str(SCRIPTS / "checkpoint_work.py"), piece, str(directory), *options]
    # Freed memory stays with the process: pages that are new to it cost more than what is measured here, and as much
    # for every side.
    keep_memory = {"MALLOC_MMAP_THRESHOLD_": str(2**40), "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_ARENA_MAX": "1"}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=os.environ | keep_memory
    )
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with {result.returncode}:\n{result.stderr[-4000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def run_reshard(source: Path, destination: Path, mesh: str, max_memory: int) -> Reshard:
    """Runs `jaxpar reshard` and watches its memory."""
    started = time.perf_counter()
    shutil.copytree(source, destination)
    os.sync()
    copy_seconds = time.perf_counter() - started
    shutil.rmtree(destination)
    command = [sys.executable, "-m", "jaxpar", "reshard", str(source), str(destination)]
    command += ["--mesh", mesh, "--max-memory", str(max_memory), "--json"]
    peak = 0
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        while process.poll() is None:
            peak = max(peak, peak_memory(process.pid))
            if time.perf_counter() - started > TIMEOUT_S:
                process.kill()
            time.sleep(0.02)
        if process.returncode:
            log.seek(0)
            raise RuntimeError(f"{' '.join(command)} failed with {process.returncode}:\n{log.read()[-4000:]}")
    return Reshard(max_memory, peak, time.perf_counter() - started, copy_seconds)


def peak_memory(pid: int) -> int:
    """Most resident memory that a process has had so far, bytes; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def speed_table(speed: Speed) -> Table:
    """Seconds, gigabytes per second, CPU seconds and ratio of everything that has a time."""
    rounds = len(speed.seconds["copy"])
    table = Table(
        title=f"{speed.num_bytes / 1e9:.2f} GB in {speed.num_chunks} chunks, fsdp=8, median of {rounds} rounds"
    )
    table.add_column("")
    for heading in ("s", "GB/s", "CPU s", "speed / fastest other", "goal"):
        table.add_column(heading, justify="right")
    for kind in ("restore", "save"):
        others = (f"{kind}, tensorstore", f"{kind}, safetensors")
        for name in (f"{kind}, Store", f"{kind}, Store unverified", *others):
            if name in speed.seconds:
                ratio = speed.ratio(name, *others) if name not in others else None
                goal = MIN_RESTORE_RATIO if kind == "restore" else None
                table.add_row(*_times(speed, name), _number(ratio), _verdict(ratio, goal, least=True))
        table.add_section()
    for name, goal in (("copy", None), ("save returns", MAX_BLOCKED_RATIO), ("next step done", None)):
        ratio = None if name == "copy" else 1 / speed.ratio(name, "copy")
        label = {"copy": "one copy of the state", "save returns": "training waits for save()"}
        table.add_row(
            label.get(name, "until a trivial step after it is done"),
            *_times(speed, name)[1:],
            "" if ratio is None else f"{ratio:.2f} copies",
            _verdict(ratio, goal, least=False),
        )
    return table


def _times(speed: Speed, name: str) -> list[str]:
    seconds, cpu = statistics.median(speed.seconds[name]), statistics.median(speed.cpu_seconds[name])
    return [name, f"{seconds:.2f}", f"{speed.num_bytes / 1e9 / seconds:.2f}", f"{cpu:.2f}" if cpu else ""]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _verdict(value: float | None, goal: float | None, *, least: bool) -> str:
    if value is None or goal is None:
        return ""
    met = value >= goal if least else value <= goal
    return f"{'>=' if least else '<='} {goal:g} [{'green]met' if met else 'red]missed'}[/]"


def reads_table(reads: dict[str, dict[str, float]]) -> Table:
    """Bytes read over bytes needed, by mesh, before and after resharding."""
    table = Table(title="bytes read / bytes needed; saved on fsdp=8")
    table.add_column("restored on")
    for heading in ("as saved", "goal", "resharded to", "then", "goal"):
        table.add_column(heading, justify="right")
    for mesh in READERS:
        saved, resharded = reads["as saved"][mesh], reads["resharded"][mesh]
        goal = MAX_READ_RATIO if mesh in FINER else None
        verdicts = [_verdict(value, goal, least=False) for value in (saved, resharded)]
        table.add_row(mesh, f"{saved:.3f}", verdicts[0], RESHARDED_TO[mesh], f"{resharded:.3f}", verdicts[1])
    return table


def reshard_table(runs: dict[str, Reshard], num_bytes: int) -> Table:
    """Memory against its bound, time against a plain copy."""
    table = Table(title=f"jaxpar reshard of {num_bytes / 1e9:.2f} GB, verified, from the start of the process")
    for heading in ("--mesh", "bound, MiB", "peak, MiB", "goal", "s", "GB/s", "plain copy, s"):
        table.add_column(heading, justify="right")
    for mesh, done in runs.items():
        table.add_row(
            mesh,
            f"{done.max_memory / 2**20:.0f}",
            f"{done.peak_memory / 2**20:.0f}",
            _verdict(done.peak_memory / done.max_memory, 1.0, least=False),
            f"{done.seconds:.1f}",
            f"{num_bytes / 1e9 / done.seconds:.2f}",
            f"{done.copy_seconds:.1f}",
        )
    return table


def main() -> int:
    """Measures everything, prints the tables, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gb", type=float, help="gigabytes of the state (2; quick: 0.25)")
    parser.add_argument("--quick", action="store_true", help="a small state and few rounds: a look, not a measurement")
    parser.add_argument("--rounds", type=int, help="rounds of saving and restoring (5; quick: 3)")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="where files are written")
    parser.add_argument("--json", type=Path, help="write everything measured here")
    options = parser.parse_args()
    gb = options.gb or (0.25 if options.quick else 2.0)
    rounds = options.rounds or (3 if options.quick else 5)
    wanted, free = gb * 1e9 * DISK_BYTES_PER_STATE_BYTE, shutil.disk_usage(options.dir).free
    if free < wanted:
        parser.error(f"{options.dir} has {free / 1e9:.1f} GB free, {wanted / 1e9:.1f} are needed: give --dir or --gb")
    console = Console()
    console.width = max(console.width, 110)
    with tempfile.TemporaryDirectory(prefix="jaxpar-bench-", dir=options.dir) as name:
        directory = Path(name)
        with console.status("saving and restoring"):
            speed = Speed(**run_piece("speed", directory, f"--gb={gb}", f"--rounds={rounds}"))
        console.print(speed_table(speed))
        max_memory = max(LEAST_MEMORY, int(speed.num_bytes / 2))
        runs, reads = {}, {"as saved": {}, "resharded": {}}
        for target in dict.fromkeys(RESHARDED_TO.values()):
            with console.status(f"resharding to {target}"):
                runs[target] = run_reshard(directory / "store", directory / "resharded", target, max_memory)
            for mesh in (mesh for mesh in READERS if RESHARDED_TO[mesh] == target):
                for when, place in (("as saved", "store"), ("resharded", "resharded")):
                    with console.status(f"reading on {mesh}"):
                        counted = run_piece("reads", directory / place, f"--gb={gb}", f"--mesh={mesh}")
                    reads[when][mesh] = counted["read"] / counted["needed"]
            shutil.rmtree(directory / "resharded")
        console.print(reshard_table(runs, speed.num_bytes))
        console.print(reads_table(reads))
    if options.json:
        options.json.write_text(json.dumps(_document(speed, runs, reads), indent=2) + "\n")
    return 0


def _document(speed: Speed, runs: dict[str, Reshard], reads: dict[str, dict[str, float]]) -> dict[str, object]:
    others = ("restore, tensorstore", "restore, safetensors")
    return {
        "machine": {"cores": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()},
        "summary": {
            "restore_ratio": speed.ratio("restore, Store", *others),
            "restore_unverified_ratio": speed.ratio("restore, Store unverified", *others),
            "save_ratio": speed.ratio("save, Store", "save, tensorstore", "save, safetensors"),
            "blocked_copies": 1 / speed.ratio("save returns", "copy"),
            "next_step_copies": 1 / speed.ratio("next step done", "copy"),
            "read_ratio": reads,
            "reshard_peak_over_bound": max(run.peak_memory / run.max_memory for run in runs.values()),
        },
        "speed": vars(speed),
        "reshard": {mesh: vars(run) for mesh, run in runs.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
