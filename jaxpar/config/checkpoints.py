"""The model that a jaxpar checkpoint was written by, read from its metadata. No JAX."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from jaxpar.config.errors import ConfigError, Problem

JAXPAR_PREFIX = "jaxpar:"
"""Marks a jaxpar checkpoint in ``model.init_from``."""

METADATA_FILE = "_CHECKPOINT_METADATA"
"""JSON file of every step directory; what jaxpar writes is under ``custom_metadata``."""

_OF_THE_RUN = ("preset", "init_from", "init_std", "vocab_multiple")
"""Model settings that say how that run began or lay in memory, and nothing about the weights."""


def find_metadata(path: str) -> Path | None:
    """The metadata file of a step directory, or of the newest step of a run or checkpoints directory; None: none.

    Every step of a run has the same model, so whether this one is whole does not matter here.
    """
    if not path:
        return None
    if (Path(path) / METADATA_FILE).is_file():
        return Path(path) / METADATA_FILE
    for directory in (Path(path), Path(path) / "checkpoints"):
        entries = directory.iterdir() if directory.is_dir() else ()
        steps = [int(entry.name) for entry in entries if entry.name.isdecimal() and (entry / METADATA_FILE).is_file()]
        if steps:
            return directory / str(max(steps)) / METADATA_FILE
    return None


def read_checkpoint_model(path: str) -> dict[str, object]:
    """``model.*`` settings of a checkpoint: setting name -> value; ``rope_scaling`` is a nested dict or None.

    Args:
        path: Of a run, its checkpoints or one step.

    Raises:
        ConfigError: There is no checkpoint, or it does not say what model it holds.
    """
    file = find_metadata(path)
    if file is None:
        raise _problem(path, "there is no checkpoint", "name a run, its checkpoints directory or one step of it")
    try:
        model = json.loads(file.read_text(encoding="utf-8"))["custom_metadata"]["config"]["model"]
    except OSError as error:
        raise _problem(path, f"{file} cannot be read: {error.strerror}", "check its permissions") from error
    except (ValueError, KeyError, TypeError) as error:
        message = f"{file} does not say what model it holds"
        raise _problem(path, message, "give the checkpoint of a jaxpar run") from error
    if not isinstance(model, Mapping):
        raise _problem(path, f"{file} does not say what model it holds", "give the checkpoint of a jaxpar run")
    return {name: value for name, value in model.items() if name not in _OF_THE_RUN}


def _problem(path: str, message: str, remedy: str) -> ConfigError:
    return ConfigError([Problem(key="model.init_from", value=f"{JAXPAR_PREFIX}{path}", message=message, remedy=remedy)])
