"""A plan as one table of plain values: the same for ``--json``, the terminal and the HTML page."""

from __future__ import annotations

import dataclasses

from jaxpar.plan.advice import PlanProblem, describe_change, find_plan_problems, verdict
from jaxpar.plan.efficiency import GEMM_SHARE, error_band
from jaxpar.plan.evaluation import Evaluation, Task, trains_today
from jaxpar.plan.flops import CONVENTIONS
from jaxpar.plan.inference import InferencePlan
from jaxpar.plan.memory import GIB
from jaxpar.plan.search import SearchResult, layout_overrides
from jaxpar.plan.shape import ModelShape
from jaxpar.plan.topology import Cluster
from jaxpar.plan.variations import Variation

ASSUMPTIONS = (
    "fused attention (no [S, S] scores in memory)",
    "weights gathered block by block (once per step where the strategy is optimizer or grads), logits in chunks",
    "time from constants fitted to published runs of other trainers (docs/plan-accuracy.md), not measured on this one",
)


CATALOGUE_LINKS = "catalogue"
"""Where bandwidths come from when they were not measured."""

COMPUTE_PARTS = {
    "products_s": "matrix products",
    "attention_s": "attention",
    "elementwise_s": "elementwise",
    "head_s": "head and loss",
    "optimizer_s": "optimizer",
}
"""What computes in a step: key of ``time`` and its name for people."""


def memory_components(report: dict) -> list[tuple[str, int]]:
    """Name for people and bytes of everything that adds up to ``total_bytes``."""
    others = ("total_bytes", "device_bytes", "free_bytes", "moment", "whole_logits")
    return [(name.replace("_", " "), size) for name, size in report["memory"].items() if name not in others]


def training_report(task: Task, plan: Evaluation) -> dict:
    """Everything about a training plan. Bytes, seconds and shares (0 to 1)."""
    problems, near = find_plan_problems(task, plan)
    layout, time = plan.layout, plan.time
    band = error_band(task.cluster.gpu.name, layout.precision, layout.seq_len, is_moe=task.shape.num_experts > 0)
    return {
        "mode": "train",
        **_subject(task.shape, task.cluster),
        "mesh": layout.mesh,
        "microbatches": layout.microbatches,
        "rows_per_device": layout.rows,
        "global_batch_size": task.global_batch_size,
        "seq_len": task.seq_len,
        "remat": layout.remat,
        "schedule": schedule_name(plan),
        "strategy": layout.strategy,
        "precision": layout.precision,
        "memory": memory_values(plan),
        "time": time_values(plan),
        "communication": [dataclasses.asdict(collective) for collective in time.collectives],
        "tokens_per_s_per_device": plan.tokens_per_s_per_device,
        "mfu": plan.mfu,
        "flops_convention": f"A: {CONVENTIONS['A']}",
        "flops_per_token": task.shape.training_flops_per_token(task.seq_len, "A"),
        "error_band": band,
        "efficiency_known": (task.cluster.gpu.name, layout.precision) in GEMM_SHARE,
        "verdict": verdict(problems),
        "verdict_text": _verdict_text(plan, problems),
        "problems": [dataclasses.asdict(problem) for problem in problems],
        "what_if": [_what_if(plan, variation) for variation in _distinct(near)],
        "assumptions": list(ASSUMPTIONS),
    }


def with_compiled(report: dict, compiled: dict) -> dict:
    """A training report with what the compiler says of the same step, next to the arithmetic.

    ``arithmetic_bytes`` is ``memory.total_bytes`` without the reserve, which the compiler does not know of;
    ``difference`` how far it is above (or below, negative) the compiler's peak, as a share of that.
    """
    arithmetic = report["memory"]["total_bytes"] - report["memory"]["reserve"]
    difference = arithmetic / compiled["peak_bytes"] - 1
    return {**report, "compiled": {**compiled, "arithmetic_bytes": arithmetic, "difference": difference}}


def search_report(task: Task, result: SearchResult) -> dict:
    """The winner's report with the ranking, what was rejected and why; without a winner, those alone."""
    found = {
        "ranked": [_ranked(task, evaluation) for evaluation in result.ranked],
        "rejected": [dataclasses.asdict(rejection) for rejection in result.rejected],
        "explanation": list(result.explanation),
        "searched": {"meshes": result.meshes, "layouts": result.evaluated},
    }
    if result.ranked:
        return {**training_report(task, result.ranked[0]), **found}
    return {
        "mode": "search",
        **_subject(task.shape, task.cluster),
        "verdict": "does not fit",
        "verdict_text": result.explanation[0],
        "problems": [],
        **found,
    }


def _ranked(task: Task, evaluation: Evaluation) -> dict:
    layout = evaluation.layout
    return {
        "mesh": layout.mesh,
        "microbatches": layout.microbatches,
        "remat": layout.remat,
        "schedule": schedule_name(evaluation),
        "strategy": layout.strategy,
        "memory": evaluation.memory.total_bytes,
        "time": evaluation.time.step_s,
        "mfu": evaluation.mfu,
        "tokens_per_s_per_device": evaluation.tokens_per_s_per_device,
        "trains_today": trains_today(task.shape, layout),
        "overrides": layout_overrides(layout),
    }


