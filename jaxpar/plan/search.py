"""The best legal layouts of a task, why the winner wins, and why famous choices did not.

Every mesh of the devices is enumerated with microbatches, remat, schedule and strategy. Meshes that break a rule are
left out; settings that do not fit are left out before their time is computed. What remains is ranked by predicted
tokens per second, one entry per mesh.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from jaxpar.plan.evaluation import SAFE_MARGIN, Evaluation, Task, evaluate, memory_of, trains_today
from jaxpar.plan.layout import Layout, Strategy, balanced_places, strategy_overrides
from jaxpar.plan.legality import batch_objection, mesh_objection, schedule_objection
from jaxpar.plan.memory import GIB, Memory

MAX_TENSOR = 16
MAX_PIPELINE = 64
MIN_CONTEXT_TOKENS = 2048
"""Tokens of a row that a context shard keeps at least; shorter ones leave attention nothing to overlap with."""

MAX_CHUNKS = 8
REMATS = ("none", "selective", "full")
"""Policies that a config can name, with the default list; offload's transfers are not modelled."""

STRATEGIES: tuple[Strategy, ...] = ("full", "optimizer")
"""ZeRO-3 and ZeRO-1. ZeRO-2 reduces gradients as often as the first and holds weights like the second."""

KEPT = 20
"""Ranked meshes that are reported."""

SIMPLER = 0.005
"""Speed that one more axis has to bring to be ranked above a simpler mesh: less than that nobody can predict."""

