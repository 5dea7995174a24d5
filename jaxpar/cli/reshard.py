"""``jaxpar reshard``: rewrites a checkpoint for another mesh, or turns it into another form."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxpar.checkpoint.errors import CheckpointError
from jaxpar.cli.sizes import parse_bytes, readable_bytes
from jaxpar.cli.verify_checkpoint import bytes_progress
from jaxpar.config import ConfigError, Problem, load_config
from jaxpar.config.schema import AXES, RuntimeConfig
from jaxpar.plan.catalogue import GPUS, Gpu, find_gpu
from jaxpar.plan.facts import gather_facts
from jaxpar.reshard import FLOAT_TYPES, Resharding, plan_resharding, reshard


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """The command's arguments."""

    source: str
    destination: str
    mesh: str | None
    config: str | None
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
    mesh = _target_mesh(request)
    gpu = _gpu(request.gpu) if request.gpu else None
    max_memory = _max_memory(request.max_memory)
    _check_dtype(request.dtype)
    try:
        planned = plan_resharding(
            request.source, mesh=mesh, params_only=request.params_only, dtype=request.dtype, step=request.step
        )
    except CheckpointError:
        raise
    except ValueError as error:  # the mesh does not divide the model
        raise _problem("--mesh", request.mesh or request.config, str(error), "change the sizes of the axes") from error
    place = Path(request.destination) / str(planned.step)
    if place.exists():
        raise _problem("DST", request.destination, f"{place} is there already", "nothing is overwritten: name another")
    report = _report(planned, place, gpu)
    if request.dry_run:
        _print(report, request.as_json)
        return
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
    if request.params_only:
        print(f"  start a run from it: jaxpar train CONFIG model.init_from=jaxpar:{request.destination}")
    else:
        print(f"  go on from it: jaxpar train CONFIG run.dir=NEW checkpoint.resume={request.destination}")


def _target_mesh(request: Request) -> dict[str, int] | None:
    if request.mesh and request.config:
        raise _problem("--mesh", request.mesh, "--config names a mesh too", "give one of the two")
    if request.config:
        config = load_config(request.config)
        mesh = gather_facts(config).mesh
        open_axes = [axis for axis in AXES if axis not in mesh]
        if open_axes:
            message = f"mesh.{open_axes[0]} = -1 needs a number of devices"
            raise _problem("--config", request.config, message, "set runtime.cpu_devices, or give --mesh")
        return dict(mesh)
    return parse_mesh(request.mesh) if request.mesh else None


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
        "source": str(planned.source),
        "destination": str(place),
        "step": planned.step,
        "arrays": len(planned.arrays),
        "bytes": planned.num_bytes,
        "bytes_per_device_before": planned.bytes_per_device(planned.before),
        "bytes_per_device_after": after,
        "read_amplification_before": planned.read_amplification({n: a.read_chunk for n, a in planned.stored.items()}),
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
