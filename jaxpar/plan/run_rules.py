"""Rules of a run: batch, data, schedule, processes, start and resume."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

from jaxpar.config.checkpoints import JAXPAR_PREFIX, find_metadata
from jaxpar.config.dims import with_derived_dims
from jaxpar.config.errors import Problem
from jaxpar.config.huggingface import PREFIX, SHAPE_SETTINGS
from jaxpar.config.pretrained import read_pretrained
from jaxpar.config.schema import ModelConfig, OptimConfig
from jaxpar.plan.facts import BATCH_AXES, Facts

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\s\[\]/]+):(\d{1,5})")
_RESUME_WORDS = ("auto", "never", "must")


def batch_divides(facts: Facts) -> Iterator[Problem]:
    """Every device gets the same number of rows of every microbatch."""
    train, shards = facts.config.train, facts.axes_product(BATCH_AXES)
    if shards is None:
        return
    rows, unit = train.global_batch_size, shards * train.microbatches
    if rows % unit == 0:
        return
    if train.microbatches > rows:
        what = f"has fewer rows than train.microbatches = {train.microbatches}"
    elif rows < shards:
        what = f"has fewer rows than the {shards} batch shards ({facts.describe_axes(BATCH_AXES)})"
    else:
        what = (
            f"{rows} rows (batch dim 0) do not divide by {shards} batch shards ({facts.describe_axes(BATCH_AXES)}) "
            f"x {train.microbatches} microbatches = {unit} (remainder {rows % unit})"
        )
    lower = rows // unit * unit
    seq_len = facts.config.data.seq_len
    working = " or ".join(f"{size} ({size * seq_len} tokens a step)" for size in (lower, lower + unit) if size)
    yield Problem(
        key="train.global_batch_size",
        value=rows,
        message=what,
        remedy=f"set train.global_batch_size to {working}, or change the mesh or train.microbatches",
    )


def rows_fill_a_batch(facts: Facts) -> Iterator[Problem]:
    """There is at least one step in an epoch."""
    if facts.num_rows is None:
        return
    config, batch = facts.config, facts.config.train.global_batch_size
    is_synthetic = config.data.source == "synthetic"
    if facts.num_rows < 1:
        yield Problem(
            key="data.paths" if not is_synthetic else "data.num_samples",
            value=config.data.num_samples if is_synthetic else config.data.paths,
            message=f"no training row of {config.data.seq_len} tokens is left",
            remedy="give more data, a smaller data.seq_len or a smaller data.validation_fraction",
        )
    elif facts.num_rows < batch and config.data.last_batch == "drop":
        yield Problem(
            key="train.global_batch_size",
            value=batch,
            message=f"the data has {facts.num_rows} rows of {config.data.seq_len} tokens: {facts.num_rows} < {batch}, "
            "so every epoch would be dropped as an incomplete batch",
            remedy=f"at most {facts.num_rows} rows a batch, more data, a smaller data.seq_len, "
            'or data.last_batch="pad"',
        )


def data_paths_match_source(facts: Facts) -> Iterator[Problem]:
    """Every source but synthetic needs files; synthetic takes none."""
    data = facts.config.data
    if data.source == "synthetic" and data.paths:
        yield Problem(
            key="data.paths",
            value=data.paths,
            message='data.source = "synthetic" would not read these files',
            remedy='set data.source="text", or remove data.paths',
        )
    elif data.source != "synthetic" and not data.paths:
        yield Problem(
            key="data.paths",
            value=data.paths,
            message=f'data.source = "{data.source}" needs files',
            remedy=_PATHS_EXAMPLES[data.source],
        )


_PATHS_EXAMPLES = {
    "text": 'e.g. data.paths=["corpus/*.txt"] or data.paths=["stdlib:*.py"]',
    "store": "give the directories that `jaxpar data prepare` has written",
    "tokens": 'e.g. data.paths=["tokens/*.bin"]',
    "sft": 'e.g. data.paths=["conversations/*.jsonl"]',
}


def tokenizer_exists(facts: Facts) -> Iterator[Problem]:
    """A tokenizer that is not built in is a file."""
    tokenizer = facts.config.data.tokenizer
    if tokenizer != "bytes" and not Path(tokenizer).is_file():
        yield Problem(
            key="data.tokenizer",
            value=tokenizer,
            message=f"no such file (looked in {Path.cwd()})",
            remedy='give the path of a tokenizer.json, or "bytes"',
        )


def validation_has_data(facts: Facts) -> Iterator[Problem]:
    """Validation needs a held-out part."""
    config = facts.config
    if config.train.eval_every and not config.data.validation_fraction:
        yield Problem(
            key="data.validation_fraction",
            value=config.data.validation_fraction,
            message=f"train.eval_every = {config.train.eval_every} asks for validation, but nothing is held out for it",
            remedy="set data.validation_fraction, e.g. 0.05, or train.eval_every=0",
        )


def wsd_decay_steps(optim: OptimConfig, num_steps: int) -> int:
    """Steps of the final decay of a wsd schedule of ``num_steps`` steps."""
    return optim.decay_steps or math.ceil(num_steps / 10)


def steps_in_order(facts: Facts) -> Iterator[Problem]:
    """The run ends, warms up and decays inside its own steps."""
    train, optim = facts.config.train, facts.config.optim
    if train.stop_at is not None and train.stop_at > train.steps:
        yield Problem(
            key="train.stop_at",
            value=train.stop_at,
            message=f"is after the last step, train.steps = {train.steps}",
            remedy="stop_at ends a run early; to train longer raise train.steps",
        )
    if optim.warmup_steps > train.steps:
        yield Problem(
            key="optim.warmup_steps",
            value=optim.warmup_steps,
            message=f"is more than train.steps = {train.steps}, so the peak learning rate would never be reached",
            remedy=f"set optim.warmup_steps to at most {train.steps}",
        )
    elif optim.schedule == "wsd":
        decay_steps = wsd_decay_steps(optim, train.steps)
        if optim.warmup_steps + decay_steps > train.steps:
            yield Problem(
                key="optim.decay_steps",
                value=optim.decay_steps,
                message=f"warm-up {optim.warmup_steps} + decay {decay_steps} steps = "
                f"{optim.warmup_steps + decay_steps} is more than train.steps = {train.steps}",
                remedy="shorten the warm-up or the decay, or raise train.steps",
            )


def profile_is_reached(facts: Facts) -> Iterator[Problem]:
    """The profiled window is among the steps of the run."""
    start, steps = facts.config.observe.profile_start, facts.config.train.steps
    if start > steps:
        yield Problem(
            key="observe.profile_start",
            value=start,
            message=f"comes after the last step, train.steps = {steps}",
            remedy=f"set observe.profile_start from 1 to {steps}, or to 0 for no profile",
        )


def processes_find_each_other(facts: Facts) -> Iterator[Problem]:
    """Several processes need a coordinator, and a number each."""
    runtime = facts.config.runtime
    if runtime.process_id >= runtime.num_processes:
        yield Problem(
            key="runtime.process_id",
            value=runtime.process_id,
            message=f"processes are numbered from 0 to {runtime.num_processes - 1} "
            f"(runtime.num_processes = {runtime.num_processes})",
            remedy="give each process its own number, or raise runtime.num_processes",
        )
    if runtime.num_processes > 1 and runtime.coordinator is None:
        yield Problem(
            key="runtime.coordinator",
            value=None,
            message=f"{runtime.num_processes} processes need an address to meet at",
            remedy="set it to host:port of process 0, the same in all, e.g. runtime.coordinator=127.0.0.1:9876",
        )
    address = _ADDRESS.fullmatch(runtime.coordinator or "")
    if runtime.coordinator is not None and not (address and 1 <= int(address[2]) <= 65535):
        yield Problem(
            key="runtime.coordinator",
            value=runtime.coordinator,
            message="not host:port with a port from 1 to 65535",
            remedy="e.g. runtime.coordinator=127.0.0.1:9876, or [::1]:9876",
        )


def paths_are_on_file_systems(facts: Facts) -> Iterator[Problem]:
    """Object stores are refused by name: a path such as gs://bucket/run would become a local directory "gs:"."""
    config = facts.config
    for key, value in (
        ("run.dir", config.run.dir),
        ("checkpoint.resume", config.checkpoint.resume),
        ("model.init_from", config.model.init_from or ""),
    ):
        if "://" in value:
            yield Problem(
                key=key,
                value=value,
                message="object stores are not supported",
                remedy="give a path on a file system that all processes share, e.g. a mounted bucket",
            )


