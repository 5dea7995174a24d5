"""How close jaxpar's step comes to the practical limit: jaxpar and scripts/baseline_step.py, alternating in one run.

    python scripts/bench_step.py                    # about half an hour on 2 quiet cores
    python scripts/bench_step.py --quick --json bench.json
    python scripts/bench_step.py --case fsdp=8 --case "fsdp=4 x tensor=2"

Every measurement is a process of its own, on fake CPU devices. Each round of a case runs the baseline's step, jaxpar's
step and, on one device and fsdp=8, `jaxpar train`, in this order; ratios are taken within a round, so that a slow
minute of the machine hits both sides, and the median over rounds is reported. Goals: step time <= 1.05 x the baseline,
trace and compile <= 1.5 x, process start to first step <= 10 s, loop overhead <= 2% of a 200 ms step.

Other remat modes than full are compared with a baseline that recomputes as little as it can say: none with none,
selective with full. Except in this last case both sides must do the same matrix products: their FLOPs, counted in the
compiled programs with loop trip counts, may differ by 2% at most, else the comparison means nothing and the
exit code is 1. A missed goal is only shown.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from baseline_step import Layout, Shape
from product_step import overrides
from rich.console import Console
from rich.table import Table
from timed_run import timed_run

from jaxpar.audit import audit

SCRIPTS = Path(__file__).resolve().parent
MAX_STEP_RATIO, MAX_COMPILE_RATIO, MAX_FIRST_STEP_S, MAX_FLOPS_DIFFERENCE = 1.05, 1.5, 10.0, 0.02
REFERENCE_STEP_S, MAX_LOOP_SHARE = 0.2, 0.02
TIMEOUT_S = 1800

KNOWN_DIFFERENCES = """Known differences, none of them a matrix product: jaxpar also computes the gradient norm and
clips by it, masks documents in attention, weights every token, checks for numbers that are not finite, and leaves norms
out of the weight decay. The compiler's own FLOP count includes them, and counts the body of a loop once."""


@dataclass(frozen=True)
class Case:
    """What is trained, on which fake devices, for how many steps per process."""

    name: str
    shape: Shape
    layout: Layout
    steps: int
    with_train: bool = True
    """Whether `jaxpar train` is measured too."""

    @property
    def same_products(self) -> bool:
        """Whether the baseline can do the same matrix products."""
        return self.layout.remat in ("none", "full")


@dataclass(frozen=True)
class StepRun:
    """One process of baseline_step.py or product_step.py."""

    step_s: float
    """Median seconds of a step, the first three left out."""
    step_cpu_s: float
    """The same in CPU seconds of the process, which other processes disturb less."""
    build_s: float
    """Tracing and compiling."""
    first_step_s: float
    """From the start of the process to the end of the first step."""
    compiler_flops: float
    matmul_flops: float
    sent_mb: float
    """Megabytes that a device sends in a step (ring algorithms)."""
    last_loss: float


@dataclass(frozen=True)
class TrainRun:
    """One process of `jaxpar train`."""

    step_s: float
    """Median seconds of a step with everything in the loop, the first three left out."""
    first_step_s: float
    """From the start of the process until metrics.jsonl has its first row."""


@dataclass(frozen=True)
class Round:
    """The processes of one round."""

    baseline: StepRun
    product: StepRun
    train: TrainRun | None


