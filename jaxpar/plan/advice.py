"""What is wrong or unwise about a layout, why, and what it would cost to mend.

The rules are what practitioners follow: replicate if it fits and speed is wanted; shard first; go hybrid across slow
links; keep tensor inside an NVLink domain and only where it is needed; pipeline when tensor alone is not enough, with
at least four microbatches per stage; trust experts across the network only after measuring their exchange. Where a rule
can be checked by arithmetic it is: the alternative is evaluated, and named only if it is better.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

from jaxpar.plan.evaluation import SAFE_MARGIN, Evaluation, Task
from jaxpar.plan.memory import GIB
from jaxpar.plan.variations import Variation, variations

Severity = Literal["error", "unwise", "hint"]

MICROBATCHES_PER_STAGE = 4
"""Fewer leave more than about a fifth of a pipeline idle: (p - 1) / (4 p + p - 1) < 20%."""

_WORTH = 0.03
"""Gain in throughput below which another layout is not worth a word: published repeats of one layout differ by 3%."""

_MANY = 3
"""Remedies named per problem."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanProblem:
    """One thing to know about a plan."""

    rule: str
    severity: Severity
    """error: it does not fit. unwise: legal, and probably not wanted. hint: worth trying."""
    message: str
    remedy: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Case:
    """What every rule looks at."""

    task: Task
    plan: Evaluation
    near: list[Variation]

    def gain(self, variation: Variation) -> float:
        """How much faster a neighbour is."""
        return variation.evaluation.tokens_per_s_per_device / self.plan.tokens_per_s_per_device - 1


def verdict(problems: list[PlanProblem]) -> str:
    """What to say of them all: "fits", "does not fit" or "legal but unwise"."""
    severities = {problem.severity for problem in problems}
    if "error" in severities:
        return "does not fit"
    return "legal but unwise" if "unwise" in severities else "fits"


def find_plan_problems(task: Task, plan: Evaluation) -> tuple[list[PlanProblem], list[Variation]]:
    """Everything worth saying about a layout, worst first, and the neighbours that were looked at."""
    near = list(variations(task, plan.layout))
    rules = (
        _memory,
        _microbatches,
        _tensor_domain,
        _no_need,
        _hybrid,
        _replicate,
        _exchange,
        _unmeasured_exchange,
        _faster,
    )
    found = [problem for rule in rules for problem in rule(_Case(task=task, plan=plan, near=near))]
    order = {"error": 0, "unwise": 1, "hint": 2}
    return sorted(found, key=lambda problem: order[problem.severity]), near


def describe_change(plan: Evaluation, variation: Variation) -> str:
    """E.g. "remat full (train.remat=full): saves 21.3 GiB, costs 30% of the throughput"."""
    saved = (plan.memory.total_bytes - variation.evaluation.memory.total_bytes) / GIB
    speed = variation.evaluation.tokens_per_s_per_device / plan.tokens_per_s_per_device - 1
    memory = f"saves {saved:.1f} GiB" if saved >= 0 else f"takes {-saved:.1f} GiB more"
    time = f"costs {-speed:.0%} of the throughput" if speed < 0 else f"is {speed:.0%} faster"
    return f"{variation.name} ({variation.overrides}): {memory}, {time}"


def _named(plan: Evaluation, chosen: list[Variation]) -> str:
    """The changes described; the first of any with the same overrides."""
    unique = {variation.overrides: variation for variation in chosen}
    return "; ".join(describe_change(plan, variation) for variation in list(unique.values())[:_MANY])


def _fastest_first(near: list[Variation]) -> list[Variation]:
    return sorted(near, key=lambda variation: -variation.evaluation.tokens_per_s_per_device)


def _memory(case: _Case) -> Iterator[PlanProblem]:
    memory = case.plan.memory
    device = f"{memory.device_bytes / GIB:.1f} GiB of a {case.task.cluster.gpu.name}"
    if case.plan.fits and not case.plan.fits_safely:
        yield PlanProblem(
            rule="memory_margin",
            severity="unwise",
            message=f"only {memory.free_bytes / GIB:.1f} GiB of {device} stay free: within {SAFE_MARGIN:.0%} of the "
            "limit the arithmetic cannot tell whether it fits",
            remedy=_remedies(case, safely=True),
        )
    elif not case.plan.fits:
        yield PlanProblem(
            rule="memory",
            severity="error",
            message=f"does not fit: {memory.total_bytes / GIB:.1f} GiB are needed, {-memory.free_bytes / GIB:.1f} GiB "
            f"more than the {device}; {_largest(case.plan)}",
            remedy=_remedies(case, safely=False),
        )


