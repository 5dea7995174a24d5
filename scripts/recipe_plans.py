"""What `jaxpar plan` says of each recipe, as the "# Plan:" line in its head.

python scripts/recipe_plans.py            # says which lines are not what the plan says today; exit 1 if any
python scripts/recipe_plans.py --write    # writes them
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from jaxpar.config import load_config
from jaxpar.config.schema import AXES
from jaxpar.plan.catalogue import gpu_named
from jaxpar.plan.evaluation import evaluate_config
from jaxpar.plan.facts import gather_facts
from jaxpar.plan.report import training_report
from jaxpar.plan.shape import shape_of
from jaxpar.plan.topology import make_cluster

CONFIGS = Path(__file__).parents[1] / "configs"
GPU = "h100"
LINE = re.compile(r"^# Plan:.*$", re.MULTILINE)


def recipes() -> list[Path]:
    """Configs that have a plan in their head."""
    return [path for path in sorted(CONFIGS.glob("*.toml")) if LINE.search(path.read_text(encoding="utf-8"))]


def plan_line(path: Path) -> str:
    """The line of a recipe, for the GPU that recipes are made for."""
    facts = gather_facts(load_config(path))
    num_devices = facts.axes_product(AXES)
    cluster = make_cluster(gpu_named(GPU), num_devices=num_devices)
    report = training_report(*evaluate_config(facts, shape_of(facts.model), cluster))
    memory, gib = report["memory"], 2**30
    return (
        f"# Plan: {memory['total_bytes'] / gib:.1f} of {memory['device_bytes'] / gib:.1f} GiB per {cluster.gpu.name}, "
        f"{report['time']['step_s']:.3g} s a step, {report['tokens_per_s_per_device']:,.0f} tokens/s per GPU, "
        f"MFU {report['mfu']:.1%} (off by {report['error_band']['p90']:.0%} at most in 90%)"
    )


def numbers(line: str) -> list[float]:
    """The numbers of a line."""
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\.?\d*", line)]


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the lines")
    write = parser.parse_args().write
    stale = 0
    for path in recipes():
        text, line = path.read_text(encoding="utf-8"), plan_line(path)
        if LINE.search(text)[0] != line:
            stale += not write
            print(f"{path.name}: {line}")
            if write:
                path.write_text(LINE.sub(line, text), encoding="utf-8")
    return int(stale > 0)


if __name__ == "__main__":
    sys.exit(main())
