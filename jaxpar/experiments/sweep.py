"""Runs the trials of a sweep, one process each, and keeps what came out. No JAX in this process.

What is known of a trial is one file, ``OUT/trials/FINGERPRINT.json``, which appears when the trial is over. So a sweep
that was interrupted, or killed, goes on with those that have none.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from jaxpar.config import Config, ConfigError, Problem, config_to_toml
from jaxpar.config.schema import AXES
from jaxpar.data.shard_job import write_whole
from jaxpar.experiments.children import BAD_CONFIG, Ended, environment, run_child
from jaxpar.experiments.sweep_file import Sweep, Trial
from jaxpar.plan.catalogue import Gpu, find_gpu, gpu_named
from jaxpar.plan.evaluation import evaluate_config
from jaxpar.plan.facts import gather_facts
from jaxpar.plan.shape import shape_of
from jaxpar.plan.topology import make_cluster
from jaxpar.runtime.lock import RunLock

RESULTS = "results.csv"
OK, OOM, TIMEOUT, FAILED, ILLEGAL, PENDING = "ok", "out of memory", "timeout", "failed", "illegal", "not run"
"""Status of a row."""

_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory", "MemoryError")
_DEFAULT_GPU = "h100"

Row = dict[str, object]
"""One line of results.csv."""


def run_sweep(
    sweep: Sweep, *, retry: bool = False, say: Callable[[str], None] = lambda _: None
) -> tuple[list[Row], bool]:
    """Runs every trial that has no result yet.

    Args:
        sweep: What to run.
        retry: Run those again that failed, ran out of memory or out of time.
        say: Is told about each trial when it is over.

    Returns:
        The rows, in the order of the sweep; and whether Ctrl-C ended it early.

    Raises:
        ConfigError: The output folder cannot be used, or another sweep is using it.
    """
    try:
        (sweep.out / "trials").mkdir(parents=True, exist_ok=True)
        with RunLock(sweep.out, warn=say):
            return _run_all(sweep, retry, say)
    except OSError as error:
        message = f"cannot be written: {error.strerror or error}"
        problem = Problem(key="sweep.out", value=str(sweep.out), message=message, remedy="name another directory")
        raise ConfigError([problem]) from error


def _run_all(sweep: Sweep, retry: bool, say: Callable[[str], None]) -> tuple[list[Row], bool]:
    results: dict[str, Mapping] = {}
    interrupted = False
    for trial in sweep.trials:
        if (result := _known(sweep, trial, retry)) is not None:
            results[trial.fingerprint] = result
    write_results(sweep, results)
    for number, trial in enumerate(sweep.trials, start=1):
        where = f"[{number}/{len(sweep.trials)}] {trial.name}"
        if trial.fingerprint in results:
            known = "" if trial.objection else " (known)"
            say(f"{where}: {_words(results[trial.fingerprint])}{known}")
            continue
        try:
            result = _run_trial(sweep, trial)
        except KeyboardInterrupt:
            interrupted = True
            break
        results[trial.fingerprint] = result
        write_results(sweep, results)
        say(f"{where}: {_words(result)}")
    return write_results(sweep, results), interrupted


def _known(sweep: Sweep, trial: Trial, retry: bool) -> Mapping | None:
    """What an earlier sweep found, if it still stands."""
    if trial.objection is not None:
        return {"status": ILLEGAL, "reason": trial.objection}
    try:
        result = json.loads(_result_path(sweep, trial).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if retry and result["status"] != OK:
        return None
    had_less_time = result["status"] == TIMEOUT and result["timeout_s"] < sweep.timeout_s
    return None if had_less_time else result


def _result_path(sweep: Sweep, trial: Trial) -> Path:
    return sweep.out / "trials" / f"{trial.fingerprint}.json"


def _run_trial(sweep: Sweep, trial: Trial) -> Mapping:
    """Runs one trial and keeps its result; nothing is kept of one that is interrupted."""
    folder = sweep.out / "trials" / trial.fingerprint
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    runtime = trial.short.runtime
    if runtime.compilation_cache == "auto":
        # Asking the compiler for the memory of a step then costs no second compilation.
        runtime = dataclasses.replace(runtime, compilation_cache=str(sweep.out / "compiled"))
    run = dataclasses.replace(trial.short.run, dir=str(folder / "run"))
    config = dataclasses.replace(trial.short, run=run, runtime=runtime)
    (folder / "config.toml").write_text(config_to_toml(config), encoding="utf-8")
    measured = folder / "measured.json"
    ended = run_child(
        ["jaxpar.experiments.sweep_trial", str(folder / "config.toml"), str(sweep.warmup), str(measured)],
        environment=environment(fake_devices=config.runtime.cpu_devices > 0),
        timeout_s=sweep.timeout_s,
        log=folder / "log.txt",
    )
    result = {"seconds": round(ended.seconds, 1), "timeout_s": sweep.timeout_s}
    if ended.code == 0 and measured.is_file():
        found = json.loads(measured.read_text(encoding="utf-8"))
        result |= {"status": OK, "reason": "", **found}
        if found["loss"] is None or not math.isfinite(found["loss"]):
            result |= {"status": FAILED, "reason": "the loss is not finite"}
    else:
        status = _status(ended)
        more = "" if status == ILLEGAL else f" ({folder / 'log.txt'})"
        result |= {"status": status, "reason": f"{ended.reason}{more}"}
    write_whole(_result_path(sweep, trial), json.dumps(result, indent=1).encode())
    return result


def _status(ended: Ended) -> str:
    if ended.timed_out:
        return TIMEOUT
    if ended.code == BAD_CONFIG:
        return ILLEGAL
    # The kernel kills what takes the host's memory; nothing else here sends SIGKILL to a process in time.
    is_oom = ended.code == -9 or any(words in ended.error for words in _OUT_OF_MEMORY)
    return OOM if is_oom else FAILED


def _words(result: Mapping) -> str:
    if result["status"] != OK:
        return f"{result['status']}: {first_reason(result['reason'])}"
    return f"{result['step_s']:.3g} s a step, {result['tokens_per_s']:,.0f} tokens/s, loss {result['loss']:.4f}"


def first_reason(reason: str) -> str:
    """The first of the reasons, for a line; results.csv has all."""
    first, *others = reason.split("; ")
    return f"{first} (and {len(others)} more)" if others else first


def write_results(sweep: Sweep, results: Mapping[str, Mapping]) -> list[Row]:
    """Writes results.csv whole; the rows."""
    rows = [_row(sweep, trial, results.get(trial.fingerprint)) for trial in sweep.trials]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    write_whole(sweep.out / RESULTS, text.getvalue().encode())
    return rows


def _row(sweep: Sweep, trial: Trial, result: Mapping | None) -> Row:
    result = result or {"status": PENDING, "reason": ""}
    devices = result.get("devices")
    tokens_per_s = result.get("tokens_per_s")
    mesh = gather_facts(trial.short, num_devices=devices or trial.num_devices or None).mesh
    measured = ("platform", "device_kind", "steps", "step_s", "tokens_per_s", "mfu", "loss")
    measured += ("peak_bytes", "peak_of", "compiled_bytes")
    return {
        "name": trial.name,
        "status": result["status"],
        "reason": result["reason"],
        **mesh_columns(mesh),
        "microbatches": trial.short.train.microbatches,
        "remat": trial.short.train.remat,
        "devices": devices or trial.num_devices or None,
        **{name: result.get(name) for name in measured},
        "tokens_per_s_per_device": tokens_per_s / devices if tokens_per_s else None,
        **_predicted(sweep, trial, result),
        "seconds": result.get("seconds"),
        "overrides": " ".join(trial.overrides),
    }


def mesh_columns(mesh: Mapping[str, int]) -> dict[str, int | None]:
    """All six axes; None where an axis takes what is not known."""
    return {axis: mesh.get(axis) for axis in AXES}


def _predicted(sweep: Sweep, trial: Trial, result: Mapping) -> Row:
    """What ``jaxpar plan`` says of the same layout on the named GPU, or on the one it ran on."""
    gpu = sweep.gpu or _gpu_of(result)
    names = ("gpu", "step_s", "tokens_per_s_per_device", "bytes", "fits")
    devices = result.get("devices") or trial.num_devices
    facts = gather_facts(trial.short, num_devices=devices or None)
    if result["status"] == ILLEGAL or not devices or len(facts.mesh) < 6:
        return {f"predicted_{name}": None for name in names}
    cluster = make_cluster(gpu, num_devices=devices)
    _, plan = evaluate_config(facts, shape_of(facts.model), cluster)
    values = (gpu.name, plan.time.step_s, plan.tokens_per_s_per_device, round(plan.memory.total_bytes), plan.fits)
    return {f"predicted_{name}": value for name, value in zip(names, values, strict=True)}


def _gpu_of(result: Mapping) -> Gpu:
    return find_gpu(str(result.get("device_kind") or "")) or gpu_named(_DEFAULT_GPU)


def best_of(sweep: Sweep, rows: list[Row]) -> tuple[Row, Config] | None:
    """The row with the most tokens/s, and its config as it would train in earnest; None if no trial worked."""
    done = [(row, trial.config) for row, trial in zip(rows, sweep.trials, strict=True) if row["status"] == OK]
    return max(done, key=lambda pair: pair[0]["tokens_per_s"], default=None)


def best_config_text(row: Row, config: Config) -> str:
    """The winning config as a file, headed by how it did."""
    fake = " (fake devices: only ratios mean something)" if row["platform"] == "cpu" else ""
    head = (
        f"# Best of a sweep: {row['name']}",
        f"# {row['tokens_per_s']:,.0f} tokens/s, {row['step_s']:.3g} s a step on {row['devices']} x "
        f"{row['device_kind']}{fake}",
    )
    return "\n".join([*head, "", config_to_toml(config)])
