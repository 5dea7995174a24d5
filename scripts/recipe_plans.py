"""What `jaxpar plan` and the CUDA compiler say of each recipe, as the "# Plan:" and "# Compiler:" lines in its head.

python scripts/recipe_plans.py            # says which lines are not what the plan says today; exit 1 if any
python scripts/recipe_plans.py --write    # writes them
python scripts/recipe_plans.py --write --compile   # the compiler's too, without a GPU; some minutes on 2 cores
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from jaxpar.config import Config, load_config
from jaxpar.config.schema import AXES
from jaxpar.experiments.compile import CompileOutcome, compile_step, gpu_target
from jaxpar.plan.catalogue import gpu_named
from jaxpar.plan.evaluation import evaluate_config
from jaxpar.plan.facts import gather_facts
from jaxpar.plan.report import training_report
from jaxpar.plan.shape import shape_of
from jaxpar.plan.topology import Cluster, make_cluster

CONFIGS = Path(__file__).parents[1] / "configs"
GPU = "h100"
LINE = re.compile(r"^# Plan:.*$", re.MULTILINE)
COMPILER_LINE = re.compile(r"^# Compiler:.*$", re.MULTILINE)


def recipes() -> list[Path]:
    """Configs that have a plan in their head."""
    return [path for path in sorted(CONFIGS.glob("*.toml")) if LINE.search(path.read_text(encoding="utf-8"))]


def cluster_of(config: Config) -> Cluster:
    """As many of the GPUs that recipes are made for as a recipe's mesh has."""
    return make_cluster(gpu_named(GPU), num_devices=gather_facts(config).axes_product(AXES))


def compiled(path: Path) -> CompileOutcome:
    """The step of a recipe, compiled without a GPU."""
    config = load_config(path)
    return compile_step(config, gpu_target(cluster_of(config)))


def plan_line(path: Path) -> str:
    """The line of a recipe."""
    facts = gather_facts(load_config(path))
    cluster = cluster_of(facts.config)
    report = training_report(*evaluate_config(facts, shape_of(facts.model), cluster))
    memory, gib = report["memory"], 2**30
    return (
        f"# Plan: {memory['total_bytes'] / gib:.1f} of {memory['device_bytes'] / gib:.1f} GiB per {cluster.gpu.name}, "
        f"{report['time']['step_s']:.3g} s a step, {report['tokens_per_s_per_device']:,.0f} tokens/s per GPU, "
        f"MFU {report['mfu']:.1%} (off by {report['error_band']['p90']:.0%} at most in 90%)"
    )


def compiler_line(outcome: CompileOutcome) -> str:
    """The line of a compiled recipe; the plan's memory has a reserve for the driver, the compiler's has none."""
    found = sorted({lint.rule for lint in outcome.lints})
    return (
        f"# Compiler: {outcome.peak_bytes / 2**30:.1f} GiB, {outcome.hidden_share:.0%} of the bytes sent are hidden, "
        f"lints: {', '.join(found) or 'none'} (an estimate without a GPU)"
    )


def compiler_line_of(path: Path) -> str:
    """The line that a recipe has."""
    return COMPILER_LINE.search(path.read_text(encoding="utf-8"))[0]


def numbers(line: str) -> list[float]:
    """The numbers of a line."""
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\.?\d*", line)]


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the lines")
    parser.add_argument("--compile", action="store_true", help="also ask the compiler")
    options = parser.parse_args()
    stale = 0
    for path in recipes():
        wanted = {LINE: plan_line(path)}
        if options.compile:
            wanted[COMPILER_LINE] = compiler_line(compiled(path))
        for pattern, line in wanted.items():
            text = path.read_text(encoding="utf-8")
            if pattern.search(text)[0] != line:
                stale += not options.write
                print(f"{path.name}: {line}", flush=True)
                if options.write:
                    path.write_text(pattern.sub(line, text), encoding="utf-8")
    return int(stale > 0)


if __name__ == "__main__":
    sys.exit(main())