def run_directory_usable(facts: Facts) -> Iterator[Problem]:
    """A run has a directory of its own."""
    directory = facts.config.run.dir
    if not directory.strip() or Path(directory).is_file():
        yield Problem(
            key="run.dir",
            value=directory,
            message="is a file" if directory.strip() else "no directory is named",
            remedy="name a directory, e.g. run.dir=runs/first; it is created",
        )


def resume_exists(facts: Facts) -> Iterator[Problem]:
    """A checkpoints directory that is named is there."""
    resume = facts.config.checkpoint.resume
    if "://" in resume:
        return
    if resume not in _RESUME_WORDS and not Path(resume).is_dir():
        yield Problem(
            key="checkpoint.resume",
            value=resume,
            message=f"no such directory (looked in {Path.cwd()})",
            remedy="auto, never, must, or the path of a run or its checkpoints, e.g. runs/first",
        )


def best_checkpoints_have_a_metric(facts: Facts) -> Iterator[Problem]:
    """Checkpoints compete by a validation loss only if there is one when they are saved."""
    checkpoint, eval_every = facts.config.checkpoint, facts.config.train.eval_every
    if not checkpoint.keep_best or checkpoint.best_metric != "eval_loss":
        return
    if eval_every and checkpoint.every and checkpoint.every % eval_every == 0:
        return
    nearest = max(1, checkpoint.every // eval_every) * eval_every if eval_every else 0
    yield Problem(
        key="checkpoint.keep_best",
        value=checkpoint.keep_best,
        message=f"compares eval_loss, but checkpoint.every = {checkpoint.every} saves at steps without validation "
        f"(train.eval_every = {eval_every})",
        remedy=(f"set checkpoint.every={nearest}" if nearest else "set train.eval_every and checkpoint.every alike")
        + ', or checkpoint.best_metric="loss"',
    )


def init_from_exists(facts: Facts) -> Iterator[Problem]:
    """Weights to start from are there."""
    init_from = facts.config.model.init_from
    if init_from is None or "://" in init_from:
        return
    remedy = (
        "hf:DIR with config.json and *.safetensors, or jaxpar:DIR of a run, its checkpoints or one step; "
        "`model.init_from=none` starts from random weights"
    )
    if init_from.startswith(JAXPAR_PREFIX):
        if find_metadata(init_from.removeprefix(JAXPAR_PREFIX)) is not None:
            return
        message = f"there is no checkpoint (looked in {Path.cwd()})"
    elif not init_from.startswith(PREFIX):
        message = "not a source of weights"
    elif missing := _missing_weights(init_from.removeprefix(PREFIX)):
        message = missing
    else:
        return
    yield Problem(key="model.init_from", value=init_from, message=message, remedy=remedy)


def init_from_fits(facts: Facts) -> Iterator[Problem]:
    """Weights to start from have the model's shapes: ``load_config`` takes these from them, Python code may not."""
    init_from = facts.config.model.init_from
    if init_from is None or "://" in init_from or any(init_from_exists(facts)):
        return
    settings = read_pretrained(init_from)
    theirs = with_derived_dims(ModelConfig(**settings))
    for name in sorted(SHAPE_SETTINGS & settings.keys()):
        ours, stored = getattr(facts.model, name), getattr(theirs, name)
        if ours != stored and not (name == "vocab_size" and not ours):  # 0: the tokenizer's, which is not read yet
            remedy = f"set it to {stored!r}, or let jaxpar.load_config take the model from its weights"
            yield Problem(key=f"model.{name}", value=ours, message=f"{init_from} has {stored!r}", remedy=remedy)


def _missing_weights(name: str) -> str | None:
    directory = Path(name)
    if not name or not directory.is_dir():
        return f"no such directory (looked in {Path.cwd()})"
    if not (directory / "config.json").is_file():
        return f"{directory} has no config.json"
    if not any(directory.glob("*.safetensors")):
        return f"{directory} has no *.safetensors"
    return None