def inference_report(shape: ModelShape, cluster: Cluster, plan: InferencePlan, settings: dict) -> dict:
    """Everything about an inference plan; ``settings`` are batch, context and weights."""
    problems = []
    if plan.free_bytes < 0:
        problems.append(
            PlanProblem(
                rule="memory",
                severity="error",
                message=f"does not fit: {plan.total_bytes / GIB:.1f} GiB are needed on each of {plan.devices} devices, "
                f"{-plan.free_bytes / GIB:.1f} GiB more than a {cluster.gpu.name} has",
                remedy=_inference_remedy(plan, settings),
            )
        )
    return {
        "mode": "inference",
        **_subject(shape, cluster),
        **settings,
        "memory": {
            "total_bytes": plan.total_bytes,
            "weights": plan.weights_bytes,
            "kv_cache": plan.kv_cache_bytes,
            "activations": plan.activations_bytes,
            "reserve": plan.reserve,
            "device_bytes": plan.device_bytes,
        },
        "time": {"prefill_s": plan.prefill_s, "decode_step_s": plan.decode_step_s},
        "tokens_per_s": plan.tokens_per_s,
        "tokens_per_s_per_device": plan.tokens_per_s / plan.devices,
        "verdict": verdict(problems),
        "verdict_text": f"does not fit by {-plan.free_bytes / GIB:.1f} GiB"
        if plan.free_bytes < 0
        else f"fits, {plan.free_bytes / GIB:.1f} GiB free",
        "problems": [dataclasses.asdict(problem) for problem in problems],
    }


def memory_values(plan: Evaluation) -> dict[str, object]:
    """Bytes by component, and their sum."""
    memory = plan.memory
    return {"total_bytes": memory.total_bytes, **dataclasses.asdict(memory), "free_bytes": memory.free_bytes}


def time_values(plan: Evaluation) -> dict[str, float]:
    """Seconds by part, and their sum."""
    time = plan.time
    return {
        "step_s": time.step_s,
        "compute_s": time.compute_s,
        "exposed_comm_s": time.exposed_comm_s,
        "bubble_s": time.bubble_s,
        "bubble_fraction": time.bubble_fraction,
        "products_s": time.products_s,
        "attention_s": time.attention_s,
        "elementwise_s": time.elementwise_s,
        "head_s": time.head_s,
        "optimizer_s": time.optimizer_s,
    }


def schedule_name(plan: Evaluation) -> str:
    """E.g. "none", "1f1b", "interleaved x 4"."""
    layout = plan.layout
    if layout.pipeline == 1:
        return "none"
    return f"{layout.schedule} x {layout.chunks}" if layout.chunks > 1 else layout.schedule


def _subject(shape: ModelShape, cluster: Cluster) -> dict:
    tables = 1 if shape.tie_embeddings else 2
    padding = tables * (shape.padded_vocab_size - shape.vocab_size) * shape.embed_dim
    return {
        "model": shape.name,
        "gpu": cluster.gpu.name,
        "num_devices": cluster.num_devices,
        "num_nodes": cluster.num_nodes,
        "nvlink_domain": cluster.gpu.domain_size,
        "links": cluster.links.by if cluster.links else CATALOGUE_LINKS,
        "params": {
            "total": shape.total_params,
            "active": shape.active_params,
            "padded_total": shape.total_params + padding,
        },
    }


def _verdict_text(plan: Evaluation, problems: list[PlanProblem]) -> str:
    said = verdict(problems)
    if said == "does not fit":
        return f"does not fit by {-plan.memory.free_bytes / GIB:.1f} GiB"
    reasons = ", ".join(problem.rule for problem in problems if problem.severity == "unwise")
    free = f"{plan.memory.free_bytes / GIB:.1f} GiB free"
    return f"legal but unwise ({reasons}), {free}" if reasons else f"fits, {free}"


def _distinct(near: list[Variation]) -> list[Variation]:
    """Neighbours, one of each layout, the fastest first."""
    unique = {variation.evaluation.layout: variation for variation in near}
    return sorted(unique.values(), key=lambda variation: -variation.evaluation.tokens_per_s_per_device)


def _what_if(plan: Evaluation, variation: Variation) -> dict:
    evaluation = variation.evaluation
    return {
        "name": variation.name,
        "overrides": variation.overrides,
        "fits": evaluation.fits,
        "total_bytes": evaluation.memory.total_bytes,
        "step_s": evaluation.time.step_s,
        "tokens_per_s_per_device": evaluation.tokens_per_s_per_device,
        "text": describe_change(plan, variation),
    }


def _inference_remedy(plan: InferencePlan, settings: dict) -> str:
    cheaper = {"bf16": "--weights int8 or int4", "int8": "--weights int4"}.get(settings["weights"])
    remedies = [cheaper] if cheaper else []
    if plan.kv_cache_bytes > 0.2 * plan.total_bytes:
        remedies.append("a smaller --batch or --context")
    return ", ".join([*remedies, f"or more devices than {plan.devices}"])
