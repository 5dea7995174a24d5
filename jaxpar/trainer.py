"""The training run, top to bottom: check, start, compile, restore or initialise, loop, leave."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from flax import nnx

from jaxpar import resume
from jaxpar.checkpoint.agreement import damage_for_all
from jaxpar.checkpoint.commit import Keep
from jaxpar.checkpoint.errors import CheckpointError, DamagedCheckpointError
from jaxpar.checkpoint.places import CHECKPOINTS
from jaxpar.checkpoint.store import Store
from jaxpar.config import Config, ConfigError, Problem, config_to_toml
from jaxpar.config.checkpoints import JAXPAR_PREFIX
from jaxpar.config.huggingface import PREFIX
from jaxpar.data.dataset import Datasets, load_dataset
from jaxpar.data.loader import Loader, validation_loader
from jaxpar.events import Progress, RunLog, RunMetrics, StepReport, check_sinks, open_progress
from jaxpar.events.metrics import json_number
from jaxpar.events.progress import format_duration
from jaxpar.events.stopwatch import Stopwatch, describe_shares
from jaxpar.hf import hf_params
from jaxpar.own_model import OwnLoss, OwnModel, OwnProgram, Source
from jaxpar.plan.catalogue import find_gpu
from jaxpar.plan.resolve import check, check_own, resolve, resolve_own
from jaxpar.program import Program
from jaxpar.resume import Place
from jaxpar.runtime.compiled import count_cache_use
from jaxpar.runtime.interrupt import Interrupts, StopReason
from jaxpar.runtime.lock import RunLock
from jaxpar.runtime.memory import device_memory
from jaxpar.runtime.profile import ProfileWindow
from jaxpar.runtime.self_test import self_test
from jaxpar.runtime.start import Processes, failed_process, meet, start, stop
from jaxpar.runtime.vote import Ballot, StopVote
from jaxpar.state import TrainState

ROUTER_METRICS = ("balance_loss", "router_z_loss", "load_entropy", "load_max", "dropped", "overflow", "router_logits")
"""What a step of a mixture of experts reports besides the usual."""


class RunFailed(RuntimeError):
    """The run cannot go on; the message says at which step, why, and what is left."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    reason: StopReason
    """NONE: it reached its last step."""
    step: int
    """Optimizer steps done."""
    loss: float | None
    """Training loss of the last step; None if no step was run."""
    eval_loss: float | None
    """Last validation loss; None without validation."""
    checkpoint: Path | None
    """Newest checkpoint, or None."""
    run_dir: Path
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    """Where the time of the loop went: ``total_s`` and its parts, see ``Stopwatch``; empty if no step was run."""

    def to_dict(self) -> dict[str, object]:
        """As JSON has it."""
        return {
            "reason": self.reason.name.lower(),
            "step": self.step,
            "loss": json_number(self.loss),
            "eval_loss": json_number(self.eval_loss),
            "checkpoint": str(self.checkpoint) if self.checkpoint else None,
            "run_dir": str(self.run_dir),
            "seconds": self.seconds,
        }


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
                outcome = self._run(_Loop(program, datasets, processes, log, checked))
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

    def _run(self, loop: _Loop) -> Outcome:
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
            if found and found[1] >= _last_step(config):
                directory, step = found
                log.say(
                    f"nothing is left to train: {directory} has step {step} of {_last_step(config)} (not read again; "
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pending:
    """A step that was started; its metrics are read while the next one runs."""

    step: int
    metrics: dict[str, jax.Array]
    vote: jax.Array | int
    ids: list[int]


class _Loop:
    """State of the training loop."""

    def __init__(
        self,
        program: Program,
        datasets: Datasets,
        processes: Processes,
        log: RunLog,
        checked: tuple[Path, int] | None,
    ):
        """``checked``: a checkpoint (directory, step) that ``check_same_run`` has let pass."""
        self.program, self.datasets, self.processes, self.log = program, datasets, processes, log
        self.checked = checked
        self.config = program.config
        self.place = Place()
        self.last_step = _last_step(self.config)
        gpu = find_gpu(processes.device_kind) if processes.platform == "gpu" else None
        self.peak_flops = gpu.peak_flops(self.config.precision.compute) if gpu else None
        self.loss: float | None = None
        self.eval_loss: float | None = None
        self.evaluated_at: int | None = None
        self.stop = StopReason.NONE
        self.save_voted = False
        self.saved_step: int | None = None
        self.skipped_in_a_row = 0

    def prepare(self, found: tuple[Path, int] | None, stack: contextlib.ExitStack) -> None:
        """Compile the steps, create or restore the state, open data, metrics and display."""
        config, program = self.config, self.program
        train, checkpoint = config.train, config.checkpoint
        keep = Keep(
            latest=checkpoint.keep,
            every=checkpoint.keep_every or None,
            best=checkpoint.keep_best,
            metric=checkpoint.best_metric,
        )
        self.store = stack.enter_context(Store(Path(config.run.dir) / CHECKPOINTS, keep=keep, warn=self.log.warn))
        first_step = (found[1] if found else 0) + 1
        self.progress: Progress = stack.enter_context(
            open_progress(
                title=config.run.dir,
                first_step=first_step,
                last_step=self.last_step,
                log_every=config.observe.log_every,
                process_id=self.processes.process_id,
            )
        )
        self.progress.phase("compiling the training step")
        started = time.perf_counter()
        with count_cache_use() as use:
            self.train_step = program.lower_train_step().compile()
            self.eval_step = program.lower_eval_step().compile() if train.eval_every else None
        taken = ", from the compilation cache" if use.is_complete else ""
        self.log.say(f"compiled in {time.perf_counter() - started:.1f} s{taken}")
        self.progress.phase("restoring" if found else "initialising")
        self.state, self.place = self._start(found)
        self.metrics = None
        if self.processes.process_id == 0:
            self.metrics = stack.enter_context(
                RunMetrics(
                    config.run.dir,
                    config.observe,
                    resume_step=self.place.step if found else None,
                    config=dataclasses.asdict(config),
                )
            )
        dataset = self.datasets.train
        self.order = dataset.order(seed=config.run.seed, shuffle=config.data.shuffle)
        self.loader = Loader(
            dataset,
            order=self.order,
            position=self.place.position,
            global_batch_size=train.global_batch_size,
            microbatches=train.microbatches,
            sharding=program.batch_sharding,
            last_batch=config.data.last_batch,
            num_threads=config.data.num_threads,
            prefetch=config.data.prefetch,
            num_steps=max(0, self.last_step - self.place.step),
            repeat=config.data.repeat,
        )
        stack.callback(self.loader.close)
        for note in self.loader.notes:
            self.log.say(note)
        self.vote = StopVote(program.mesh)
        self.profile = ProfileWindow(
            config.observe, Path(config.run.dir), process_id=self.processes.process_id, say=self.log.say
        )
        self.profile.check_reached(self.place.step + 1, self.last_step)
        stack.callback(lambda: self.profile.stop(self.place.step))
        meet("ready to train")

    def _start(self, found: tuple[Path, int] | None) -> tuple[TrainState, Place]:
        """State and place to go on from."""
        config, program = self.config, self.program
        if found:
            return self._restore(*found)
        if config.model.init_from and config.model.init_from.startswith(JAXPAR_PREFIX):
            params, what = resume.restore_params(config.model.init_from.removeprefix(JAXPAR_PREFIX), program)
            self.log.say(f"{what}; optimizer and step count start at 0")
            return program.start_from(params), Place()
        if config.model.init_from:
            directory = config.model.init_from.removeprefix(PREFIX)
            params = hf_params(directory, config.model, program.definition, program.mesh, config.precision.params)
            self.log.say(f"initial weights from {directory}; optimizer and step count start at 0")
            return program.start_from(params), Place()
        return program.init(config.run.seed), Place()

    def _restore(self, directory: Path, step: int) -> tuple[TrainState, Place]:
        """State and place of a checkpoint; of the one before it, where it turns out to be damaged."""
        while True:
            try:
                with damage_for_all():
                    if (directory, step) != self.checked:
                        resume.check_same_run(directory, step, self.config, self.datasets.train)
                with Store(directory) as source:
                    state, place = resume.restore(source, step, self.program)
                break
            except DamagedCheckpointError as error:  # on all processes
                older = resume.agree(resume.find_older(self.config, directory, step))
                if older is None:
                    raise
                self.log.warn(f"checkpoint of step {step} is passed over: {error}")
                if directory.absolute() == self.store.directory:
                    self.store.set_aside(step)
                    meet(f"step {step} set aside")
                directory, step = older
        if directory.absolute() == self.store.directory:
            self.saved_step = step
        epoch, offset = place.position.epoch, place.position.offset
        self.log.say(f"resumed from step {step} of {directory}, at sample {offset} of epoch {epoch}")
        return state, place

    def train(self, interrupts: Interrupts) -> Outcome:
        """Step until the last one, or until told to stop."""
        train, every = self.config.train, self.config.checkpoint.every
        pending: _Pending | None = None
        self.saved_at, self.watch = time.perf_counter(), Stopwatch()
        if self.eval_step and self.place.step == 0:
            self._evaluate()
        for batch in self.loader:
            self.watch.add("data_wait", self.loader.wait_s)
            step = self.place.step + 1
            if self.profile.begins(step):
                self._finish(pending)
                pending = None
                self.profile.start(step)
            with self.profile.annotate(step):
                self.state, metrics = self.train_step(self.state, batch.arrays)
            started = _Pending(
                step=step,
                metrics=metrics,
                vote=self.vote.cast(Ballot(interrupts.reason, self._save_is_due())),
                ids=batch.ids.tolist() if self.config.observe.sample_ids else [],
            )
            self._finish(pending)
            self.store.check()
            pending = started
            self.place = dataclasses.replace(self.place, step=step, position=batch.after)
            evaluates = self.eval_step and (step % train.eval_every == 0 or step == self.last_step)
            saves = self.save_voted or (every and step % every == 0)
            profiled = self.profile.ends(step)
            if evaluates or saves or self.stop or profiled:
                self._finish(pending)
                pending = None
            if profiled:
                self.profile.stop(step)
            if evaluates:
                self._evaluate()
            if saves:
                self._save()
            if self.stop:
                break
        self._finish(pending)
        return self._leave()

    def _finish(self, pending: _Pending | None) -> None:
        """Wait for a step, record it, and stop the run if its numbers are not finite."""
        if pending is None:
            return
        with self.watch.part("device_wait"):
            metrics = {name: float(value) for name, value in jax.device_get(pending.metrics).items()}
            ballot = Ballot.of(pending.vote)
        self.stop, self.save_voted = max(self.stop, ballot.reason), self.save_voted or ballot.save
        seconds = self.watch.row()
        self.loss = metrics["loss"]
        tokens = int(metrics["tokens"]) if math.isfinite(metrics["tokens"]) else 0
        self.place = dataclasses.replace(self.place, tokens_seen=self.place.tokens_seen + tokens)
        tokens_per_s = self.program.plan.tokens_per_step / seconds["step_s"]
        flops = tokens_per_s * self.program.flops_per_token / self.program.mesh.size
        memory = device_memory() or {}
        report = StepReport(
            step=pending.step,
            loss=metrics["loss"],
            grad_norm=metrics["grad_norm"],
            lr=metrics["lr"],
            tokens_per_s=tokens_per_s,
            **seconds,
            tflops=flops / 1e12,
            mfu=flops / self.peak_flops if self.peak_flops else None,
            memory_peak_bytes=max((m.peak_bytes for m in memory.values()), default=None),
            memory_limit_bytes=max((m.limit_bytes for m in memory.values()), default=None),
        )
        self.progress.step(report)
        if self.metrics:
            row = {name: value for name, value in dataclasses.asdict(report).items() if value is not None}
            row |= {"tokens": tokens, "cross_entropy": metrics["cross_entropy"], "skipped": metrics["skipped"]}
            row |= {name: metrics[name] for name in ROUTER_METRICS if name in metrics}
            self._record(self.metrics.train, row | ({"ids": pending.ids} if pending.ids else {}))
        self._check_finite(pending.step, metrics)
        self._check_room(pending.step, metrics)

    def _check_room(self, step: int, metrics: dict[str, float]) -> None:
        """Choices of experts for which a receiver had no room."""
        share = metrics.get("overflow", 0.0)
        if not share:
            return
        mesh = self.config.mesh
        what = f"step {step}: {share:.3%} of the choices of experts found no room on the devices of these experts"
        if mesh.expert_overflow == "drop":
            self.log.warn(f"{what}; they were left out")
            return
        self.store.wait()
        raise RunFailed(
            f"{what} (mesh.expert_receive_factor = {mesh.expert_receive_factor}); {self._left()}. Raise "
            'mesh.expert_receive_factor (0: the worst case), or let mesh.expert_overflow = "drop" leave them out'
        )

    def _record(self, write: Callable[[dict], None], row: dict) -> None:
        try:
            write(row)
        except OSError as error:  # most often a full disk, on which the next checkpoint would fail as well
            raise RunFailed(
                f"step {row['step']}: the metrics in {self.config.run.dir} cannot be written ({error}); {self._left()}"
            ) from error

    def _left(self) -> str:
        """What there is to go on from."""
        latest = self.store.latest()
        if latest is None:
            return "there is no checkpoint"
        return f"the newest checkpoint is step {latest} in {self.store.directory}"

    def _check_finite(self, step: int, metrics: dict[str, float]) -> None:
        if not metrics["skipped"]:
            self.skipped_in_a_row = 0
            return
        what = f"step {step}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}"
        self.skipped_in_a_row += 1
        if self.config.train.nonfinite == "skip" and self.skipped_in_a_row <= self.config.train.max_skipped_steps:
            self.log.warn(f"{what}; the step was skipped, parameters are unchanged")
            return
        self.store.wait()
        raise RunFailed(
            f"{what} is not finite{self._skip_history()}; {self._left()}. Lower optim.lr, lengthen "
            'optim.warmup_steps, or let train.nonfinite = "skip" pass over single bad batches'
        )

    def _skip_history(self) -> str:
        train = self.config.train
        if train.nonfinite == "stop":
            return ""
        return f" ({self.skipped_in_a_row} such steps in a row; train.max_skipped_steps = {train.max_skipped_steps})"

    def _evaluate(self) -> None:
        """Mean cross entropy over the validation split, every row once."""
        dataset, train = self.datasets.validation, self.config.train
        loader = validation_loader(
            dataset,
            global_batch_size=train.global_batch_size,
            microbatches=train.microbatches,
            sharding=self.program.batch_sharding,
            num_threads=self.config.data.num_threads,
            prefetch=self.config.data.prefetch,
            num_batches=train.eval_batches,
            last_batch=self.program.eval_last_batch,
        )
        started = time.perf_counter()
        sums = [self.eval_step(self.program.eval_params(self.state), batch.arrays) for batch in loader]
        sums = jax.device_get(sums)
        eval_s = time.perf_counter() - started
        self.watch.add("eval", eval_s)
        tokens = sum(float(s["tokens"]) for s in sums)
        self.eval_loss = sum(float(s["cross_entropy"]) for s in sums) / tokens if tokens else math.nan
        self.evaluated_at = self.place.step
        self.progress.evaluation(self.place.step, self.eval_loss, int(tokens))
        if self.metrics:
            row = {"step": self.place.step, "eval_loss": self.eval_loss, "eval_tokens": int(tokens)}
            self._record(self.metrics.evaluation, row | {"eval_s": eval_s})

    def _save_is_due(self) -> bool:
        """Whether this process finds by its clock that it is time to save."""
        minutes = self.config.checkpoint.every_minutes
        return minutes > 0 and time.perf_counter() - self.saved_at >= 60 * minutes

    def _save(self) -> None:
        self.progress.phase(f"saving step {self.place.step}")
        metrics = {"loss": self.loss, "eval_loss": self.eval_loss if self.evaluated_at == self.place.step else None}
        with self.watch.part("save"):
            resume.save(self.store, self.program, self.state, self.place, self.datasets.train, metrics)
        self.save_voted, self.saved_at, self.saved_step = False, time.perf_counter(), self.place.step

    def _leave(self) -> Outcome:
        """Save the last step, wait until it is on disk, and say where everything is."""
        self.log.say(self.order.progress(self.place.position))
        with self.watch.part("save"):
            self.store.wait()
        checkpoint = self.config.checkpoint
        on_interruption = self.stop and (checkpoint.every or checkpoint.every_minutes)
        wanted = self.place.step and (checkpoint.final or on_interruption)
        if wanted and self.place.step != self.saved_step:  # not asked of the disk: processes may see it differently
            self._save()
            with self.watch.part("save"):
                self.store.wait()
        seconds = self.watch.totals()
        self.log.say(f"time in the loop {format_duration(seconds['total_s'])}: {describe_shares(seconds)}")
        latest = self.store.latest()
        return Outcome(
            reason=self.stop,
            step=self.place.step,
            loss=self.loss,
            eval_loss=self.eval_loss,
            checkpoint=self.store.directory / str(latest) if latest is not None else None,
            run_dir=Path(self.config.run.dir),
            seconds=seconds,
        )


def _last_step(config: Config) -> int:
    """The step after which this run ends."""
    return min(config.train.steps, config.train.stop_at or config.train.steps)


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