MAX_MICROBATCHES_PER_STAGE = 32
"""More bring the idle share of a pipeline below 3% anyway."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Famous:
    """A layout that many would try."""

    name: str
    mesh: dict[str, int]
    strategy: Strategy | None = None
    """What must be sharded for the name to be right; None: whatever is best."""

    def is_like(self, layout: Layout) -> bool:
        """Whether a layout is of this kind."""
        return layout.mesh == self.mesh and self.strategy in (None, layout.strategy)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rejection:
    """A layout that many would try, and why it is not the winner."""

    name: str
    mesh: dict[str, int]
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchResult:
    """What a search found."""

    ranked: tuple[Evaluation, ...]
    """Best settings of the best meshes that fit with a margin, fastest first; at most :data:`KEPT`."""
    all_ranked: tuple[Evaluation, ...]
    """The same of every mesh."""
    rejected: tuple[Rejection, ...]
    explanation: tuple[str, ...]
    meshes: int
    """Legal meshes."""
    evaluated: int
    """Layouts whose time was predicted."""


def search(task: Task) -> SearchResult:
    """Ranks the legal layouts of a task."""
    best: list[Evaluation] = []
    meshes = evaluated = 0
    for mesh in legal_meshes(task):
        meshes += 1
        found = [evaluate(task, layout, memory) for layout, memory in _settings(task, mesh, STRATEGIES)]
        evaluated += len(found)
        if found:
            best.append(max(found, key=_speed))
    ranked = sorted(best, key=_rank, reverse=True)
    return SearchResult(
        ranked=tuple(ranked[:KEPT]),
        all_ranked=tuple(ranked),
        rejected=tuple(_famous_rejections(task, ranked)),
        explanation=tuple(_explanation(task, ranked)),
        meshes=meshes,
        evaluated=evaluated,
    )


def legal_meshes(task: Task) -> Iterator[dict[str, int]]:
    """Every mesh of all devices that the model and the batch allow, tensor within a domain."""
    devices, shape, cluster = task.cluster.num_devices, task.shape, task.cluster
    most_context = max(1, task.seq_len // MIN_CONTEXT_TOKENS)
    for tensor in _divisors(devices, min(MAX_TENSOR, cluster.domain_size)):
        for context in _divisors(devices // tensor, most_context):
            for pipeline in _divisors(devices // (tensor * context), MAX_PIPELINE):
                inside = devices // (tensor * context * pipeline)
                for expert in _divisors(inside, shape.num_experts or 1):
                    yield from _data_splits(task, tensor, context, pipeline, expert, inside // expert)


def _data_splits(
    task: Task, tensor: int, context: int, pipeline: int, expert: int, rest: int
) -> Iterator[dict[str, int]]:
    for fsdp in _divisors(rest, rest):
        mesh = {
            "pipeline": pipeline,
            "data": rest // fsdp,
            "fsdp": fsdp,
            "expert": expert,
            "context": context,
            "tensor": tensor,
        }
        legal = mesh_objection(task.shape, mesh, task.seq_len) is None
        if legal and batch_objection(mesh, task.global_batch_size, 1) is None:
            yield mesh


def _settings(task: Task, mesh: dict[str, int], strategies: Sequence[Strategy]) -> Iterator[tuple[Layout, Memory]]:
    """Layouts of a mesh that fit with a margin, and what they take."""
    if mesh["fsdp"] * mesh["expert"] * mesh["context"] == 1:
        strategies = strategies[:1]
    remats = REMATS if mesh["pipeline"] == 1 else ("full",)
    for (schedule, chunks), strategy, remat in itertools.product(
        _schedules(task, mesh["pipeline"]), strategies, remats
    ):
        found = _fitting(task, mesh, strategy=strategy, remat=remat, schedule=schedule, chunks=chunks)
        # Without a pipeline more microbatches only cost: more gathers, smaller products.
        yield from itertools.islice(found, 1) if mesh["pipeline"] == 1 else found


def _fitting(task: Task, mesh: dict[str, int], **settings: object) -> Iterator[tuple[Layout, Memory]]:
    """The layouts of some settings that fit with a margin, the fewest microbatches first."""
    rows = task.global_batch_size // (mesh["data"] * mesh["fsdp"] * mesh["expert"])
    most = rows if mesh["pipeline"] == 1 else MAX_MICROBATCHES_PER_STAGE * mesh["pipeline"]
    limit = (1 - SAFE_MARGIN) * task.cluster.gpu.memory_bytes
    schedule, chunks = settings["schedule"], settings["chunks"]
    places = balanced_places(task.shape.num_layers, mesh["pipeline"], chunks)
    for microbatches in _divisors(rows, most):
        if schedule_objection(task.shape, mesh, schedule, chunks, microbatches, places):
            continue
        layout = task.layout(mesh, microbatches=microbatches, places=places, **settings)
        memory = memory_of(task, layout)
        if memory.total_bytes <= limit:
            yield layout, memory


def _schedules(task: Task, pipeline: int) -> list[tuple[str, int]]:
    """(schedule, chunks); gpipe is idle as long as 1f1b, and keeps more."""
    if pipeline == 1:
        return [("1f1b", 1)]
    num_layers = task.shape.num_layers
    most = min(MAX_CHUNKS, num_layers // pipeline)
    largest_stage = -(-num_layers // pipeline)
    return [("1f1b", 1)] + [("interleaved", chunks) for chunks in _divisors(largest_stage, most) if chunks > 1]


def _divisors(size: int, most: int) -> list[int]:
    return [n for n in range(1, min(size, most) + 1) if size % n == 0]


def _rank(evaluation: Evaluation) -> float:
    """Speed, less what each axis beyond the first has to be worth."""
    axes = sum(size > 1 for size in evaluation.layout.mesh.values())
    return evaluation.tokens_per_s_per_device * (1 - SIMPLER * max(0, axes - 1))


def _speed(evaluation: Evaluation) -> float:
    return evaluation.tokens_per_s_per_device


def mesh_words(mesh: dict[str, int]) -> str:
    """E.g. "fsdp 64 x tensor 8"."""
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1) or "one device"


def layout_words(layout: Layout) -> str:
    """A layout in one line."""
    words = [mesh_words(layout.mesh), f"{layout.microbatches} microbatches", f"remat {layout.remat}"]
    if layout.pipeline > 1:
        words.append(layout.schedule + (f" x {layout.chunks}" if layout.chunks > 1 else ""))
        words += ["balanced stages"] if layout.places else []
    if layout.strategy in ("optimizer", "grads"):
        words.append(f"fsdp_strategy {layout.strategy}")
    return ", ".join(words)


def layout_overrides(layout: Layout) -> str:
    """The config overrides of a layout."""
    settings = [f"mesh.{axis}={size}" for axis, size in layout.mesh.items()]
    settings += [f"train.microbatches={layout.microbatches}", f"train.remat={layout.remat}"]
    settings += strategy_overrides(layout)
    if layout.pipeline > 1:
        settings += [f"pipeline.schedule={layout.schedule}", f"pipeline.chunks={layout.chunks}"]
        settings.append(f"pipeline.layers_per_stage={'balanced' if layout.places else 'even'}")
    return " ".join(settings)


def _explanation(task: Task, ranked: Sequence[Evaluation]) -> Iterator[str]:
    if not ranked:
        yield "no legal layout fits with a margin of a tenth of the device"
        return
    winner = ranked[0]
    yield (
        f"winner: {layout_words(winner.layout)}: {winner.tokens_per_s_per_device:,.0f} tokens/s per device, "
        f"MFU {winner.mfu:.1%}, {winner.memory.total_bytes / GIB:.1f} GiB"
    )
    if len(ranked) > 1:
        yield f"runner-up: {layout_words(ranked[1].layout)}: {slower_because(winner, ranked[1])}"
    plain = Famous(name="plain FSDP", mesh=_one(task, fsdp=task.cluster.num_devices), strategy="full")
    if plain.is_like(winner.layout):
        yield "the winner is plain FSDP"
    else:
        yield f"plain FSDP ({mesh_words(plain.mesh)}): {why_not(task, plain, ranked)}"
    if not trains_today(task.shape, winner.layout):
        today = next((evaluation for evaluation in ranked if trains_today(task.shape, evaluation.layout)), None)
        if today is not None:
            words, behind = layout_words(today.layout), slower_because(winner, today)
            yield f"best that the trainer can run already: {words}: {behind}"


def slower_because(winner: Evaluation, other: Evaluation) -> str:
    """By how much another layout is slower, and which parts of its step take longer or shorter."""
    share = 1 - other.tokens_per_s_per_device / winner.tokens_per_s_per_device
    differences = {name: seconds - _parts(winner).get(name, 0.0) for name, seconds in _parts(other).items()}
    differences |= {name: -seconds for name, seconds in _parts(winner).items() if name not in differences}
    worth = 0.005 * winner.time.step_s
    largest = sorted(differences.items(), key=lambda item: -abs(item[1]))
    said = [f"{name} {seconds * 1e3:+,.0f} ms" for name, seconds in largest if abs(seconds) > worth][:4]
    how = "slower" if share >= 0 else "faster, with more axes"
    return f"{abs(share):.1%} {how}" + (f" ({', '.join(said)})" if said else ", within what the arithmetic can tell")


def _parts(evaluation: Evaluation) -> dict[str, float]:
    time = evaluation.time
    parts = {
        "matrix products": time.products_s,
        "attention": time.attention_s,
        "elementwise": time.elementwise_s,
        "head": time.head_s,
        "optimizer": time.optimizer_s,
        "pipeline idle": time.bubble_s,
    }
    for collective in time.collectives:
        name = f"{collective.axis} communication"
        parts[name] = parts.get(name, 0.0) + collective.exposed_s
    return parts


def _one(task: Task, **axes: int) -> dict[str, int]:
    """A mesh of the given axes; fsdp takes the rest if not given."""
    mesh = dict.fromkeys(("pipeline", "data", "fsdp", "expert", "context", "tensor"), 1) | axes
    if "fsdp" not in axes and "data" not in axes:
        mesh["fsdp"] = max(1, task.cluster.num_devices // math.prod(mesh.values()))
    return mesh


def famous_layouts(task: Task) -> list[Famous]:
    """What people try first, and layouts of well-known runs, as far as the device count has room for them."""
    devices, cluster = task.cluster.num_devices, task.cluster
    inside = min(8, cluster.domain_size)
    named = [
        ("DDP", _one(task, data=devices), None),
        ("plain FSDP", _one(task, fsdp=devices), "full"),
        ("hybrid FSDP", _one(task, data=cluster.num_nodes, fsdp=cluster.devices_per_node), "full"),
        ("tensor in a node, FSDP across", _one(task, tensor=inside), "full"),
        ("tensor across nodes", _one(task, tensor=2 * inside), None),
        ("Megatron 3D", _one(task, tensor=inside, pipeline=8), None),
        ("Llama 3 405B's", _one(task, tensor=8, pipeline=16), None),
        ("a pipeline of all layers", _one(task, pipeline=task.shape.num_layers), None),
    ]
    if task.shape.num_experts:
        named.append(("experts in a node", _one(task, expert=inside), None))
        named.append(("experts across nodes", _one(task, expert=min(64, task.shape.num_experts)), None))
    if task.seq_len >= 8 * MIN_CONTEXT_TOKENS:
        named.append(("context parallel in a node", _one(task, context=inside), None))
    famous = [Famous(name=name, mesh=mesh, strategy=strategy) for name, mesh, strategy in named]
    unique = {tuple(layout.mesh.items()): layout for layout in reversed(famous)}
    return [layout for layout in reversed(unique.values()) if math.prod(layout.mesh.values()) == devices]


def _famous_rejections(task: Task, ranked: Sequence[Evaluation]) -> Iterator[Rejection]:
    for famous in famous_layouts(task):
        if not ranked or not famous.is_like(ranked[0].layout):
            yield Rejection(name=famous.name, mesh=famous.mesh, reason=why_not(task, famous, ranked))


def why_not(task: Task, famous: Famous, ranked: Sequence[Evaluation]) -> str:
    """Why a layout is not the winner: illegal, too large, or slower."""
    mesh = famous.mesh
    objection = mesh_objection(task.shape, mesh, task.seq_len) or batch_objection(mesh, task.global_batch_size, 1)
    if objection:
        return objection
    if mesh["tensor"] > min(MAX_TENSOR, task.cluster.domain_size):
        return f"tensor {mesh['tensor']} leaves the domain of {task.cluster.domain_size} GPUs with fast links"
    strategies = STRATEGIES if famous.strategy is None else (famous.strategy,)
    fitting = [evaluate(task, layout, memory) for layout, memory in _settings(task, mesh, strategies)]
    if fitting and ranked:
        return slower_because(ranked[0], max(fitting, key=_speed))
    tried = _smallest(task, mesh)
    if tried is None:
        rows = task.global_batch_size // (mesh["data"] * mesh["fsdp"] * mesh["expert"])
        return f"{mesh['pipeline']} stages need as many microbatches, and there are {rows} rows per device"
    over = tried.memory.total_bytes - tried.memory.device_bytes
    if over > 0:
        return f"does not fit by {over / GIB:.1f} GiB, with full remat and the smallest microbatch"
    return f"fits, but leaves only {-over / GIB:.1f} GiB: too little to be sure"


def _smallest(task: Task, mesh: dict[str, int]) -> Evaluation | None:
    """The mesh with the settings that take least memory; None if no schedule can run."""
    rows = task.global_batch_size // (mesh["data"] * mesh["fsdp"] * mesh["expert"])
    if rows < mesh["pipeline"]:
        return None
    places = balanced_places(task.shape.num_layers, mesh["pipeline"], 1)
    return evaluate(task, task.layout(mesh, microbatches=rows, remat="full", places=places))
