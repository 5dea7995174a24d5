"""Where metrics are shown besides the run's own files: TensorBoard and Weights & Biases, both optional packages."""

from __future__ import annotations

import importlib.util
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from jaxpar.config.errors import ConfigError, Problem
from jaxpar.config.schema import ObserveConfig


class MetricsSink(Protocol):
    """Takes the scalars of a step, named ``train/loss`` and the like; they may be NaN."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def check_sinks(observe: ObserveConfig) -> None:
    """Raises ConfigError, naming the extra to install, if a sink's package is missing; imports neither package."""
    problems = [
        Problem(
            key=f"observe.{field}",
            value=getattr(observe, field),
            message=f"the package {package} is not installed",
            remedy=f"pip install 'jaxpar[{extra}]', or leave observe.{field} out",
        )
        for field, package, extra in (
            ("tensorboard", "tensorboardX", "tensorboard"),
            ("wandb_project", "wandb", "wandb"),
        )
        if getattr(observe, field) and importlib.util.find_spec(package) is None
    ]
    if problems:
        raise ConfigError(problems)


def open_sinks(
    observe: ObserveConfig,
    directory: Path,
    *,
    resume_step: int | None,
    config: Mapping[str, object] | None,
) -> tuple[MetricsSink, ...]:
    """Opens the sinks that ``observe`` asks for, for the run in ``directory``; see RunMetrics for the arguments."""
    check_sinks(observe)
    sinks: list[MetricsSink] = []
    if observe.tensorboard:
        sinks.append(TensorBoardSink(directory, resume_step=resume_step))
    if observe.wandb_project is not None:
        sinks.append(WandbSink(observe.wandb_project, directory, resume_step=resume_step, config=config))
    return tuple(sinks)


class TensorBoardSink:
    """TensorBoard event files under ``directory/tensorboard``."""

    def __init__(self, directory: Path, *, resume_step: int | None):
        from tensorboardX import SummaryWriter

        # purge_step tells TensorBoard to forget what an earlier process wrote for steps that come again.
        purge_step = 0 if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=purge_step, flush_secs=10)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """One Weights & Biases run per run directory; a resumed run goes on in the same one."""

    def __init__(self, project: str, directory: Path, *, resume_step: int | None, config: Mapping[str, object] | None):
        import wandb

        id_file = directory / "wandb_id.txt"
        known = id_file.exists() and resume_step is not None
        run_id = id_file.read_text().strip() if known else secrets.token_hex(8)
        self._run = wandb.init(
            project=project,
            id=run_id,
            resume="allow",
            dir=os.fspath(directory),
            config=dict(config or {}),
            name=directory.name,
        )
        id_file.write_text(run_id + "\n")
        # Our own x axis: the built-in step refuses to go back, so steps trained again after a crash would be lost.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log({"step": step, **scalars})

    def close(self) -> None:
        self._run.finish()
