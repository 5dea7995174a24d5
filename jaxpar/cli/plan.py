"""``jaxpar plan``: is a mesh legal, does it fit, what does it cost, what is better. No device is needed.

Arithmetic only, unless the compiler is asked too (``--compile``).
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Annotated, Literal

import typer

from jaxpar.cli.plan_tables import print_report
from jaxpar.config import PRESETS, Config, ConfigError, Problem, load_with_sources
from jaxpar.config.overrides import in_order, split_path
from jaxpar.config.schema import AXES
from jaxpar.experiments.compile import compile_step, cpu_target, gpu_target
from jaxpar.plan.catalogue import Gpu, gpu_named
from jaxpar.plan.evaluation import Task, evaluate_config, task_of
from jaxpar.plan.facts import Facts, gather_facts
from jaxpar.plan.inference import plan_inference
from jaxpar.plan.page import plan_page
from jaxpar.plan.report import inference_report, search_report, training_report, with_compiled
from jaxpar.plan.rules import LAYOUT_RULES, MODEL_RULES, Rule, find_problems
from jaxpar.plan.search import search
from jaxpar.plan.shape import ModelShape, find_shape, shape_of
from jaxpar.plan.topology import Cluster, ClusterFile, make_cluster, read_cluster

DEFAULT_GPU = "h100"

_NO_DEVICES = Problem(
    key="--devices",
    message="the number of devices is not known: an axis of the mesh is -1 (the rest), or nothing says how many",
    remedy="give --devices N, or write the size of every axis",
)

EPILOG = """
Examples:

\b
  jaxpar plan configs/llama-3.1-8b.toml mesh.fsdp=-1 train.global_batch_size=512 --devices 64 --gpu h100
  jaxpar plan model.preset=llama-3.1-70b data.seq_len=8192 train.global_batch_size=128 --search --devices 64
  jaxpar plan model.preset=llama-3.1-70b --mode inference --weights int4 --gpu rtx4090 --devices 2
  jaxpar plan --model deepseek-v3 train.global_batch_size=1024 mesh.fsdp=-1 mesh.expert=64 --devices 1024 --gpu h200

A cluster file says what --gpu, --devices and --nodes say, and more: [cluster] gpu, devices, nodes, intra_gb_per_s,
inter_gb_per_s (per GPU, one direction); [gpu] describes one that the catalogue lacks; [measured] is written by
`jaxpar bench collectives`. Options win over the file.

With --compile gpu the real train step is compiled for the GPUs, without a GPU, in a process of its own (needs the extra
plan-gpu); with --compile cpu for fake CPU devices. The report has the compiler's memory, every collective, and what is
wrong with the program.

