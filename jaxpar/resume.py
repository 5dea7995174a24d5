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

    Raises:
        ConfigError: ``never`` with checkpoints in the way, ``must`` or a path without any.
    """
    mode = config.checkpoint.resume
    own = Path(config.run.dir) / "checkpoints"
    directory = own if mode in ("auto", "never", "must") else Path(mode)
    with Store(directory) as store:
        step, skipped = store.latest(), store.skipped()
    if mode == "never" and step is not None:
        raise _problem(mode, f"{own} already has step {step}", "choose another run.dir, or resume = auto to go on")
    if step is None and mode not in ("auto", "never"):
        why = "".join(f"; step {number} was passed over: {reason}" for number, reason in skipped)
        raise _problem(mode, f"there is no complete checkpoint in {directory}{why}", "use resume = auto to start anew")
    return None if step is None else (directory, step)


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


def restore(store: Store, step: int, program: Program, dataset: TokenDataset) -> tuple[TrainState, Place]:
    """State and place of a checkpoint, every leaf on its target sharding.

    Raises:
        ConfigError: the data, its order or the seed is not what the checkpoint was trained on.
        CheckpointError: leaves do not fit.
    """
    metadata = store.metadata(step)
    check_same_data(metadata, program.config, dataset)
    abstract = {name: getattr(program.abstract_state, name) for name in SECTIONS}
    sections = store.restore(step, abstract, stored_shapes=stored_shapes(program, abstract))
    count = jax.device_put(jnp.int32(step), NamedSharding(program.mesh, P()))
    state = TrainState(step=count, **sections)
    position = Position(**metadata["position"])
    return state, Place(step=step, position=position, tokens_seen=metadata["tokens_seen"])


def check_same_data(metadata: Mapping, config: Config, dataset: TokenDataset) -> None:
    """A data position only means something in the order that it was counted in."""
    before, now = metadata["dataset"], dict(dataset.identity)
    problems = [
        Problem(
            key=f"data ({part})",
            value=now.get(part),
            message=f"the checkpoint was trained on {before.get(part)!r}",
            remedy="train on the same data, or start a new run (another run.dir)",
        )
        for part in sorted(before.keys() | now.keys())
        if before.get(part) != now.get(part)
    ]
    if metadata["seed"] != config.run.seed:
        problems.append(
            Problem(
                key="run.seed",
                value=config.run.seed,
                message=f"the checkpoint's data order comes from seed {metadata['seed']}",
                remedy=f"set run.seed = {metadata['seed']}, or start a new run (another run.dir)",
            )
        )
    if (before_shuffle := metadata["config"]["data"]["shuffle"]) != config.data.shuffle:
        problems.append(
            Problem(
                key="data.shuffle",
                value=config.data.shuffle,
                message=f"the checkpoint's data order was made with shuffle = {before_shuffle}",
                remedy=f"set data.shuffle = {str(before_shuffle).lower()}, or start a new run (another run.dir)",
            )
        )
    if problems:
        raise ConfigError(problems)
