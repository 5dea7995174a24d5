"""jaxpar on one NVIDIA GPU, in under 8 minutes: numerics of attention, speed of the step, memory beside the plan's.

    python scripts/single_gpu.py --json single_gpu.json
    python scripts/single_gpu.py --offload                    # one trial more
    python scripts/single_gpu.py train.global_batch_size=2    # overrides of every trial, here for a smaller GPU
    python scripts/single_gpu.py --cpu                        # a rehearsal: tiny shapes on the CPU, half a minute

1. Attention kernels (cuDNN, tokamax, XLA): output and gradients against a float32 reference (attention_numerics.py).
2. Training steps of Llama 3.2 1B in bfloat16 by each kernel and with each recomputation, through `jaxpar sweep`: step
   time, tokens/s, MFU; the peak of memory that the device counted, the compiler's, and `jaxpar plan`'s without reserve.

Each measurement is a process of its own, so that one that fails or hangs costs only itself. What a machine cannot do is
left out by name, and so is what the time does not allow. Exit codes: 0 all that ran is right, 1 something failed or
numbers are off, 2 there is no GPU, or an override is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxpar.config import ConfigError, load_config
from jaxpar.experiments.children import environment, run_child
from jaxpar.experiments.machine import ask_jax, installed
from jaxpar.experiments.sweep import ILLEGAL, OK, OOM, first_reason, run_sweep
from jaxpar.experiments.sweep_file import Trial, read_sweep
from jaxpar.plan.catalogue import find_gpu, gpu_named
from jaxpar.plan.evaluation import evaluate_config
from jaxpar.plan.facts import gather_facts
from jaxpar.plan.shape import shape_of
from jaxpar.plan.topology import make_cluster

SCRIPTS = Path(__file__).resolve().parent
BUDGET_S = 460
LIMITS_S = {"devices": 60, "attention": 120, "trial": 110}
"""Longest that one process of a part may take; less where less is left of the budget."""
STEPS, WARMUP = 12, 4

ONE_DEVICE = ("mesh.data=1", "mesh.fsdp=1", "data.pack=false", "precision.compute=bfloat16")
MODEL = ("model.preset=llama-3.2-1b", "data.seq_len=4096", "train.global_batch_size=4")
SMALL_MODEL = ("model.preset=tiny-bytes", "model.num_layers=2", "data.seq_len=32", "train.global_batch_size=2")
TRIALS = (("cudnn", "selective"), ("tokamax", "selective"), ("xla", "selective"), ("cudnn", "full"), ("cudnn", "none"))
"""(train.attention, train.remat), what matters most first."""
REHEARSED = (("xla", "selective"), ("cudnn", "selective"))
GIB = 2**30


class Clock:
    """Seconds that are left."""

    def __init__(self, budget_s: float):
        self._end = time.monotonic() + budget_s

    def limit(self, part: str) -> float:
        """Seconds that the next process of a part may take; 0 or less: there is no time for it."""
        return min(LIMITS_S[part], self._end - time.monotonic())


def describe_packages(console: Console) -> dict[str, str | None]:
    """Versions, and what is missing by name."""
    packages = installed()
    console.print(", ".join(f"{name} {packages[name]}" for name in ("jax", "jaxlib", "flax", "jaxpar")))
    if not any(packages[f"jax-cuda{major}-plugin"] for major in (12, 13)):
        console.print("missing: jax-cuda12-plugin or jax-cuda13-plugin, without which JAX sees no GPU")
    if not packages["tokamax"]:
        console.print("missing: tokamax (pip install tokamax==0.0.17), so its kernels are left out")
    return packages


def attention_results(clock: Clock, folder: Path, *, on_cpu: bool) -> tuple[list[dict], str | None]:
    """What attention_numerics.py found until its end, and why it ended early."""
    results = folder / "attention.jsonl"
    ended = run_child(
        ["attention_numerics", str(results), *(["--small"] if on_cpu else [])],
        environment=environment(fake_devices=on_cpu),
        timeout_s=clock.limit("attention"),
        log=folder / "attention.txt",
        cwd=SCRIPTS,
    )
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    return [json.loads(line) for line in lines], ended.reason if ended.code else None


def attention_words(result: Mapping) -> str:
    """A line for people."""
    head = f"{result['kernel']}, {result['case']}"
    if "left_out" in result:
        return f"{head}: left out, {result['left_out']}"
    if "error" in result:
        return f"{head}: FAILED, {result['error']}"
    found = ", ".join(f"{name} {value:.2%}" for name, value in result["differences"].items())
    return f"{head}: {'' if result['ok'] else 'TOO FAR OFF, '}{found}"


def step_rows(clock: Clock, folder: Path, kinds: Sequence[tuple[str, str]], overrides: Sequence[str]) -> Iterator[dict]:
    """A row of results.csv for each trial, when it is over, with its kernel, recomputation and planned bytes.

    Raises:
        ConfigError: The overrides are not legal.
    """
    (folder / "base.toml").touch()
    settings = {"base": str(folder / "base.toml"), "out": str(folder / "sweep"), "overrides": list(overrides)}
    runs = [
        {"name": f"{kernel}, {remat}", "overrides": [f"train.attention={kernel}", f"train.remat={remat}"]}
        for kernel, remat in kinds
    ]
    # JSON strings and lists of them are TOML too.
    tables = [("[sweep]", {**settings, "steps": STEPS, "warmup": WARMUP}), *(("[[run]]", run) for run in runs)]
    lines = [line for head, table in tables for line in (head, *(f"{n} = {json.dumps(v)}" for n, v in table.items()))]
    (folder / "sweep.toml").write_text("\n".join(lines), encoding="utf-8")
    sweep = read_sweep(folder / "sweep.toml", fake_devices=False)
    for trial, (kernel, remat) in zip(sweep.trials, kinds, strict=True):
        row = {"attention": kernel, "remat": remat}
        if (limit := clock.limit("trial")) <= 0:
            yield row | {"status": "left out", "reason": "no time is left (--budget)"}
            continue
        (found,), interrupted = run_sweep(dataclasses.replace(sweep, trials=(trial,), timeout_s=limit))
        if interrupted:
            raise KeyboardInterrupt
        yield row | found | {"planned_bytes": planned_bytes(trial, found["device_kind"])}


def planned_bytes(trial: Trial, device_kind: str | None) -> float:
    """The arithmetic of `jaxpar plan`, without what it keeps for the driver."""
    facts = gather_facts(trial.short, num_devices=1)
    cluster = make_cluster(find_gpu(device_kind or "") or gpu_named("h100"), num_devices=1)
    memory = evaluate_config(facts, shape_of(facts.model), cluster)[1].memory
    return memory.total_bytes - memory.reserve


def step_words(row: Mapping) -> str:
    """A line for people."""
    head = f"{row['attention']}, remat {row['remat']}"
    if row["status"] != OK:
        return f"{head}: {row['status']}, {first_reason(row['reason'])}"
    return f"{head}: {row['step_s']:.3f} s a step, {row['tokens_per_s']:,.0f} tokens/s, loss {row['loss']:.3f}"


def step_table(rows: Sequence[Mapping]) -> Table:
    """Speed and memory of the trials that ran."""
    table = Table(title=f"median of {STEPS - WARMUP} steps", box=None)
    for heading in ("attention", "remat"):
        table.add_column(heading)
    for heading in ("step s", "tokens/s", "MFU", "peak GiB", "compiler GiB", "plan GiB", "compiler/peak"):
        table.add_column(heading, justify="right")
    for row in rows:
        if row["status"] != OK:
            continue
        mfu = "n/a" if row["mfu"] is None else f"{row['mfu']:.1%}"
        memory = [f"{row[name] / GIB:.2f}" for name in ("peak_bytes", "compiled_bytes", "planned_bytes")]
        if row["peak_of"] != "device":
            memory[0] = "n/a"
        ratio = f"{row['compiled_bytes'] / row['peak_bytes']:.2f}" if row["peak_of"] == "device" else "n/a"
        speed = (f"{row['step_s']:.3f}", f"{row['tokens_per_s']:,.0f}", mfu)
        table.add_row(row["attention"], row["remat"], *speed, *memory, ratio)
    return table


def is_failure(row: Mapping) -> bool:
    """Whether a trial should have worked: the machine can do it, there was time, and the plan says that it fits."""
    if row["status"] == OOM:
        return bool(row["predicted_fits"])
    return row["status"] not in (OK, ILLEGAL, "left out")


def settings_of(overrides: Sequence[str], *, on_cpu: bool) -> list[str]:
    """Overrides of every trial: ours, but for keys that the user sets."""
    ours = (*ONE_DEVICE, *((*SMALL_MODEL, "runtime.cpu_devices=1") if on_cpu else MODEL))
    changed = {override.partition("=")[0] for override in overrides}
    return [*(setting for setting in ours if setting.partition("=")[0] not in changed), *overrides]


def measure(
    console: Console, clock: Clock, folder: Path, settings: Sequence[str], *, on_cpu: bool, offload: bool
) -> dict[str, list]:
    """Both parts, printed as they go; all results, and ``failures`` as lines for people."""
    kinds = REHEARSED if on_cpu else (*TRIALS, *([("cudnn", "offload")] if offload else []))
    console.print("\nattention, differences from float32 as a share of each array's norm", style="bold")
    found, error = attention_results(clock, folder, on_cpu=on_cpu)
    for result in found:
        console.print(attention_words(result), markup=False)
    failures = [attention_words(result) for result in found if not result.get("ok", "left_out" in result)]
    if error:
        failures.append(f"attention: {error}")
        console.print(f"FAILED: {error}", markup=False)
    console.print("\ntraining steps", style="bold")
    rows = []
    for row in step_rows(clock, folder, kinds, settings):
        rows.append(row)
        console.print(step_words(row), markup=False)
    console.print(step_table(rows))
    failures += [step_words(row) for row in rows if is_failure(row)]
    return {"attention": found, "steps": rows, "failures": failures}


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the config of every trial")
    parser.add_argument("--cpu", action="store_true", help="rehearse with tiny shapes on the CPU")
    parser.add_argument("--offload", action="store_true", help="also measure train.remat=offload")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help=f"seconds in all ({BUDGET_S})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured here")
    options = parser.parse_args()
    console, clock, started = Console(highlight=False, soft_wrap=True), Clock(options.budget), time.monotonic()
    console.width = max(console.width, 120)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    settings = settings_of(options.overrides, on_cpu=options.cpu)
    config = load_config(None, settings)
    packages = describe_packages(console)
    device = ask_jax(config, clock.limit("devices"))
    if device["error"] or (device["platform"] == "cpu" and not options.cpu):
        console.print(f"no GPU: {device['error'] or 'JAX sees the CPU alone'}; --cpu rehearses without one")
        return 2
    console.print(f"device: {device['device_kind']}{' (a rehearsal: no number means anything)' if options.cpu else ''}")
    folder = Path(tempfile.mkdtemp(prefix="jaxpar-single-gpu-"))
    measured = measure(console, clock, folder, settings, on_cpu=options.cpu, offload=options.offload)
    seconds = time.monotonic() - started
    if options.json:
        report = {"packages": packages, "device": device, **measured, "seconds": seconds}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    console.print(f"\n{seconds:.0f} s")
    if failures := measured["failures"]:
        console.print(f"{len(failures)} FAILED; logs are in {folder}:", *failures, sep="\n  ", markup=False)
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
