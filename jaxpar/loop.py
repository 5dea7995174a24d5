"""The training loop: compile, restore or initialise, step, validate, save, leave."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path

import jax

from jaxpar import resume
from jaxpar.checkpoint.agreement import damage_for_all
from jaxpar.checkpoint.commit import Keep
from jaxpar.checkpoint.errors import DamagedCheckpointError
from jaxpar.checkpoint.places import CHECKPOINTS
from jaxpar.checkpoint.store import Store
from jaxpar.config import Config
from jaxpar.config.checkpoints import JAXPAR_PREFIX
from jaxpar.config.huggingface import PREFIX
from jaxpar.data.dataset import Datasets
from jaxpar.data.loader import Loader, validation_loader
from jaxpar.events import Progress, RunLog, RunMetrics, StepReport, open_progress
from jaxpar.events.metrics import json_number
from jaxpar.events.progress import format_duration
from jaxpar.events.stopwatch import Stopwatch, describe_shares
from jaxpar.hf import hf_params
from jaxpar.plan.catalogue import find_gpu
from jaxpar.program import Program
from jaxpar.resume import Place
from jaxpar.runtime.compiled import count_cache_use
from jaxpar.runtime.interrupt import Interrupts, StopReason
from jaxpar.runtime.memory import device_memory
from jaxpar.runtime.profile import ProfileWindow
from jaxpar.runtime.start import Processes, meet
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


def last_step(config: Config) -> int:
    """The step after which this run ends."""
    return min(config.train.steps, config.train.stop_at or config.train.steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pending:
    """A step that was started; its metrics are read while the next one runs."""

    step: int
    metrics: dict[str, jax.Array]
    vote: jax.Array | int
    ids: list[int]


class Loop:
    """A run from its first step to its last; ``prepare``, then ``train``."""

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
        self.last_step = last_step(self.config)
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
