"""A sweep file: a base config, and a list or grid of overrides over it. No JAX."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from jaxpar.config import Config, ConfigError, Problem, config_to_toml, load_config
from jaxpar.config.errors import NO_VALUE
from jaxpar.config.keys import KEYS, SECTIONS, nearest_name
from jaxpar.config.layers import unknown_key
from jaxpar.config.schema import AXES
from jaxpar.config.toml_file import read_text, syntax_problem
from jaxpar.config.toml_text import toml_value
from jaxpar.plan.catalogue import Gpu, gpu_named
from jaxpar.plan.resolve import check

_SETTINGS: Mapping[str, tuple[type, object]] = {
    "base": (str, None),
    "out": (str, None),
    "overrides": (list, []),
    "steps": (int, 10),
    "warmup": (int, 3),
    "timeout_s": (float, 1800.0),
    "devices": (int, 0),
    "gpu": (str, ""),
}
"""Keys of [sweep]: type and default; None: must be given."""

_ACCEPTED = {str: "a string", int: "an integer of at least 0", float: "a number above 0", list: "a list of strings"}
_EXAMPLE = '[sweep] base = "configs/quickstart.toml", out = "runs/sweep"; [grid] "mesh.fsdp" = [2, 4, 8]'
_MAX_TRIALS = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """One short training."""

    name: str
    """For people: the overrides, or the name given."""
    overrides: tuple[str, ...]
    config: Config
    """As it would train in earnest."""
    objection: str | None
    """Why it cannot run."""
    short: Config
    """As it is run here: few steps, no validation, no checkpoints; ``run.dir`` is set when it starts."""
    fingerprint: str
    """Of all that its result depends on."""

    @property
    def num_devices(self) -> int:
        """Devices of its mesh; 0 if an axis takes the rest and nothing says how many there are."""
        sizes = [getattr(self.short.mesh, axis) for axis in AXES]
        return math.prod(sizes) if min(sizes) > 0 else self.short.runtime.cpu_devices


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """What a sweep file asks for."""

    out: Path
    timeout_s: float
    warmup: int
    """Steps that are run but not counted."""
    gpu: Gpu | None
    """Whose predictions are shown; None: the GPU that it runs on."""
    trials: tuple[Trial, ...]


def read_sweep(path: str | os.PathLike, *, fake_devices: bool) -> Sweep:
    """Reads a sweep file.

    Args:
        path: The file. Paths in it are relative to the working directory, as in a config.
        fake_devices: Whether this machine has no accelerator: a trial that does not say ``runtime.cpu_devices`` gets as
            many fake ones as its mesh has, or as ``sweep.devices`` says.

    Raises:
        ConfigError: Everything that is wrong with the file, with its keys and values, before anything runs. A mesh that
            is not legal is no such problem: it is a trial with an objection.
    """
    text = read_text(Path(path))
    try:
        tree = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError([syntax_problem(Path(path), text, error)]) from None
    problems: list[Problem] = []
    settings = _settings(path, tree, problems)
    named = list(_listed(path, tree.get("run", []), problems)) + list(_gridded(path, tree.get("grid", {}), problems))
    if not problems and not named:
        problems.append(_problem(path, "grid", NO_VALUE, "there is nothing to run", f"e.g. {_EXAMPLE}"))
    if len(named) > _MAX_TRIALS:
        problems.append(
            _problem(path, "grid", NO_VALUE, f"makes {len(named)} runs", f"leave at most {_MAX_TRIALS} of them")
        )
    gpu = None
    try:
        gpu = gpu_named(settings["gpu"]) if settings.get("gpu") else None
    except ConfigError as error:
        problems += [dataclasses.replace(problem, key=f"{path}: sweep.gpu") for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    trials = [_trial(path, settings, name, overrides, fake_devices, problems) for name, overrides in named]
    if problems:
        raise ConfigError(problems)
    return Sweep(
        out=Path(settings["out"]),
        timeout_s=settings["timeout_s"],
        warmup=settings["warmup"],
        gpu=gpu,
        trials=tuple(trials),
    )


def _settings(path: str | os.PathLike, tree: dict, problems: list[Problem]) -> dict:
    """The [sweep] table, checked, defaults filled in."""
    for name in tree:
        if name not in ("sweep", "grid", "run"):
            problems.append(_problem(path, name, tree[name], "no such table", "tables: [sweep], [grid], [[run]]"))
    table = tree.get("sweep", {})
    if not isinstance(table, dict):
        problems.append(_problem(path, "sweep", table, "must be a table", f"e.g. {_EXAMPLE}"))
        return {}
    for name, value in table.items():
        if name not in _SETTINGS:
            nearest = nearest_name(name, _SETTINGS)
            remedy = (f"did you mean {nearest}? " if nearest else "") + f"keys: {', '.join(_SETTINGS)}"
            problems.append(_problem(path, f"sweep.{name}", value, "unknown key", remedy))
        elif not _fits(value, _SETTINGS[name][0]):
            accepted = _ACCEPTED[_SETTINGS[name][0]]
            problems.append(_problem(path, f"sweep.{name}", value, f"not {accepted}", f"give {accepted}"))
    missing = [name for name, (_, default) in _SETTINGS.items() if default is None and name not in table]
    problems += [_problem(path, f"sweep.{name}", NO_VALUE, "is missing", f"e.g. {_EXAMPLE}") for name in missing]
    settings = {name: default for name, (_, default) in _SETTINGS.items()} | table
    counts = settings["steps"], settings["warmup"]
    if all(type(count) is int for count in counts) and counts[0] <= counts[1]:
        message = f"leaves no step to measure: the first {counts[1]} (sweep.warmup) are not counted"
        problems.append(_problem(path, "sweep.steps", counts[0], message, f"at least {counts[1] + 1}"))
    return settings


def _fits(value: object, kind: type) -> bool:
    if isinstance(value, bool):
        return False
    if kind is list:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if kind is float:
        return isinstance(value, int | float) and value > 0
    return isinstance(value, kind) and (kind is str or value >= 0)


def _listed(path: str | os.PathLike, runs: object, problems: list[Problem]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(name, overrides) of each [[run]]."""
    if not (isinstance(runs, list) and all(isinstance(run, dict) for run in runs)):
        problems.append(
            _problem(path, "run", runs, "must be [[run]] tables", 'e.g. [[run]] overrides = ["mesh.fsdp=8"]')
        )
        return
    for number, run in enumerate(runs, start=1):
        key, overrides, name = f"run {number}", run.get("overrides", []), run.get("name", "")
        for extra in run.keys() - {"name", "overrides"}:
            problems.append(_problem(path, f"{key}.{extra}", run[extra], "unknown key", "keys: name, overrides"))
        if not _fits(overrides, list):
            problems.append(
                _problem(path, f"{key}.overrides", overrides, "not a list of strings", 'e.g. ["mesh.fsdp=8"]')
            )
        elif not isinstance(name, str):
            problems.append(_problem(path, f"{key}.name", name, "not a string", "give a string"))
        else:
            yield name or " ".join(overrides) or "base", tuple(overrides)


