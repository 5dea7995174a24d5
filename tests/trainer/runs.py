"""Tiny runs through ``Trainer``: a few hundred milliseconds each, once their programs are in the compilation cache."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import SingleDeviceSharding

from jaxpar.audit.compiler_log import Compilations, record_compilations
from jaxpar.checkpoint.paths import leaves_by_path, nested, path_string
from jaxpar.checkpoint.store import Store
from jaxpar.config import Config
from jaxpar.data.synthetic import SyntheticRows
from jaxpar.loop import Outcome
from jaxpar.program import Program
from jaxpar.trainer import Trainer
from tests.parity.harness import parity_config

MESH = {"data": 2, "fsdp": 2, "tensor": 2}
ROWS = 24
BATCH = 8
BATCHES_PER_EPOCH = ROWS // BATCH
STEPS = 12
SEQ_LEN = 16


def tiny(run_dir: Path, **sections: dict) -> Config:
    """Four epochs of 24 rows in 12 steps of 8 rows, each step two microbatches. Tests of one shape share a program."""
    base = {
        "run": {"dir": str(run_dir)},
        "runtime": {"cpu_devices": 8},
        "data": {"num_samples": ROWS},
        "train": {"steps": STEPS, "global_batch_size": BATCH, "microbatches": 2},
        "observe": {"sample_ids": True},
        "checkpoint": {"every": 0},
    }
    return parity_config(
        MESH, **{name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}}
    )


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that has ended."""

    config: Config
    outcome: Outcome
    compilations: Compilations

    @property
    def directory(self) -> Path:
        return Path(self.config.run.dir)

    @property
    def rows(self) -> list[dict]:
        """metrics.jsonl, of this run and those before it in the same directory."""
        return rows_of(self.directory / "metrics.jsonl")


def run(run_dir: Path, **sections: dict) -> Run:
    config = tiny(run_dir, **sections)
    with record_compilations() as compilations:
        outcome = Trainer(config).run()
    return Run(config, outcome, compilations)


def copied(run_dir: Path, target: Path) -> Path:
    """A copy of a run directory, to go on from one place in several ways."""
    shutil.copytree(run_dir, target)
    return target


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def column(rows: list[dict], name: str) -> list:
    return [row[name] for row in rows]


def saved_arrays(run_dir: Path, step: int, *, is_run: bool = True) -> dict[str, np.ndarray]:
    """Every array of a checkpoint, whole, by name: ``params/layers/q``; of a run or of a checkpoints directory."""
    device = SingleDeviceSharding(jax.devices()[0])
    with Store(run_dir / "checkpoints" if is_run else run_dir) as store:
        targets: dict[str, dict] = {}
        for name, leaf in store.leaves(step).items():
            section, *path = name.split("/")
            targets.setdefault(section, {})[tuple(path)] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)
        state = store.restore(step, {section: nested(leaves) for section, leaves in targets.items()})
    return {
        path_string(section, path): np.asarray(leaf)
        for section, tree in state.items()
        for path, leaf in leaves_by_path(tree, section).items()
    }


def assert_same_run(moved: Path, stayed: Path) -> None:
    """Two runs of ``STEPS`` steps took the same rows, and agree in losses, norms and what they saved last."""
    rows, expected = rows_of(moved / "metrics.jsonl"), rows_of(stayed / "metrics.jsonl")
    for name in ("step", "ids", "lr", "tokens"):
        assert column(rows, name) == column(expected, name)
    for name in ("loss", "grad_norm", "cross_entropy"):
        np.testing.assert_allclose(column(rows, name), column(expected, name), rtol=1e-5, err_msg=name)
    arrays, reference = saved_arrays(moved, STEPS), saved_arrays(stayed, STEPS)
    assert arrays.keys() == reference.keys()
    for name, values in reference.items():
        assert np.abs(arrays[name] - values).max() <= 2e-5 * max(np.abs(values).max(), 1e-6), name


def poison(monkeypatch: pytest.MonkeyPatch, records: set[int]) -> None:
    """Gives the first token of some records a weight so large that the loss overflows."""
    read = SyntheticRows.__getitem__

    def poisoned(self: SyntheticRows, i: int) -> dict:
        row = read(self, i)
        if i in records:
            row["weights"][0] = 1e38
        return row

    monkeypatch.setattr(SyntheticRows, "__getitem__", poisoned)


class _Compiled:
    """Stands in for ``jax.stages.Lowered`` where the program was compiled before."""

    def __init__(self, program: jax.stages.Compiled):
        self._program = program

    def compile(self) -> jax.stages.Compiled:
        return self._program


_train_steps: dict[tuple, _Compiled] = {}


def reuse_train_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces and compiles each training step once in all tests: most of what a tiny run costs."""
    lower = Program.lower_train_step

    def lower_once(self: Program) -> _Compiled:
        config = self.config
        unrelated = {"stop_at": None, "nonfinite": "stop", "max_skipped_steps": 0, "eval_every": 0, "eval_batches": 0}
        train = dataclasses.replace(config.train, **unrelated)
        layout = (config.mesh, config.pipeline, self.mesh)
        key = (train, config.model, config.precision, config.optim, config.data.seq_len, *layout)
        if key not in _train_steps:
            _train_steps[key] = _Compiled(lower(self).compile())
        return _train_steps[key]

    monkeypatch.setattr(Program, "lower_train_step", lower_once)


def share_compiled_programs(directory: Path) -> Iterator[Path]:
    """JAX's compilation cache in ``directory`` until the generator ends."""
    settings = {
        "jax_compilation_cache_dir": str(directory),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    # JAX decides at its first compilation whether there is a cache.
    compilation_cache.reset_cache()
    yield directory
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
