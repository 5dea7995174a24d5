"""Between a run and its checkpoints: what is saved, where a run goes on, and whether it is still the same run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.checkpoint.paths import leaves_by_path, path_string
from jaxpar.checkpoint.store import Store
from jaxpar.config import Config, ConfigError, Problem
from jaxpar.data.dataset import TokenDataset
from jaxpar.data.order import Position
from jaxpar.program import Program
from jaxpar.state import TrainState

SECTIONS = ("params", "optimizer")


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
    """
    mode = config.checkpoint.resume
    own = Path(config.run.dir) / "checkpoints"
    step, skipped = _newest(own)
    if mode == "never" and step is not None:
        raise _problem(mode, f"{own} already has step {step}", "choose another run.dir, or resume = auto to go on")
    if step is not None or mode in ("auto", "never"):
        return None if step is None else (own, step)
    if mode == "must":
        raise _no_checkpoint(mode, own, skipped, "use resume = auto to start anew")
    directory = Path(mode)
    step, skipped = _newest(directory)
    if step is None:
        inside = directory / "checkpoints"
        remedy = f"checkpoint.resume = {inside}" if inside.is_dir() else "name the checkpoints directory of a run"
        raise _no_checkpoint(mode, directory, skipped, remedy)
    return directory, step


def _newest(directory: Path) -> tuple[int | None, list[tuple[int, str]]]:
    with Store(directory) as store:
        return store.latest(), store.skipped()


def _no_checkpoint(mode: str, directory: Path, skipped: list[tuple[int, str]], remedy: str) -> ConfigError:
    why = "".join(f"; step {number} was passed over: {reason}" for number, reason in skipped)
    return _problem(mode, f"there is no complete checkpoint in {directory}{why}", remedy)


def _problem(value: str, message: str, remedy: str) -> ConfigError:
    return ConfigError([Problem(key="checkpoint.resume", value=value, message=message, remedy=remedy)])


def stored_shapes(program: Program, sections: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """Shapes on disk of the leaves whose vocabulary is padded in memory: parameters, and moments that mirror them."""
    vocab_size = program.config.model.vocab_size
    vocab_dims = {
        path: [dim for dim, axis in enumerate(axes.axes) if axis == "vocab"]
        for path, axes in leaves_by_path(
            jax.tree.map(_Axes, program.definition.logical_axes, is_leaf=_is_axes), "params"
        ).items()
    }
    shapes = {}
    for section, tree in sections.items():
        for path, leaf in leaves_by_path(tree, section).items():
            dims = next((d for param, d in vocab_dims.items() if path[-len(param) :] == param), [])
            if dims:
                shape = tuple(vocab_size if dim in dims else size for dim, size in enumerate(leaf.shape))
                shapes[path_string(section, path)] = shape
    return shapes


class _Axes:
    """A tuple of logical axes as one leaf of a pytree."""

    def __init__(self, axes: tuple[str, ...]):
        self.axes = axes


def _is_axes(value: object) -> bool:
    return isinstance(value, tuple)


def save(store: Store, program: Program, state: TrainState, place: Place, dataset: TokenDataset) -> None:
    """Start saving the whole state of the run, asynchronously."""
    config = program.config
    sections = {name: getattr(state, name) for name in SECTIONS}
    metadata = {
        "jaxpar": jaxpar.__version__,
        "position": dataclasses.asdict(place.position),
        "tokens_seen": place.tokens_seen,
        "seed": config.run.seed,
        "dataset": dict(dataset.identity),
        "mesh": dict(program.plan.mesh),
        "config": dataclasses.asdict(config),
    }
    store.save(place.step, sections, metadata, stored_shapes=stored_shapes(program, sections))


def restore(store: Store, step: int, program: Program) -> tuple[TrainState, Place]:
    """State and place of a checkpoint that ``check_same_run`` has let pass, every leaf on its target sharding.

    Raises:
        CheckpointError: leaves do not fit, or cannot be read.
    """
    metadata = store.metadata(step)
    abstract = {name: getattr(program.abstract_state, name) for name in SECTIONS}
    sections = store.restore(step, abstract, stored_shapes=stored_shapes(program, abstract))
    count = jax.device_put(jnp.int32(step), NamedSharding(program.mesh, P()))
    state = TrainState(step=count, **sections)
    position = Position(**metadata["position"])
    return state, Place(step=step, position=position, tokens_seen=metadata["tokens_seen"])


def check_same_run(directory: Path, step: int, config: Config, dataset: TokenDataset) -> None:
    """Refuses to go on from a checkpoint with another model, or with data in another order. Reads no arrays.

    A data position only means something in the order that it was counted in, and weights only in their model.

    Raises:
        ConfigError: names every key that has changed.
        CheckpointError: the metadata cannot be read.
    """
    with Store(directory) as store:
        metadata = store.metadata(step)
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
    if problems:
        raise ConfigError(problems)


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