def _largest(plan: Evaluation) -> str:
    parts = {
        "parameters, gradients and optimizer": plan.memory.params + plan.memory.grads + plan.memory.optimizer,
        "activations": plan.memory.activations,
        "logits": plan.memory.logits,
        "gathered weights": plan.memory.gathered,
    }
    name = max(parts, key=parts.get)
    return f"most of it are {name} ({parts[name] / GIB:.1f} GiB)"


def _remedies(case: _Case, *, safely: bool) -> str:
    """Single changes that make it fit, the fastest first; else two changes; else what saves most."""

    def enough(evaluation: Evaluation) -> bool:
        return evaluation.fits_safely or (not safely and evaluation.fits)

    saving = [v for v in case.near if v.evaluation.memory.total_bytes < case.plan.memory.total_bytes]
    if fitting := [v for v in saving if enough(v.evaluation)]:
        return _named(case.plan, _fastest_first(fitting))
    pairs = []
    for first in saving:
        for second in variations(case.task, first.evaluation.layout):
            if enough(second.evaluation) and second.name != first.name:
                pairs.append(
                    Variation(
                        name=f"{first.name} and {second.name}",
                        overrides=_merged(first.overrides, second.overrides),
                        evaluation=second.evaluation,
                    )
                )
    if pairs:
        return _named(case.plan, _fastest_first(pairs))
    most = sorted(saving, key=lambda v: v.evaluation.memory.total_bytes)
    more = f"more devices ({2 * case.task.cluster.num_devices}?), a smaller model, or a smaller data.seq_len"
    if not most:
        return more
    best = describe_change(case.plan, most[0])
    return f"no one or two changes suffice; {best}; then {more}, or let --search look further"


def _merged(first: str, second: str) -> str:
    """Overrides of both, the second winning."""
    settings = dict(override.split("=", 1) for override in f"{first} {second}".split())
    return " ".join(f"{key}={value}" for key, value in settings.items())


