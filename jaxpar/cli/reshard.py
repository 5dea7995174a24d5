"""``jaxpar reshard``: rewrites a checkpoint for another mesh, or turns it into another form."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxpar.checkpoint import commit
from jaxpar.checkpoint.errors import CheckpointError
from jaxpar.checkpoint.places import locate
from jaxpar.cli.exit_codes import INTERRUPTED
from jaxpar.cli.sizes import parse_bytes, readable_bytes
from jaxpar.cli.verify_checkpoint import bytes_progress
from jaxpar.config import ConfigError, Problem, load_config
from jaxpar.config.schema import AXES, RuntimeConfig
from jaxpar.convert import (
    export,
    is_hf_directory,
    keep_side_files,
    plan_export,
    plan_foreign_import,
    plan_hf_import,
)
from jaxpar.plan.catalogue import GPUS, Gpu, find_gpu
from jaxpar.plan.facts import gather_facts
from jaxpar.reshard import FLOAT_TYPES, PARAMS, Resharding, plan_resharding, reshard


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """The command's arguments."""

    source: str
    destination: str
    mesh: str | None
    config: str | None
    to: str
    key_map: str | None
    tokenizer: str | None
    weights: str = "params"
    params_only: bool
    dtype: str | None
    step: int | None
    max_memory: str
    gpu: str | None
    dry_run: bool
    verify: bool
    as_json: bool


