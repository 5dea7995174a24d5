"""Compiles in a process of its own, because the compiler can abort, and takes gigabytes. No JAX here."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import tempfile
from pathlib import Path

from jaxpar.config import ConfigError, Problem, config_to_toml
from jaxpar.config.schema import CheckpointConfig, Config, DataConfig, ObserveConfig, RunConfig, RuntimeConfig
from jaxpar.experiments.children import Ended, environment, run_child
from jaxpar.experiments.compile.outcome import CompileOutcome
from jaxpar.experiments.compile.targets import SIDE_DIRECTORY, Target
from jaxpar.plan.facts import gather_facts
from jaxpar.plan.resolve import resolve

TIMEOUT_S = 900
"""Longest compilation that is waited for."""

WORKER = "jaxpar.experiments.compile.worker"
"""Module that the process runs."""

_LAST_LINES = 15
"""Lines of the compiler's output in an error message."""


class CompileFailed(RuntimeError):
    """The program could not be compiled; the message holds the compiler's last words."""


def compile_step(config: Config, target: Target, *, timeout_s: float = TIMEOUT_S) -> CompileOutcome:
    """Compiles the train step of a config and reads the program.

    Args:
        config: The config; ``mesh`` may hold a -1. Data, run directory, checkpoints and processes do not matter.
        target: What to compile for.
        timeout_s: Seconds after which the compiler is stopped.

    Raises:
        ConfigError: The trainer cannot run the config on so many devices.
        CompileFailed: The compiler refused, aborted or took too long.
    """
    config = program_config(config)
    resolve(config, num_devices=target.num_devices)
    with tempfile.TemporaryDirectory(prefix="jaxpar-compile-") as directory:
        request, result = Path(directory, "request.json"), Path(directory, "result.json")
        request.write_text(json.dumps({"config": config_to_toml(config), "target": dataclasses.asdict(target)}))
        ended = run_child(
            [WORKER, str(request), str(result)],
            environment=compiler_environment(),
            timeout_s=timeout_s,
            log=Path(directory, "log.txt"),
        )
        if ended.code or not result.exists():
            raise CompileFailed(f"compiling for {target.label} failed: {_reason(ended)}")
        return CompileOutcome.from_dict(json.loads(result.read_text()))


def program_config(config: Config) -> Config:
    """The config with all that does not shape the step put aside, so that neither data nor run directory need exist."""
    model = gather_facts(config).model
    if not model.vocab_size:
        problem = Problem(
            key="model.vocab_size",
            value=0,
            message="is the tokenizer's, but compiling reads no tokenizer",
            remedy="set model.vocab_size, e.g. model.vocab_size=128256",
        )
        raise ConfigError([problem])
    model = dataclasses.replace(model, init_from=None)
    data = DataConfig(
        seq_len=config.data.seq_len, pack=config.data.pack, num_samples=max(1, config.train.global_batch_size)
    )
    return dataclasses.replace(
        config,
        model=model,
        data=data,
        train=dataclasses.replace(config.train, eval_every=0, eval_batches=0),
        run=RunConfig(),
        checkpoint=CheckpointConfig(),
        runtime=RuntimeConfig(
            memory_fraction=config.runtime.memory_fraction, compiler_options=config.runtime.compiler_options
        ),
        observe=ObserveConfig(),
    )


def compiler_environment() -> dict[str, str]:
    """Of a process that compiles for GPUs: it has the compiler, sees no GPU (the plugin would look for one), compiles
    afresh, and writes warnings.
    """
    child = environment(fake_devices=True)
    # Its own devices are set by the worker; what a cache holds is not compiled, and gives no warnings.
    for name in ("XLA_FLAGS", "TF_CPP_MIN_LOG_LEVEL", "JAX_COMPILATION_CACHE_DIR", "JAX_NUM_CPU_DEVICES"):
        child.pop(name, None)
    return {**child, "PYTHONPATH": os.pathsep.join([child["PYTHONPATH"], str(SIDE_DIRECTORY)])}


def _reason(ended: Ended) -> str:
    if ended.timed_out:
        return f"{ended.reason}; the number of layers hardly matters to the compiler, that of devices does"
    lines = [line for line in ended.error.splitlines() if line.strip()]
    last = "\n".join(f"    {line}" for line in lines[-_LAST_LINES:])
    how = f"the compiler died of {signal.Signals(-ended.code).name}" if ended.code < 0 else f"exit code {ended.code}"
    return f"{how}; its last words:\n{last}"
