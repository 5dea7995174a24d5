"""Predicts published training runs of other frameworks and says how far off the predictions are.

    python scripts/plan_published.py RUNS.csv --json
    python scripts/plan_published.py RUNS.csv --leave-one-source-out
    python scripts/plan_published.py RUNS.csv --fit
    python scripts/plan_published.py RUNS.csv --docs docs

RUNS.csv has one published run per row: model sizes, GPU, layout, precision, and what the run reached. Predictions use
the constants that jaxpar ships, or, with --leave-one-source-out, constants fitted to all frameworks but the one that is
predicted. What a run reached (tok_s_gpu, status) is read only to score its prediction, and to fit constants for others.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from jaxpar.config import AXES, PRESETS
from jaxpar.plan.calibration import Measured, fit_shares, implied_share, leave_one_source_out, with_shares
from jaxpar.plan.catalogue import gpu_named
from jaxpar.plan.efficiency import GEMM_SHARE
from jaxpar.plan.evaluation import Task
from jaxpar.plan.plots import log_scatter
from jaxpar.plan.published import PublishedLayout, read_row
from jaxpar.plan.published_score import CLASSES, fit_calls, rank_order, time_errors
from jaxpar.plan.search import Famous, layout_words, mesh_words, search, why_not
from jaxpar.plan.shape import shape_of
from jaxpar.plan.topology import make_cluster

Predicted = Sequence[tuple[Measured, float]]


def main() -> None:
    """Read the arguments and do what they ask."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("csv", type=Path, help="table of published runs")
    parser.add_argument("--json", action="store_true", help="print the scores as JSON")
    parser.add_argument("--leave-one-source-out", action="store_true", help="constants fitted to all other frameworks")
    parser.add_argument("--fit", action="store_true", help="print constants fitted to all rows, as Python")
    parser.add_argument("--docs", type=Path, metavar="DIR", help="write plan-accuracy.md and its plots there")
    options = parser.parse_args()
    measured, fits = read_table(options.csv)
    if options.fit:
        for (gpu, precision), share in sorted(fit_shares((m, implied_share(m)) for m in measured).items()):
            print(f'    ("{gpu}", "{precision}"): {share},')
        return
    shipped = with_shares(measured, GEMM_SHARE)
    if options.docs is not None:
        write_docs(options.docs, shipped, leave_one_source_out(measured), fits)
    scores = scores_of(leave_one_source_out(measured) if options.leave_one_source_out else shipped, fits)
    if options.json:
        json.dump(scores, sys.stdout)
        print()
    else:
        print_scores(scores)


def read_table(path: Path) -> tuple[list[Measured], list[tuple[PublishedLayout, bool]]]:
    """Runs whose speed can be graded, and runs of which it is known whether they fit."""
    measured, fits = [], []
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            run = read_row(row)
            if run is None:
                continue
            if row["grade_time"] == "1" and row["tok_s_gpu"]:
                measured.append(Measured(run=run, tokens_per_s=float(row["tok_s_gpu"])))
            if row["grade_memory"] == "1" and row["status"] in ("ok", "oom"):
                fits.append((run, row["status"] == "ok"))
    return measured, fits


def scores_of(predicted: Predicted, fits: Sequence[tuple[PublishedLayout, bool]]) -> dict:
    """All scores, as they are printed."""
    return {**time_errors(predicted), "rank_20pct": rank_order(predicted), "fit": fit_calls(fits)}


def print_scores(scores: dict) -> None:
    """The scores for people."""
    for name in CLASSES:
        score = scores[name]
        if score["n"]:
            print(f"{name:24} {score['n']:4} runs, error median {score['median']:.1%}, 90% within {score['p90']:.1%}")
    rank, fit = scores["rank_20pct"], scores["fit"]
    print(f"pairs of layouts that differ by 20% or more: {rank['right']} of {rank['pairs']} in the right order")
    print(f"fits or not: {fit['rows']} runs, {fit['called']} called, {fit['right']} of them rightly")