def run_step(script: str, case: Case, directory: Path) -> StepRun:
    """Runs one of the two step scripts in a process of its own."""
    hlo = directory / "step.hlo"
    sizes = [f"--{name.replace('_', '-')}={size}" for name, size in dataclasses.asdict(case.shape).items()]
    layout = dataclasses.asdict(case.layout)
    if script == "baseline_step.py" and not case.same_products:
        layout["remat"] = "full"
    settings = {**layout, "steps": case.steps, "hlo": hlo}
    command = [sys.executable, str(SCRIPTS / script), *(f"--{name}={value}" for name, value in settings.items())]
    started = time.time()
    result = subprocess.run([*command, *sizes], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with {result.returncode}:\n{result.stderr[-4000:]}")
    fields = json.loads(result.stdout.splitlines()[-1])
    report = audit(hlo.read_text())
    return StepRun(
        step_s=fields["median_step_s"],
        step_cpu_s=fields["median_step_cpu_s"],
        build_s=fields["trace_s"] + fields["compile_s"],
        first_step_s=fields["first_step_at"] - started,
        compiler_flops=fields["compiler_flops"],
        matmul_flops=report.matmul_flops,
        sent_mb=report.wire_bytes_per_step() / 1e6,
        last_loss=fields["losses"][-1],
    )


def run_product(case: Case, directory: Path) -> TrainRun:
    """Runs `jaxpar train` on synthetic data, and watches its metrics to see the first step end."""
    settings = [
        f"train.steps={case.steps}",
        f"data.num_samples={case.shape.rows * case.steps}",
        "runtime.compilation_cache=off",
    ]
    run_dir = Path(tempfile.mkdtemp(prefix="run-", dir=directory))
    first_step_s, rows = timed_run(run_dir, [*overrides(case.shape, case.layout), *settings], timeout_s=TIMEOUT_S)
    return TrainRun(step_s=statistics.median([row["step_s"] for row in rows][3:]), first_step_s=first_step_s)


def run_rounds(case: Case, rounds: int, console: Console) -> list[Round]:
    """Alternates the three processes."""
    done = []
    with tempfile.TemporaryDirectory(prefix="jaxpar-bench-") as name:
        directory = Path(name)
        for number in range(1, rounds + 1):
            with console.status(f"{case.name}: round {number} of {rounds}"):
                baseline = run_step("baseline_step.py", case, directory)
                product = run_step("product_step.py", case, directory)
                train = run_product(case, directory) if case.with_train else None
                done.append(Round(baseline, product, train))
    return done


def median_of(rounds: list[Round], value) -> float:
    """Median over rounds of ``value(round)``."""
    return statistics.median(value(one) for one in rounds)


def summary(rounds: list[Round]) -> dict[str, float]:
    """The numbers that have goals, and those that explain them."""
    numbers = {
        "step_ratio": median_of(rounds, lambda r: r.product.step_s / r.baseline.step_s),
        "step_cpu_ratio": median_of(rounds, lambda r: r.product.step_cpu_s / r.baseline.step_cpu_s),
        "compile_ratio": median_of(rounds, lambda r: r.product.build_s / r.baseline.build_s),
        "matmul_flops_ratio": median_of(rounds, lambda r: r.product.matmul_flops / r.baseline.matmul_flops),
        "compiler_flops_ratio": median_of(rounds, lambda r: r.product.compiler_flops / r.baseline.compiler_flops),
    }
    if rounds[0].train:
        numbers["train_step_ratio"] = median_of(rounds, lambda r: r.train.step_s / r.baseline.step_s)
        numbers["first_step_s"] = median_of(rounds, lambda r: r.train.first_step_s)
    return numbers


def loop_overhead_s(rounds: list[Round]) -> float:
    """Seconds that the training loop adds to a step; measured on a small model, where they are not hidden."""
    return median_of(rounds, lambda r: r.train.step_s - r.product.step_s)


def case_table(case: Case, rounds: list[Round]) -> Table:
    """Baseline, jaxpar, ratio and goal of one case."""
    numbers = summary(rounds)
    most_products = 1 + MAX_FLOPS_DIFFERENCE if case.same_products else None
    table = Table(title=f"{case.name}, median of {len(rounds)} rounds of {case.steps} steps")
    table.add_column("")
    for heading in ("baseline", "jaxpar", "ratio", "goal"):
        table.add_column(heading, justify="right")
    rows = [
        ("step, s", "step_s", numbers["step_ratio"], MAX_STEP_RATIO),
        ("step, CPU s", "step_cpu_s", numbers["step_cpu_ratio"], None),
        ("trace + compile, s", "build_s", numbers["compile_ratio"], MAX_COMPILE_RATIO),
        ("start to first step, s", "first_step_s", None, None),
        ("sent per device and step, MB", "sent_mb", None, None),
        ("matrix products, GFLOP", "matmul_flops", numbers["matmul_flops_ratio"], most_products),
        ("compiler's count, GFLOP", "compiler_flops", numbers["compiler_flops_ratio"], None),
    ]
    for label, field, ratio, goal in rows:
        scale = 1e-9 if "GFLOP" in label else 1.0
        sides = [
            f"{scale * median_of(rounds, lambda r, side=side: getattr(getattr(r, side), field)):.3f}"  # noqa: B023
            for side in ("baseline", "product")
        ]
        table.add_row(label, *sides, "" if ratio is None else f"{ratio:.3f}", verdict(ratio, goal))
    if not case.with_train:
        return table
    table.add_section()
    train_step = f"{median_of(rounds, lambda r: r.train.step_s):.3f}"
    table.add_row("jaxpar train: step, s", "", train_step, f"{numbers['train_step_ratio']:.3f}", "")
    first = numbers["first_step_s"]
    table.add_row("jaxpar train: start to first step, s", "", f"{first:.3f}", "", verdict(first, MAX_FIRST_STEP_S))
    return table


def verdict(value: float | None, goal: float | None) -> str:
    """The goal, and whether it is met."""
    if goal is None or value is None:
        return ""
    return f"<= {goal:g} [{'green]met' if value <= goal else 'red]missed'}[/]"


def loop_table(case: Case, rounds: list[Round]) -> Table:
    """Loop overhead in milliseconds and as a share of a 200 ms step."""
    overhead = loop_overhead_s(rounds)
    table = Table(title=f"{case.name}, small model on 1 device, median of {len(rounds)} rounds of {case.steps} steps")
    for heading in ("jitted step, ms", "jaxpar train, ms", "loop overhead, ms", "of a 200 ms step", "goal"):
        table.add_column(heading, justify="right")
    table.add_row(
        f"{1e3 * median_of(rounds, lambda r: r.product.step_s):.2f}",
        f"{1e3 * median_of(rounds, lambda r: r.train.step_s):.2f}",
        f"{1e3 * overhead:.2f}",
        f"{overhead / REFERENCE_STEP_S:.2%}",
        verdict(overhead / REFERENCE_STEP_S, MAX_LOOP_SHARE),
    )
    return table


def main() -> int:
    """Runs all cases, prints the tables, writes the JSON; 1 when the two sides do not do the same work."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one round of few steps: a look, not a measurement")
    parser.add_argument("--case", action="append", metavar="NAME", help="only this case; may be given several times")
    parser.add_argument("--rounds", type=int, help="rounds per case (3; quick: 1)")
    parser.add_argument("--json", type=Path, help="write everything measured here")
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else 3)
    steps = 6 if options.quick else 12
    small = Shape(
        vocab_size=1024, embed_dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, mlp_dim=128, seq_len=64
    )
    cases = [
        Case("1 device", Shape(), Layout(), steps),
        Case("fsdp=8", Shape(), Layout(fsdp=8), steps),
        Case("fsdp=4 x tensor=2", Shape(), Layout(fsdp=4, tensor=2), steps, with_train=False),
        Case("data=2 x fsdp=4", Shape(), Layout(data=2, fsdp=4), steps, with_train=False),
        Case("fsdp=8, remat none", Shape(), Layout(fsdp=8, remat="none"), steps, with_train=False),
        Case("fsdp=8, remat selective", Shape(), Layout(fsdp=8, remat="selective"), steps, with_train=False),
    ]
    loop_case = Case("loop overhead", small, Layout(), 50 if options.quick else 200)
    names = [case.name for case in (*cases, loop_case)]
    if unknown := set(options.case or ()) - set(names):
        parser.error(f"no case {', '.join(sorted(unknown))}; there are: {', '.join(names)}")
    chosen = [case for case in (*cases, loop_case) if not options.case or case.name in options.case]
    console = Console()
    console.width = max(console.width, 100)
    results = {}
    for case in chosen:
        results[case.name] = run_rounds(case, rounds, console)
        table = loop_table if case is loop_case else case_table
        console.print(table(case, results[case.name]))
    console.print(" ".join(KNOWN_DIFFERENCES.split()))
    summaries = {case.name: summary(results[case.name]) for case in cases if case in chosen}
    if options.json:
        document = {
            "machine": {"cores": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()},
            "summary": summaries,
            "loop_overhead_s": loop_overhead_s(results[loop_case.name]) if loop_case in chosen else None,
            "rounds": {name: [dataclasses.asdict(one) for one in done] for name, done in results.items()},
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    different = [
        case.name
        for case in cases
        if case.name in summaries
        and case.same_products
        and abs(summaries[case.name]["matmul_flops_ratio"] - 1) > MAX_FLOPS_DIFFERENCE
    ]
    for name in different:
        ratio = summaries[name]["matmul_flops_ratio"]
        console.print(f"[red]{name}: jaxpar does {ratio:.3f} x the matrix products of the baseline; not comparable[/]")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