Exit codes: 0 whenever a plan is printed, also one that does not fit (see the verdict); 2 bad input, an illegal mesh
among it; 1 the compiler failed.
"""


def plan(
    path: Annotated[str | None, typer.Argument(metavar="[CONFIG]", help="TOML file; may be left out.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="E.g. mesh.fsdp=8.")] = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help=f"GPU, e.g. h100, a100-40, rtx4090; default {DEFAULT_GPU}.")
    ] = None,
    devices: Annotated[int | None, typer.Option("--devices", min=1, help="GPUs in all.")] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="Nodes; default: 8 GPUs each.")] = None,
    cluster: Annotated[Path | None, typer.Option("--cluster", help="TOML file that describes the cluster.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Public model in place of the config's: a preset, or deepseek-v3.")
    ] = None,
    mode: Annotated[Literal["train", "inference"], typer.Option("--mode", help="What is planned.")] = "train",
    batch: Annotated[int, typer.Option("--batch", min=1, help="Inference: sequences at once.")] = 1,
    context: Annotated[int, typer.Option("--context", min=1, help="Inference: tokens per sequence.")] = 4096,
    weights: Annotated[
        Literal["int4", "int8", "bf16"], typer.Option("--weights", help="Inference: how weights are stored.")
    ] = "bf16",
    search_meshes: Annotated[
        bool, typer.Option("--search", help="Rank all legal meshes of --devices instead of the config's own.")
    ] = False,
    compile_for: Annotated[
        Literal["gpu", "cpu"] | None,
        typer.Option(
            "--compile", help="Also compile the train step, without a GPU, and report what the compiler says."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Also write a self-contained page with plots.")] = None,
) -> None:
    """Predict memory, communication and time of a training step, or of inference, without any device."""
    arguments = in_order(path, overrides)
    config, shape = _load(arguments, model)
    described = (
        read_cluster(cluster) if cluster is not None else ClusterFile(gpu=None, num_devices=None, num_nodes=None)
    )
    if compile_for is not None:
        _check_compilable(mode, search_meshes, model)
    chosen = gpu_named(gpu) if gpu else described.gpu or gpu_named(DEFAULT_GPU)
    num_devices = devices or described.num_devices
    if mode == "inference":
        machine = _cluster(described, chosen, num_devices or _mesh_product(config) or 1, nodes)
        settings = {"batch": batch, "context": context, "weights": weights}
        planned = plan_inference(shape, machine, sequences=batch, context=context, weights=weights)
        report = inference_report(shape, machine, planned, settings)
    elif search_meshes:
        facts = _facts(config, num_devices, MODEL_RULES)
        total = num_devices or facts.num_devices or _mesh_product(config)
        if total is None:
            raise ConfigError([_NO_DEVICES])
        report = _searched(task_of(facts, shape, _cluster(described, chosen, total, nodes)))
    else:
        facts = _facts(config, num_devices, LAYOUT_RULES)
        if len(facts.mesh) < len(AXES):
            raise ConfigError([_NO_DEVICES])
        machine = _cluster(described, chosen, math.prod(facts.mesh.values()), nodes)
        report = training_report(*evaluate_config(facts, shape, machine))
        if compile_for is not None:
            target = gpu_target(machine) if compile_for == "gpu" else cpu_target(machine.num_devices)
            report = with_compiled(report, compile_step(config, target).to_dict())
    if html is not None:
        _write_page(html, plan_page(report))
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        print_report(report)


def _load(arguments: list[str], model: str | None) -> tuple[Config, ModelShape]:
    """The config and the sizes of its model.

    A public model that no config can say is put into the config as far as that goes, so that the rules see its sizes.
    """
    if model is None or model in PRESETS:
        given = [*arguments, *([f"model.preset={model}"] if model else [])]
        config = load_with_sources(*split_path(given)).config
        model_config = gather_facts(config).model
        return config, shape_of(model_config)
    shape = find_shape(model)
    settings = {
        "vocab_size": shape.vocab_size,
        "embed_dim": shape.embed_dim,
        "num_layers": shape.num_layers,
        "num_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "mlp_dim": shape.mlp_dim,
        "num_experts": shape.num_experts,
        "top_k": shape.top_k,
        "expert_mlp_dim": shape.expert_mlp_dim,
        "num_shared_experts": shape.num_shared_experts,
        "first_dense_layers": shape.first_dense_layers,
    }
    given = [*arguments, *(f"model.{name}={value}" for name, value in settings.items())]
    return load_with_sources(*split_path(given)).config, shape


def _check_compilable(mode: str, search_meshes: bool, model: str | None) -> None:
    """Refuse to compile what is not the train step of one config.

    Raises:
        ConfigError: Another mode is asked for as well, or a model that no config can say.
    """
    if mode != "train" or search_meshes:
        message = "compiles the train step of one mesh, not inference or a search"
        remedy = "leave --mode and --search away; the search prints the overrides of its winner"
        raise ConfigError([Problem(key="--compile", message=message, remedy=remedy)])
    if model is not None and model not in PRESETS:
        message = f"the model code cannot build {model}; only its sizes are known"
        raise ConfigError([Problem(key="--compile", message=message, remedy="compile a preset, see jaxpar config")])


def _facts(config: Config, num_devices: int | None, rules: tuple[Rule, ...]) -> Facts:
    """Facts of a config.

    Raises:
        ConfigError: Every rule that is broken.
    """
    facts = dataclasses.replace(gather_facts(config, num_devices=num_devices), is_planned=True)
    if problems := find_problems(facts, rules):
        raise ConfigError(problems)
    return facts


def _searched(task: Task) -> dict:
    """The report of a search.

    Raises:
        ConfigError: No mesh is legal.
    """
    result = search(task)
    if not result.meshes:
        reasons = "; ".join(f"{rejection.name}: {rejection.reason}" for rejection in result.rejected)
        problem = Problem(
            key="--devices",
            value=task.cluster.num_devices,
            message=f"no mesh of so many devices is legal for this model and batch ({reasons})",
            remedy=f"change train.global_batch_size ({task.global_batch_size}) or the number of devices",
        )
        raise ConfigError([problem])
    return search_report(task, result)


def _mesh_product(config: Config) -> int | None:
    sizes = [getattr(config.mesh, axis) for axis in AXES]
    return math.prod(sizes) if min(sizes) > 0 else None


def _cluster(described: ClusterFile, gpu: Gpu, num_devices: int, nodes: int | None) -> Cluster:
    """Nodes of the command line over those of the file, if it is about as many devices, over the usual."""
    num_nodes = nodes or (described.num_nodes if described.num_devices in (None, num_devices) else None)
    cluster = make_cluster(gpu, num_devices=num_devices, num_nodes=num_nodes)
    if described.links is not None and gpu == described.gpu:
        return dataclasses.replace(cluster, links=described.links)
    if described.links is not None:
        typer.echo(f"warning: not used, because it was not on a {gpu.name}: {described.links.by}", err=True)
    return cluster


def _write_page(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        message = f"cannot be written: {error.strerror or error}"
        remedy = "name a file in a directory that exists"
        raise ConfigError([Problem(key="--html", value=str(path), message=message, remedy=remedy)]) from error