def write_docs(folder: Path, shipped: Predicted, left_out: Predicted, fits: Sequence) -> None:
    """Writes the page and its plots."""
    for name, predicted in (("shipped", shipped), ("left-out", left_out)):
        groups = [(kind, [(m.tokens_per_s, p) for m, p in predicted if m.run.error_class == kind]) for kind in CLASSES]
        plot = log_scatter(groups, "published tokens/s per GPU", "predicted tokens/s per GPU", 0.2)
        (folder / f"plan-accuracy-{name}.svg").write_text(plot + "\n", encoding="utf-8")
    text = _PAGE.format(
        scores=_score_table(scores_of(shipped, fits), scores_of(left_out, fits)),
        sources=_source_table(shipped, left_out),
        constants=_constants_table(),
        known=_known_layouts(),
        **_fit_numbers(fits),
    )
    (folder / "plan-accuracy.md").write_text(text, encoding="utf-8")


def _score_table(shipped: dict, left_out: dict) -> str:
    lines = [
        "| class of run | runs | shipped constants: median, 90% within | source left out: median, 90% within |",
        "|---|---|---|---|",
    ]
    for name in CLASSES:
        cells = [f"{scores[name]['median']:.1%}, {scores[name]['p90']:.1%}" for scores in (shipped, left_out)]
        lines.append(f"| {name} | {shipped[name]['n']} | {' | '.join(cells)} |")
    order = [f"{s['rank_20pct']['right']} of {s['rank_20pct']['pairs']}" for s in (shipped, left_out)]
    lines.append(f"| pairs that differ by 20% or more, in the right order | | {' | '.join(order)} |")
    return "\n".join(lines)


