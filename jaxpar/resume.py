"""Between a run and its checkpoints: what is saved, where a run goes on, and whether it is still the same run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.checkpoint import commit
from jaxpar.checkpoint.agreement import damage_for_all, text_of_first_process
from jaxpar.checkpoint.errors import CheckpointError, DamagedCheckpointError
from jaxpar.checkpoint.paths import leaves_by_path, of_its_param, path_string
from jaxpar.checkpoint.places import CHECKPOINTS, choose_step, locate
from jaxpar.checkpoint.store import Store
from jaxpar.config import Config, ConfigError, Problem
from jaxpar.data.dataset import TokenDataset
from jaxpar.data.order import Position
from jaxpar.program import Program
from jaxpar.state import TrainState

SECTIONS = ("params", "optimizer")
"""What every state of a run has; ``optim.ema_decay`` adds ``ema``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """How far a run has come."""

    step: int = 0
    """Optimizer steps done."""
    position: Position = dataclasses.field(default_factory=Position)
    """Next sample of the data order."""
    tokens_seen: int = 0
    """Weighted tokens trained on."""


def find_checkpoint(config: Config) -> tuple[Path, int] | None:
    """Directory and step to go on from, by ``checkpoint.resume``; None for a fresh start.

    A run that was started from another directory and has saved since goes on from its own checkpoints: the command
    that was interrupted is the command that goes on.

    Raises:
        ConfigError: ``never`` with checkpoints in the way, ``must`` or a path without any.
        DamagedCheckpointError: ``auto``, and all that there were are damaged.
    """
    mode = config.checkpoint.resume
    own = Path(config.run.dir) / CHECKPOINTS
    steps, skipped = commit.scan(own)
    if mode == "never" and steps:
        raise _problem(mode, f"{own} already has step {steps[-1]}", "choose another run.dir, or resume = auto to go on")
    if mode == "auto" and not steps and (damaged := commit.damaged_steps(own)):
        reasons = "".join(f"\n  step {number}: {why}" for number, why in skipped)
        raise DamagedCheckpointError(
            f"every checkpoint in {own} is damaged ({', '.join(damaged)}); the run does not start anew over them"
            f"{reasons}"
            "\n-> go on from another run with checkpoint.resume=PATH, start anew in another run.dir, or move them away"
        )
    if steps or mode in ("auto", "never"):
        return (own, steps[-1]) if steps else None
    if mode == "must":
        raise _no_checkpoint(mode, own, skipped, "use resume = auto to start anew")
    directory, step = locate(mode)
    steps, skipped = commit.scan(directory)
    if step is not None and step not in steps:
        why = dict(skipped).get(step, "it does not exist")
        raise _problem(mode, f"step {step} is not a complete checkpoint: {why}", f"complete steps: {steps or 'none'}")
    if not steps:
        raise _no_checkpoint(mode, directory, skipped, "name a run, its checkpoints directory or one step")
    return directory, steps[-1] if step is None else step


def unused_path(config: Config, found: tuple[Path, int] | None) -> str | None:
    """What to say of a path in ``checkpoint.resume`` that is not used, because the run has checkpoints of its own."""
    mode = config.checkpoint.resume
    if mode in ("auto", "never", "must") or found is None or found[0].absolute() == locate(mode)[0].absolute():
        return None
    return f"checkpoint.resume = {mode} is not used: the run goes on from step {found[1]} of its own, {found[0]}"


def find_older(config: Config, directory: Path, step: int) -> tuple[Path, int] | None:
    """The complete step before a damaged one, to be tried instead; None if there is none or one step was asked for."""
    if locate(config.checkpoint.resume)[1] is not None and directory != Path(config.run.dir) / CHECKPOINTS:
        return None
    older = [other for other in commit.scan(directory)[0] if other < step]
    return (directory, older[-1]) if older else None


def agree(found: tuple[Path, int] | None) -> tuple[Path, int] | None:
    """What process 0 found: file systems that are shared over a network show new files at different moments."""
    if jax.process_count() == 1:
        return found
    step, _, path = text_of_first_process(f"{found[1]} {found[0]}" if found else "").partition(" ")
    return (Path(path), int(step)) if step else None