def _gridded(path: str | os.PathLike, grid: object, problems: list[Problem]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(name, overrides) of each point of [grid]."""
    if not isinstance(grid, dict):
        problems.append(_problem(path, "grid", grid, "must be a table", 'e.g. "mesh.fsdp" = [2, 4, 8]'))
        return
    values = dict(_flat(grid))
    for key, choices in values.items():
        if key not in KEYS and key not in SECTIONS:
            problem = unknown_key(key, NO_VALUE, str(path))
            problems.append(dataclasses.replace(problem, key=f"{path}: grid.{key}"))
        elif not isinstance(choices, list) or not choices:
            problems.append(_problem(path, f"grid.{key}", choices, "not a list of values", "e.g. [2, 4, 8]"))
    if problems or not values:
        return
    for point in itertools.product(*values.values()):
        overrides = [override for key, value in zip(values, point, strict=True) for override in _overrides(key, value)]
        yield " ".join(overrides), tuple(overrides)


def _flat(table: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Dotted keys: ``"mesh.fsdp" = [...]`` and ``mesh.fsdp = [...]`` are the same to a reader."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _overrides(key: str, value: object) -> list[str]:
    """A value of the grid as arguments; a table, such as a whole mesh, sets its keys."""
    if isinstance(value, dict):
        return [override for name, item in value.items() for override in _overrides(f"{key}.{name}", item)]
    if isinstance(value, str):
        return [f"{key}={value}"]
    return [f"{key}={toml_value(tuple(value) if isinstance(value, list) else value)}"]


def _trial(
    path: str | os.PathLike,
    settings: dict,
    name: str,
    overrides: tuple[str, ...],
    fake_devices: bool,
    problems: list[Problem],
) -> Trial | None:
    changed = {override.partition("=")[0].strip() for override in overrides}
    shared = [override for override in settings["overrides"] if override.partition("=")[0].strip() not in changed]
    try:
        config = load_config(settings["base"], [*shared, *overrides])
    except ConfigError as error:
        problems += [
            dataclasses.replace(problem, message=f"{problem.message} ({path}, run {name!r})")
            for problem in error.problems
        ]
        return None
    short = _shortened(config, settings, fake_devices)
    identity = f"{config_to_toml(short)}\nwarmup {settings['warmup']}"
    return Trial(
        name=name,
        overrides=(*shared, *overrides),
        config=config,
        objection=_objection(short, fake_devices),
        short=short,
        fingerprint=hashlib.sha256(identity.encode()).hexdigest()[:16],
    )


def _shortened(config: Config, settings: dict, fake_devices: bool) -> Config:
    """The learning-rate schedule stays that of the whole run; nothing but steps is timed, and nothing is saved."""
    train, runtime, steps = config.train, config.runtime, settings["steps"]
    if fake_devices and not runtime.cpu_devices:
        sizes = [getattr(config.mesh, axis) for axis in AXES]
        devices = settings["devices"] or (math.prod(sizes) if min(sizes) > 0 else 0)
        runtime = dataclasses.replace(runtime, cpu_devices=devices)
    return dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, dir="trial"),
        train=dataclasses.replace(
            train, steps=max(steps, train.steps), stop_at=steps if steps < train.steps else None, eval_every=0,
            eval_batches=0,
        ),
        checkpoint=dataclasses.replace(
            config.checkpoint, every=0, every_minutes=0.0, final=False, keep_best=0, resume="auto"
        ),
        observe=dataclasses.replace(config.observe, sample_ids=False, tensorboard=False, wandb_project=None),
        runtime=runtime,
    )  # fmt: skip


def _objection(config: Config, fake_devices: bool) -> str | None:
    """Why a config cannot be run here, in one line."""
    if fake_devices and not config.runtime.cpu_devices:
        return "an axis of the mesh is -1, and nothing says how many fake devices there are: set sweep.devices"
    if config.runtime.num_processes > 1:
        return f"runtime.num_processes = {config.runtime.num_processes}: a sweep runs each trial in one process"
    try:
        check(config)
    except ConfigError as error:
        return "; ".join(" ".join(str(problem).split("\n")[0].split()) for problem in error.problems)
    return None


def _problem(path: str | os.PathLike, key: str, value: object, message: str, remedy: str) -> Problem:
    return Problem(key=f"{path}: {key}", value=value, message=message, remedy=remedy)