def _source_table(shipped: Predicted, left_out: Predicted) -> str:
    lines = ["| framework | class | runs | shipped: median | left out: median |", "|---|---|---|---|---|"]
    errors: dict[tuple[str, str], tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for column, predicted in enumerate((shipped, left_out)):
        for measured, tokens_per_s in predicted:
            key = (measured.run.stack, measured.run.error_class)
            errors[key][column].append(abs(tokens_per_s / measured.tokens_per_s - 1))
    for (stack, kind), columns in sorted(errors.items()):
        medians = [f"{sorted(column)[len(column) // 2]:.1%}" for column in columns]
        lines.append(f"| {stack} | {kind} | {len(columns[0])} | {' | '.join(medians)} |")
    return "\n".join(lines)


def _constants_table() -> str:
    lines = ["| GPU | precision | share of the dense peak |", "|---|---|---|"]
    lines += [f"| {gpu} | {precision} | {share:.3f} |" for (gpu, precision), share in sorted(GEMM_SHARE.items())]
    return "\n".join(lines)


def _known_layouts() -> str:
    """Where layouts of well-known runs stand in a search for the same model, GPUs and batch."""
    lines = ["| run | its layout | in the search | the winner |", "|---|---|---|---|"]
    for name, model, devices, rows, axes in _KNOWN:
        cluster = make_cluster(gpu_named("h100"), num_devices=devices)
        task = Task(shape=shape_of(PRESETS[model].model), cluster=cluster, global_batch_size=rows, seq_len=8192)
        result = search(task)
        mesh = dict.fromkeys(AXES, 1) | axes
        place = next((i for i, found in enumerate(result.all_ranked, start=1) if found.layout.mesh == mesh), None)
        reason = why_not(task, Famous(name=name, mesh=mesh), result.all_ranked) if place != 1 else "the winner"
        position = f"{place} of {len(result.all_ranked)}: {reason}" if place else reason
        lines.append(f"| {name} | {mesh_words(mesh)} | {position} | {layout_words(result.ranked[0].layout)} |")
    return "\n".join(lines)


_KNOWN = (
    ("torchtitan, 8B on 128 H100", "llama-3.1-8b", 128, 256, {"fsdp": 128}),
    ("torchtitan, 70B on 256 H100", "llama-3.1-70b", 256, 512, {"fsdp": 32, "tensor": 8}),
    ("Megatron-Bridge, 70B on 64 H100", "llama-3.1-70b", 64, 128, {"pipeline": 8, "fsdp": 2, "tensor": 4}),
    ("Megatron-Bridge, 405B on 1,024 H100", "llama-3.1-405b", 1024, 512,
     {"pipeline": 8, "fsdp": 8, "context": 2, "tensor": 8}),
    ("Llama 3 paper, 405B on 16,384 H100", "llama-3.1-405b", 16384, 2048, {"pipeline": 16, "fsdp": 128, "tensor": 8}),
)  # fmt: skip
"""(run, model, GPUs, rows of 8,192 tokens per step, mesh axes above 1; a sharded optimizer counts as the fsdp axis)."""


def _fit_numbers(fits: Sequence) -> dict[str, object]:
    calls = fit_calls(fits)
    return {**calls, "share": calls["right"] / calls["called"] if calls["called"] else 0.0}


_PAGE = """# How well `jaxpar plan` predicts runs that others published

Made by `python scripts/plan_published.py RUNS.csv --docs docs`, which anyone can repeat with a table of published runs.
Nothing here was measured with jaxpar: these are runs of other frameworks on A100, H100, H200 and Blackwell GPUs,
predicted by the formulas behind `jaxpar plan`. Errors are |predicted / published - 1| of tokens per second and GPU.

{scores}

"Shipped constants": those of `jaxpar/plan/efficiency.py`, to which these very runs were fitted. "Source left out": for
each framework the constants are fitted to the runs of all other frameworks only, which is the honest number for a
cluster and framework that nobody has published yet. The global constants (attention's share of the peak, elementwise
traffic, what of a transfer is exposed and so on) were chosen once, with the left-out error of these runs as the
measure, so the left-out column is still a little too good.

`dense_short`: dense models on Ampere and Hopper with rows up to 16,384 tokens. Mixtures of experts are rough: the same
layout differs between releases of one framework by up to a factor of two.

![predicted and published speed, constants as shipped](plan-accuracy-shipped.svg)

![predicted and published speed, source left out](plan-accuracy-left-out.svg)

The dashed lines are 20% off.

## Does it fit

{rows} published layouts of which it is known whether they ran or were out of memory: {called} are called (the others
are within 10% of the limit), {right} of them rightly ({share:.1%}). What a framework is known to do (gradients of two
or four bytes, logits on every tensor shard, fragmentation) is a fact about the row.

## By framework

{sources}

## Constants

One per GPU and precision: what large matrix products reach of the dense peak. It is the median of the share that would
make each prediction exact, over the dense runs of all frameworks; a framework with n runs weighs the square root of n.
A GPU that is not in the table takes the median of its generation. Shares near 1 are not what the hardware does: they
make up for something else that is counted as too slow.

{constants}

## Well-known layouts in jaxpar's own search

`jaxpar plan --search` ranks layouts for jaxpar's step in bfloat16, not for the framework that published them. Where a
well-known layout stands there, and why:

{known}

Two differences explain most of it. jaxpar's pipeline keeps only stage inputs and redoes each stage's forward pass, a
third more computation than frameworks that keep activations; and its tensor collectives are counted as not overlapped,
while Megatron's are. So tensor and pipeline axes rank lower than they do in Megatron tables, and layers must divide by
the stages, which 126 layers on 8 or 16 do not.

## What is in the formula

- Matrix products at that share, less where a side is small, n / (n + n_half). Attention apart, at its own share of the
  bfloat16 peak, higher for kernels written for the GPU's generation. Experts' products by tokens per expert.
- Elementwise work by bytes over the memory bandwidth; the head on the last stage, or spread; the optimizer by bytes.
- Rings: NVLink inside a domain, else the network interfaces of all members of the ring in a node, at most the link.
- Tensor collectives mostly exposed unless they overlap; FSDP's exposed beyond the computation of a stage, plus a leak;
  all-to-all once per node across the network; the pipeline's idle time (p - 1) / v stages.
- Recomputation repeats the forward pass with its collectives.
"""


if __name__ == "__main__":
    main()
