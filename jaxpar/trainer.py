"""A training run around its loop: check, start, build the program, lock the run directory, announce, and leave."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from flax import nnx

from jaxpar import resume
from jaxpar.checkpoint.errors import CheckpointError, DamagedCheckpointError
from jaxpar.checkpoint.places import CHECKPOINTS
from jaxpar.checkpoint.store import Store
from jaxpar.config import Config, ConfigError, Problem, config_to_toml
from jaxpar.data.dataset import Datasets, load_dataset
from jaxpar.events import RunLog, check_sinks
from jaxpar.loop import Loop, Outcome, RunFailed, last_step
from jaxpar.own_model import OwnLoss, OwnModel, OwnProgram, Source
from jaxpar.plan.catalogue import find_gpu
from jaxpar.plan.resolve import check, check_own, resolve, resolve_own
from jaxpar.program import Program
from jaxpar.runtime.interrupt import Interrupts, StopReason
from jaxpar.runtime.lock import RunLock
from jaxpar.runtime.self_test import self_test
from jaxpar.runtime.start import Processes, failed_process, start, stop


class Trainer:
    """One run of one config.

    ``run`` checks everything that can be checked before a device is touched, then trains, and resumes by itself when
    the run directory has a checkpoint. Without further arguments the config says what is trained on what; with them it
    is a module and data of one's own (docs/own-model.md).

    Args:
        config: Everything else: mesh, optimizer, steps, checkpoints.
        model: Makes a Flax NNX module from ``nnx.Rngs``; its class will do. Every ``nnx.Param`` has ``logical_axes``.
        loss_fn: (module, arrays [rows, ...]) -> (sum of the rows' losses, sum of their weights).
        train_data: Rows by index (``len`` and ``[i]``), each a dict of arrays.
        eval_data: Rows of the same kind that are validated every ``train.eval_every`` steps.

    Raises:
        ValueError: Some of ``model``, ``loss_fn`` and ``train_data`` are given, and others not.
    """

    def __init__(
        self,
        config: Config,
        *,
        model: Callable[[nnx.Rngs], nnx.Module] | None = None,
        loss_fn: OwnLoss | None = None,
        train_data: Source | None = None,
        eval_data: Source | None = None,
    ):
        self.config = config
        given = {"model": model, "loss_fn": loss_fn, "train_data": train_data}
        missing = [name for name, value in given.items() if value is None]
        if missing and (len(missing) < len(given) or eval_data is not None):
            raise ValueError(f"a model of your own needs {', '.join(given)}: {', '.join(missing)} is missing")
        self.own = (
            None if missing else OwnModel(make=model, loss_fn=loss_fn, train_data=train_data, eval_data=eval_data)
        )

    def run(self) -> Outcome:
        """Train.

        Raises:
            ConfigError: the config cannot be run; nothing was written.
            StartError: devices or processes are not as configured.
            RunFailed: loss or gradient is not finite, or metrics cannot be written.
            CheckpointError: a checkpoint cannot be written, or none can be read; names the last good one.
        """
        log = RunLog(process_id=self.config.runtime.process_id)
        with log:
            datasets, known = self._checked(log)
            found = resume.find_checkpoint(self.config)
            if unused := resume.unused_path(self.config, found):
                log.warn(unused)
            processes = start(self.config.runtime, run_dir=self.config.run.dir, say=log.say)
            with _one_end_for_all(processes, log):
                program = self._program(processes.global_devices, known)
                checked = None
                if found:
                    with contextlib.suppress(DamagedCheckpointError):  # restoring falls back on the step before
                        resume.check_same_run(*found, program.config, datasets.train)
                        checked = found
                outcome = self._run(Loop(program, datasets, processes, log, checked))
            stop(success=True)
        return outcome

    def _checked(self, log: RunLog) -> tuple[Datasets, dict[str, int]]:
        """The data, and what is known of it, once all that needs no device is in order."""
        config = self.config
        apply_rules = check if self.own is None else check_own
        for warning in apply_rules(config):
            log.warn(warning)
        check_sinks(config.observe)
        if self.own is None:
            datasets = load_dataset(config.data, vocab_size=config.model.vocab_size, seed=config.run.seed)
            known = {"num_rows": len(datasets.train), "tokenizer_vocab_size": datasets.vocab_size_of_tokenizer}
        else:
            datasets = self.own.datasets()
            known = {"num_rows": len(datasets.train)}
            if config.train.eval_every and datasets.validation is None:
                message, remedy = "asks for validation, but there is no eval_data", "give eval_data to jaxpar.Trainer"
                raise ConfigError(
                    [Problem(key="train.eval_every", value=config.train.eval_every, message=message, remedy=remedy)]
                )
        apply_rules(config, **known)
        return datasets, known

    def _program(self, num_devices: int, known: dict[str, int]) -> Program:
        if self.own is None:
            return Program.build(resolve(self.config, num_devices=num_devices, **known))
        return OwnProgram.of(self.own, resolve_own(self.config, num_devices=num_devices, **known))

    def _run(self, loop: Loop) -> Outcome:
        """Open what the run needs, announce it, and loop."""
        program, processes, log = loop.program, loop.processes, loop.log
        config, run_dir, found = program.config, Path(program.config.run.dir), loop.checked
        with contextlib.ExitStack() as stack, _one_end_for_all(processes, log):
            if processes.process_id == 0:
                _take(run_dir, stack, log)
                found = resume.find_checkpoint(config)  # nobody else changes them from here on
                log.open(run_dir / "log.txt")
                _tidy(run_dir, log)
                (run_dir / "config.toml").write_text(config_to_toml(config))
            found = resume.agree(found)
            _announce(program, loop.datasets, processes, log)
            if found and found[1] >= last_step(config):
                directory, step = found
                log.say(
                    f"nothing is left to train: {directory} has step {step} of {last_step(config)} (not read again; "
                    "jaxpar verify-checkpoint does)"
                )
                return Outcome(
                    reason=StopReason.NONE,
                    step=step,
                    loss=None,
                    eval_loss=None,
                    checkpoint=directory / str(step),
                    run_dir=run_dir,
                )
            if processes.num_processes > 1:
                self_test(program.mesh)
            loop.prepare(found, stack)
            with Interrupts(say=log.say) as interrupts:
                return loop.train(interrupts)


def _take(run_dir: Path, stack: contextlib.ExitStack, log: RunLog) -> None:
    """Create the run directory and keep other runs out of it."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        stack.enter_context(RunLock(run_dir, warn=log.warn))
    except OSError as error:
        message = f"cannot be created or written: {error.strerror or error}"
        remedy = "name a directory that can be, e.g. run.dir=runs/first"
        raise ConfigError([Problem(key="run.dir", value=str(run_dir), message=message, remedy=remedy)]) from error


def _tidy(run_dir: Path, log: RunLog) -> None:
    """Say which checkpoints are passed over and why, and make way for new ones."""
    with Store(run_dir / CHECKPOINTS) as store:
        for step, why in store.skipped():
            log.warn(f"checkpoint of step {step} is passed over: {why}")
        for done in store.tidy():
            log.say(f"checkpoints: {done}")


@contextlib.contextmanager
def _one_end_for_all(processes: Processes, log: RunLog) -> Iterator[None]:
    """Ends one of several processes as soon as an error leaves the block, before anything outside of it is closed.

    A store that is closed waits for the other processes, which wait for this one in the next step's collectives.
    """
    try:
        yield
    except BaseException as error:
        if processes.num_processes > 1:
            for_user = isinstance(error, ConfigError | CheckpointError | RunFailed | KeyboardInterrupt)
            if isinstance(error, jax.errors.JaxRuntimeError) and (failed := failed_process()) is not None:
                log.error(f"process {failed} of this run has failed; its own output says why ({error})")
            else:
                log.error(f"{type(error).__name__}: {error}" if for_user else traceback.format_exc().rstrip())
            # The exit codes of the jaxpar command.
            code = 2 if isinstance(error, ConfigError) else 130 if isinstance(error, KeyboardInterrupt) else 1
            stop(success=False, exit_code=code)
        raise


def _announce(program: Program, datasets: Datasets, processes: Processes, log: RunLog) -> None:
    """What will run, on what, before anything is compiled."""
    plan, config = program.plan, program.config
    mesh = " x ".join(f"{axis}={size}" for axis, size in plan.mesh.items() if size > 1) or "one device"
    padding = f" (vocabulary padded to {plan.padded_vocab_size:,} in memory)" if plan.num_padding_params else ""
    log.say(str(processes))
    for note in (*processes.notes, *datasets.notes):
        log.say(note)
    log.say(
        f"model {plan.num_params:,} parameters{padding}; mesh {mesh}; {program.batch_words}, "
        f"{plan.rows_per_device} rows per device and microbatch; "
        f"compute {config.precision.compute}, reduce {config.precision.reduce}"
    )
    for note in program.notes:
        log.say(note)
    if program.flops_per_token and processes.platform == "gpu" and find_gpu(processes.device_kind) is None:
        log.say(f"no peak is known for {processes.device_kind}: MFU is not reported")