def _no_checkpoint(mode: str, directory: Path, skipped: list[tuple[int, str]], remedy: str) -> ConfigError:
    why = "".join(f"; step {number} was passed over: {reason}" for number, reason in skipped)
    return _problem(mode, f"there is no complete checkpoint in {directory}{why}", remedy)


def _problem(value: str, message: str, remedy: str) -> ConfigError:
    return ConfigError([Problem(key="checkpoint.resume", value=value, message=message, remedy=remedy)])


def stored_shapes(program: Program, sections: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """Shapes on disk of the leaves that are padded in memory: parameters, and moments that mirror them.

    The vocabulary is, and the layers are where the stages of a pipeline do not divide them.
    """
    vocab_size, num_layers = program.true_vocab_size, program.config.model.num_layers
    if vocab_size is None:
        return {}
    true_sizes = {"vocab": vocab_size}
    if num_layers % program.plan.mesh["pipeline"]:
        true_sizes["layers"] = num_layers
    padded_dims = {
        path: {dim: true_sizes[axis] for dim, axis in enumerate(axes) if axis in true_sizes}
        for path, axes in program.definition.axes_by_path.items()
    }
    shapes = {}
    for section, tree in sections.items():
        for path, leaf in leaves_by_path(tree, section).items():
            if true := of_its_param(path, padded_dims):
                # A mean over the vocabulary keeps the dim, with size 1.
                shape = tuple(true[dim] if dim in true and size > 1 else size for dim, size in enumerate(leaf.shape))
                shapes[path_string(section, path)] = shape
    return shapes


def save(
    store: Store,
    program: Program,
    state: TrainState,
    place: Place,
    dataset: TokenDataset,
    metrics: Mapping[str, float | None],
) -> None:
    """Start saving the whole state of the run, asynchronously."""
    config = program.config
    sections = state.sections
    known = {name: value for name, value in metrics.items() if value is not None and math.isfinite(value)}
    metadata = {
        "jaxpar": jaxpar.__version__,
        "position": dataclasses.asdict(place.position),
        "tokens_seen": place.tokens_seen,
        "seed": config.run.seed,
        "dataset": dict(dataset.identity),
        "model_fingerprint": model_fingerprint(dataclasses.asdict(config.model)),
        "num_params": program.plan.num_params,
        "mesh": dict(program.plan.mesh),
        "processes": jax.process_count(),
        "metrics": known,
        "config": dataclasses.asdict(config),
    }
    store.save(place.step, sections, metadata, stored_shapes=stored_shapes(program, sections), metrics=known)


def restore(store: Store, step: int, program: Program) -> tuple[TrainState, Place]:
    """State and place of a checkpoint that ``check_same_run`` has let pass, every leaf on its target sharding.

    Raises:
        CheckpointError: leaves do not fit.
        DamagedCheckpointError: they cannot be read, or are not what was saved; raised by all processes alike.
    """
    with damage_for_all():
        metadata = store.metadata(step)
    abstract = program.abstract_state.sections
    sections = store.restore(
        step,
        abstract,
        stored_shapes=stored_shapes(program, abstract),
        verify=program.config.checkpoint.verify,
    )
    count = jax.device_put(jnp.int32(step), NamedSharding(program.mesh, P()))
    state = TrainState(step=count, **sections)
    position = Position(**metadata["position"])
    return state, Place(step=step, position=position, tokens_seen=metadata["tokens_seen"])


def restore_params(path: str, program: Program) -> tuple[dict, str]:
    """Parameters alone, of a run, its checkpoints or one step, for a run of its own; and what to tell the user.

    Weights of another float type than ``precision.params`` are converted.

    Raises:
        CheckpointError: there is no complete step, its leaves do not fit this model, or are damaged.
    """
    directory, step = agree(choose_step(path))
    abstract = {"params": program.abstract_state.params}
    with Store(directory) as store:
        stored = store.leaves(step)
        others = {name.partition("/")[0] for name in stored} - {"params"}
        sections = store.restore(
            step,
            abstract,
            stored_shapes=stored_shapes(program, abstract),
            ignore=others,
            verify=program.config.checkpoint.verify,
            cast=True,
        )
    dtypes = {str(leaf.dtype) for name, leaf in stored.items() if name.startswith("params/")}
    wanted = program.config.precision.params
    converted = f" (converted from {', '.join(sorted(dtypes))} to {wanted})" if dtypes != {wanted} else ""
    return sections["params"], f"initial weights from step {step} of {directory}{converted}"


def model_fingerprint(model: Mapping[str, object]) -> str:
    """Hash of the model settings that decide what weights mean; equal for runs that can share them."""
    lasting = {name: value for name, value in model.items() if name not in _FREE_MODEL_KEYS}
    return hashlib.sha256(json.dumps(lasting, sort_keys=True).encode()).hexdigest()


def check_same_run(directory: Path, step: int, config: Config, dataset: TokenDataset) -> None:
    """Refuses to go on from a checkpoint with another model, or with data in another order. Reads no arrays.

    A data position only means something in the order that it was counted in, and weights only in their model.

    Raises:
        ConfigError: names every key that has changed.
        CheckpointError: the metadata cannot be read.
    """
    with Store(directory) as store:
        metadata = store.metadata(step)
        sections = {name.partition("/")[0] for name in store.leaves(step)}
    if missing := [section for section in SECTIONS if section not in sections]:
        raise CheckpointError(
            f"step {step} of {directory} is not the state of a run: missing section: {', '.join(missing)}\n"
            f"-> to start a new run from its weights: model.init_from=jaxpar:{directory}"
        )
    before = _lasting(metadata["config"], metadata["dataset"])
    now = _lasting(dataclasses.asdict(config), dataset.identity)
    problems = [
        Problem(
            key=key,
            value=_shown(now.get(key)),
            message=f"step {step} of {directory} was trained with {_shown(before.get(key))!r}",
            remedy=f"{_REMEDIES.get(key, 'set it back')}, or start a new run (another run.dir)",
        )
        for key in before | now
        if before.get(key) != now.get(key)
    ]
    problems += _average_problems(config, "ema" in sections, f"step {step} of {directory}")
    if problems:
        raise ConfigError(problems)


def _average_problems(config: Config, is_stored: bool, what: str) -> list[Problem]:
    """The average of a run covers all of its steps, or none."""
    decay = config.optim.ema_decay
    if (decay > 0) == is_stored:
        return []
    message = f"{what} has an average of the params, which would be lost" if is_stored else f"{what} has none to go on"
    remedy = "give the decay that it was trained with" if is_stored else "set optim.ema_decay=0"
    remedy += ", or start a new run from its weights with model.init_from"
    return [Problem(key="optim.ema_decay", value=decay, message=message, remedy=remedy)]


_FREE_MODEL_KEYS = {"preset", "init_from", "init_std", "vocab_multiple"}
"""Decide how a run starts, or how arrays are padded in memory; nothing of what a checkpoint holds."""

_DATA_KEYS = {
    "source": "data.source",
    "content": "data (rows)",
    "tokenizer": "data.tokenizer",
    "pack": "data.pack",
    "seq_len": "data.seq_len",
    "weights": "data.weights",
    "seed": "run.seed",
    "vocab_size": "model.vocab_size",
}
"""Config keys of the parts of a dataset's identity."""

_REMEDIES = {
    "data (rows)": "give it the same files, or the same data.num_samples and data.validation_fraction",
    "data.tokenizer": "give it the same tokenizer",
}


def _lasting(config: Mapping, identity: Mapping) -> dict[str, object]:
    """What a run keeps from its first step to its last, by config key."""
    model = {f"model.{name}": value for name, value in config["model"].items() if name not in _FREE_MODEL_KEYS}
    data = {_DATA_KEYS.get(part, f"data ({part})"): value for part, value in identity.items()}
    return {
        **model,
        **data,
        "precision.params": config["precision"]["params"],
        "optim.name": config["optim"]["name"],
        "run.seed": config["run"]["seed"],
        "data.shuffle": config["data"]["shuffle"],
    }


def _shown(value: object) -> object:
    """Hashes by their beginning."""
    return value[:12] if isinstance(value, str) and len(value) == 64 else value