def _microbatches(case: _Case) -> Iterator[PlanProblem]:
    layout = case.plan.layout
    stages, m = layout.pipeline, layout.microbatches
    if stages == 1 or m >= MICROBATCHES_PER_STAGE * stages:
        return
    # Idle under 10%: (p - 1) / (v m + p - 1) < 0.1.
    wanted = -(-9 * (stages - 1) // layout.chunks)
    remedy = (
        f"at least {MICROBATCHES_PER_STAGE} per stage, train.microbatches={MICROBATCHES_PER_STAGE * stages}; "
        f"{wanted} bring idle time to 10%"
    )
    if more := [v for v in case.near if v.name.endswith("microbatches") and v.evaluation.layout.microbatches > m]:
        remedy += "; " + _named(case.plan, _fastest_first(more)[:1])
    else:
        remedy += f"; here that needs a larger train.global_batch_size than {case.task.global_batch_size}"
    yield PlanProblem(
        rule="microbatches_per_stage",
        severity="unwise",
        message=f"{m} microbatches on {stages} stages leave each stage idle for {layout.bubble_fraction:.1%} of the "
        "pipeline's time",
        remedy=remedy,
    )


def _tensor_domain(case: _Case) -> Iterator[PlanProblem]:
    tensor, cluster = case.plan.layout.tensor, case.task.cluster
    link = cluster.link_name(1, tensor)
    if tensor == 1 or link == "NVLink":
        return
    seconds = sum(c.exposed_s for c in case.plan.time.collectives if c.axis == "tensor")
    remedy = "use fsdp instead"
    if better := [v for v in case.near if v.evaluation.layout.tensor < tensor and v.evaluation.fits]:
        remedy = _named(case.plan, _fastest_first(better))
    yield PlanProblem(
        rule="tensor_outside_nvlink",
        severity="unwise",
        message=f"tensor {tensor} leaves the NVLink domain of {cluster.nvlink_size} GPUs: its collectives go over the "
        f"{link} and take {seconds / case.plan.time.step_s:.0%} of the step",
        remedy=f"keep mesh.tensor within {cluster.nvlink_size}: {remedy}",
    )


def _no_need(case: _Case) -> Iterator[PlanProblem]:
    """Tensor and pipeline axes where sharding alone fits and is faster."""
    if not case.plan.fits:
        return
    for axis, name in (("tensor", "no tensor axis"), ("pipeline", "no pipeline")):
        for variation in case.near:
            faster = case.gain(variation) > _WORTH
            if variation.name == name and variation.evaluation.fits_safely and faster:
                size = getattr(case.plan.layout, axis)
                yield PlanProblem(
                    rule=f"{axis}_without_need",
                    severity="unwise",
                    message=f"{axis} {size} is not needed: sharding over fsdp fits and is faster",
                    remedy=describe_change(case.plan, variation),
                )


def _hybrid(case: _Case) -> Iterator[PlanProblem]:
    exposed = sum(c.exposed_s for c in case.plan.time.collectives if c.axis == "fsdp" and c.link == "network")
    if exposed < 0.1 * case.plan.time.step_s:
        return
    better = [v for v in case.near if v.name.startswith("hybrid") and v.evaluation.fits and case.gain(v) > _WORTH]
    remedy = "more tokens per device and microbatch hide it (fewer train.microbatches, a larger batch)"
    if better:
        remedy = _named(case.plan, better)
    yield PlanProblem(
        rule="fsdp_over_network",
        severity="unwise" if better else "hint",
        message=f"gathering weights over the network delays the step by {exposed / case.plan.time.step_s:.0%}",
        remedy=remedy,
    )


def _replicate(case: _Case) -> Iterator[PlanProblem]:
    for variation in case.near:
        faster = case.gain(variation) > _WORTH
        if variation.name.startswith("replicate") and variation.evaluation.fits_safely and faster and case.plan.fits:
            yield PlanProblem(
                rule="ddp_fits",
                severity="hint",
                message="the whole training state fits on every device, so that nothing need be gathered",
                remedy=describe_change(case.plan, variation),
            )


def _exchange(case: _Case) -> Iterator[PlanProblem]:
    for collective in case.plan.time.collectives:
        if collective.axis == "expert" and collective.link == "network":
            share = collective.exposed_s / case.plan.time.step_s
            nearer = f"keep mesh.expert within {case.task.cluster.domain_size}"
            doubt, remedy = "", nearer
            if not _knows_exchange(case):
                doubt = ", and all-to-all is the collective whose speed is known least"
                remedy = f"{_MEASURE_EXCHANGE}; or {nearer}"
            yield PlanProblem(
                rule="expert_over_network",
                severity="unwise" if share > 0.25 else "hint",
                message=f"tokens cross the network to their experts: predicted {share:.0%} of the step{doubt}",
                remedy=remedy,
            )


_MEASURE_EXCHANGE = (
    "measure it there before a long run (jaxpar bench collectives --out cluster.toml, on a mesh with that expert axis) "
    "and plan with --cluster cluster.toml"
)

_MANY_DEVICES = 64
"""A run that is worth measuring for."""


def _knows_exchange(case: _Case) -> bool:
    layout = case.plan.layout
    return case.task.cluster.knows_exchange(layout.tensor * layout.context, layout.expert)


def _unmeasured_exchange(case: _Case) -> Iterator[PlanProblem]:
    """A large run of a mixture of experts whose exchange nobody has timed."""
    devices = case.task.cluster.num_devices
    exchanges = [collective for collective in case.plan.time.collectives if collective.op == "all-to-all"]
    if not exchanges or devices < _MANY_DEVICES or _knows_exchange(case):
        return
    share = sum(collective.exposed_s for collective in exchanges) / case.plan.time.step_s
    yield PlanProblem(
        rule="all_to_all_unmeasured",
        severity="hint",
        message=f"all-to-all was never measured on this cluster: that it takes {share:.0%} of the step on {devices} "
        "devices is a guess from the catalogue",
        remedy=_MEASURE_EXCHANGE,
    )


def _faster(case: _Case) -> Iterator[PlanProblem]:
    """The best single change that no other rule names."""
    if not case.plan.fits:
        return
    settings = ("remat", "fsdp full")
    candidates = [v for v in case.near if v.name.startswith(settings) or v.name.endswith("microbatches")]
    if best := next((v for v in _fastest_first(candidates) if v.evaluation.fits_safely), None):
        gain = case.gain(best)
        if gain > _WORTH:
            yield PlanProblem(
                rule="faster",
                severity="hint",
                message=f"a single setting makes it {gain:.0%} faster and still fits with a margin",
                remedy=describe_change(case.plan, best),
            )