def run(request: Request) -> None:
    """Do what the command says, or only say it.

    Raises:
        ConfigError: An argument is not what it should be.
        CheckpointError: The source cannot be read or the destination cannot be written.
    """
    _check_arguments(request)
    max_memory = _max_memory(request.max_memory)
    try:
        (_export if request.to == "hf" else _copy)(request, max_memory)
    except KeyboardInterrupt:
        print("interrupted; give the same command again and it goes on from here", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _copy(request: Request, max_memory: int) -> None:
    """To a jaxpar checkpoint, from whatever the source is."""
    gpu = _gpu(request.gpu) if request.gpu else None
    planned = _plan(request)
    place = Path(request.destination) / str(planned.step)
    if place.exists():
        raise _problem("DST", request.destination, f"{place} is there already", "nothing is overwritten: name another")
    report = _report(planned, place, gpu)
    if request.dry_run:
        _print(report, request.as_json)
        return
    if is_hf_directory(request.source):
        keep_side_files(request.source, request.destination)
    with bytes_progress() as progress:
        total = planned.bytes_to_read + (planned.num_bytes if request.verify else 0)
        task = progress.add_task("copying and verifying" if request.verify else "copying", total=total)
        written = reshard(
            planned,
            request.destination,
            max_memory=max_memory,
            progress=lambda num_bytes: progress.advance(task, num_bytes),
            verify=request.verify,
        )
    if request.as_json:
        print(json.dumps({**report, "written": str(written), "verified": request.verify}))
        return
    verified = ", every checksum verified" if request.verify else ""
    print(f"wrote {written}: {len(planned.arrays)} arrays, {readable_bytes(planned.num_bytes)}{verified}")
    if all(name.startswith(PARAMS) for name in planned.arrays):
        print(f"  start a run from it: jaxpar train CONFIG model.init_from=jaxpar:{request.destination}")
    else:
        precision = f" precision.params={request.dtype}" if request.dtype else ""
        print(f"  go on from it: jaxpar train CONFIG run.dir=NEW checkpoint.resume={request.destination}{precision}")


def _begun_step(request: Request) -> int | None:
    """The step that is asked for; else the one whose copy to the destination was interrupted, if the source has it yet.

    The source may be a run that goes on: its newest step is not the one that the same command began to copy.
    """
    if request.step is not None or is_hf_directory(request.source):
        return request.step
    directory, named = locate(request.source)
    begun = set(commit.unfinished_copies(Path(request.destination))) & set(commit.scan(directory)[0])
    if named is not None or len(begun) != 1:
        return None
    (step,) = begun
    print(f"goes on with step {step}, whose copy was interrupted (--step chooses another)", file=sys.stderr)
    return step


def _plan(request: Request) -> Resharding:
    mesh, step = _target_mesh(request), _begun_step(request)
    try:
        if is_hf_directory(request.source):
            return plan_hf_import(request.source, mesh=mesh, dtype=request.dtype)
        if request.key_map:
            config = load_config(request.config)
            return plan_foreign_import(
                request.source, request.key_map, config, step=step, mesh=mesh, dtype=request.dtype
            )
        return plan_resharding(
            request.source, mesh=mesh, params_only=request.params_only, dtype=request.dtype, step=step
        )
    except (CheckpointError, ConfigError):
        raise
    except ValueError as error:  # the mesh does not divide the model
        raise _problem("--mesh", request.mesh or request.config, str(error), "change the sizes of the axes") from error


def _export(request: Request, max_memory: int) -> None:
    """To a Hugging Face directory."""
    planned = plan_export(
        request.source,
        step=request.step,
        dtype=request.dtype,
        tokenizer=request.tokenizer,
        weights=request.weights,
    )
    place = Path(request.destination)
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise _problem("DST", request.destination, "is there already", "nothing is overwritten: name another")
    report = {
        "source": str(planned.source),
        "destination": request.destination,
        "tensors": len(planned.types),
        "bytes": planned.num_bytes,
        "dtype": planned.config["torch_dtype"],
        "side_files_from": str(planned.side_directory) if planned.side_directory else None,
    }
    if not request.dry_run:
        with bytes_progress() as progress:
            read = sum(planned.arrays.types[name].nbytes for name in planned.param_names)
            task = progress.add_task("exporting and comparing", total=read + 2 * planned.num_bytes)
            export(
                planned,
                request.destination,
                max_memory=max_memory,
                progress=lambda num_bytes: progress.advance(task, num_bytes),
            )
    if request.as_json:
        print(json.dumps({**report, "dry_run": request.dry_run}))
        return
    words = "dry run, nothing was written; it would write" if request.dry_run else "wrote"
    compared = "" if request.dry_run else ", every value compared with the source"
    size = f"{len(planned.types)} tensors, {report['dtype']}, {readable_bytes(planned.num_bytes)}"
    print(f"{words} {request.destination}: {size}{compared}")
    if planned.side_directory is None:
        print("  without tokenizer files: none are known; --tokenizer DIR carries them along")


def _check_arguments(request: Request) -> None:
    """What can be said about the arguments alone."""
    _check_dtype(request.dtype)
    from_hf = is_hf_directory(request.source)
    if "://" in request.destination:
        raise _problem("DST", request.destination, "object stores are not supported", "give a file system path")
    if (Path(request.source) / "config.json").is_file() and not from_hf:
        message = "has a config.json, but no *.safetensors"
        raise _problem("SRC", request.source, message, "convert it with transformers' save_pretrained first")
    if request.to not in ("hf", "jaxpar"):
        raise _problem("--to", request.to, "is not a form", "hf or jaxpar")
    if request.to == "hf" and (from_hf or request.key_map):
        what = "is a Hugging Face directory already" if from_hf else "comes with --key-map"
        raise _problem("SRC", request.source, what, "leave out --to, then export the jaxpar checkpoint that it makes")
    if request.weights not in ("params", "ema"):
        raise _problem("--weights", request.weights, "is not a set of weights", "params or ema")
    for name, value, applies in (
        ("--weights", request.weights if request.weights != "params" else None, request.to == "hf"),
        ("--mesh", request.mesh, request.to == "jaxpar"),
        ("--tokenizer", request.tokenizer, request.to == "hf"),
        ("--config", request.config, request.to == "jaxpar"),
        ("--gpu", request.gpu, request.to == "jaxpar" and request.dry_run),
        ("--step", request.step, not from_hf),
        ("--key-map", request.key_map, not from_hf),
    ):
        if value is not None and not applies:
            raise _problem(name, value, "does nothing here", f"leave out {name}")
    if request.key_map and not request.config:
        raise _problem("--key-map", request.key_map, "needs --config", "give the config whose model the source is")
    if request.mesh and request.config and not request.key_map:
        raise _problem("--mesh", request.mesh, "--config names a mesh too", "give one of the two")


def _target_mesh(request: Request) -> dict[str, int] | None:
    if request.mesh:
        return parse_mesh(request.mesh)
    if not request.config:
        return None
    mesh = gather_facts(load_config(request.config)).mesh
    open_axes = [axis for axis in AXES if axis not in mesh]
    if open_axes and not request.key_map:
        message = f"mesh.{open_axes[0]} = -1 needs a number of devices"
        raise _problem("--config", request.config, message, "set runtime.cpu_devices, or give --mesh")
    return None if open_axes else dict(mesh)


def parse_mesh(text: str) -> dict[str, int]:
    """Axis sizes of ``fsdp=16,tensor=4``; axes that are not named have size 1.

    Raises:
        ConfigError: Not of that form, an unknown axis, one named twice, or a size below 1.
    """
    sizes: dict[str, int] = {}
    example = "write e.g. fsdp=16,tensor=4; axes: " + ", ".join(AXES)
    for part in text.split(","):
        axis, _, size = (word.strip() for word in part.partition("="))
        if axis not in AXES:
            raise _problem("--mesh", text, f"{axis!r} is not a mesh axis", example)
        if axis in sizes:
            raise _problem("--mesh", text, f"{axis} is given twice", example)
        if not size.isdecimal() or int(size) < 1:
            raise _problem("--mesh", text, f"{axis} = {size!r} is not a number of devices", example)
        sizes[axis] = int(size)
    return sizes


def _max_memory(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise _problem("--max-memory", text, "is not a size", "write e.g. 4GiB or 500MB") from error


def _check_dtype(dtype: str | None) -> None:
    if dtype is not None and dtype not in FLOAT_TYPES:
        raise _problem("--dtype", dtype, "is not a float type", f"one of {', '.join(FLOAT_TYPES)}")


def _gpu(name: str) -> Gpu:
    """The first GPU of the catalogue whose name begins so: "h100" is the H100 SXM."""
    wanted = name.lower().replace("-", " ")
    found = find_gpu(name) or next((gpu for gpu in GPUS if f"{gpu.name.lower()} ".startswith(f"{wanted} ")), None)
    if found is None:
        raise _problem("--gpu", name, "is not in the catalogue", f"one of {', '.join(gpu.name for gpu in GPUS)}")
    return found


def _problem(key: str, value: object, message: str, remedy: str) -> ConfigError:
    return ConfigError([Problem(key=key, value=value, message=message, remedy=remedy)])


def _report(planned: Resharding, place: Path, gpu: Gpu | None) -> dict[str, object]:
    """What the copy is and brings, as JSON has it."""
    after = planned.bytes_per_device(planned.after)
    report: dict[str, object] = {
        "source": planned.source,
        "destination": str(place),
        "step": planned.step,
        "arrays": len(planned.arrays),
        "bytes": planned.num_bytes,
        "bytes_per_device_before": planned.bytes_per_device(planned.before),
        "bytes_per_device_after": after,
        "read_amplification_before": planned.read_amplification(planned.stored_chunks()),
        "read_amplification_after": planned.read_amplification({n: a.chunk for n, a in planned.arrays.items()}),
        "seconds_estimate": planned.seconds(),
    }
    if gpu is not None and after is not None:
        report["gpu"] = _fit(planned, gpu, after)
    return report


def _fit(planned: Resharding, gpu: Gpu, state_bytes: int) -> dict[str, object]:
    """Whether what is held between steps fits a GPU: the state, and with an optimizer the gradients, sharded alike."""
    trains = any(not name.startswith("params/") for name in planned.arrays)
    params = {name: array for name, array in planned.arrays.items() if name.startswith("params/")}
    gradients = dataclasses.replace(planned, arrays=params).bytes_per_device(planned.after) if trains else 0
    usable = int(gpu.memory_bytes * RuntimeConfig().memory_fraction)
    return {
        "name": gpu.name,
        "usable_bytes": usable,
        "state_bytes": state_bytes,
        "gradient_bytes": gradients,
        "fits": state_bytes + gradients <= usable,
    }


def _print(report: Mapping[str, object], as_json: bool) -> None:
    if as_json:
        print(json.dumps(report))
        return
    table = Table(title=f"{report['source']} -> {report['destination']}", show_header=False)
    table.add_row("arrays", f"{report['arrays']}, {readable_bytes(report['bytes'])}")
    for key, label in (("before", "bytes per device, mesh that saved"), ("after", "bytes per device, target mesh")):
        held = report[f"bytes_per_device_{key}"]
        table.add_row(label, "unknown: no mesh" if held is None else f"{held:,} ({readable_bytes(held)})")
    for key, label in (("before", "read by the target mesh as it lies"), ("after", "read by it after resharding")):
        factor = report[f"read_amplification_{key}"]
        table.add_row(label, "unknown: no target mesh" if factor is None else f"{factor:.2f} x what it needs")
    table.add_row("time", f"about {report['seconds_estimate']:.0f} s, at the speed of a small sample read here")
    if gpu := report.get("gpu"):
        held = f"state {readable_bytes(gpu['state_bytes'])} + gradients {readable_bytes(gpu['gradient_bytes'])}"
        verdict = "fits" if gpu["fits"] else "does NOT fit"
        table.add_row(
            gpu["name"], f"{held} {verdict} in {readable_bytes(gpu['usable_bytes'])}; activations come on top"
        )
    console = Console()
    console.print(table, highlight=False)
    console.print("dry run: nothing was written", highlight=False)
