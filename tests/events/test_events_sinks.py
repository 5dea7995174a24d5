"""TensorBoard and Weights & Biases: what reaches them, and what is said when their packages are missing."""

import importlib.machinery
import math
import struct
import sys
import types

import pytest
from tensorboardX.proto.event_pb2 import Event

from jaxpar.config import ConfigError
from jaxpar.config.schema import ObserveConfig
from jaxpar.events import TRAIN_KEYS, RunMetrics, check_sinks


def train_row(step, loss):
    return dict.fromkeys(TRAIN_KEYS, 1.0) | {"step": step, "loss": loss, "ids": [4, 5], "mfu": None}


def tensorboard_scalars(directory):
    """(step, tag, value) of every scalar, read from the record format: length, its checksum, data, its checksum."""
    found = []
    for path in sorted((directory / "tensorboard").iterdir()):
        content, offset = path.read_bytes(), 0
        while offset < len(content):
            (length,) = struct.unpack_from("<Q", content, offset)
            event = Event.FromString(content[offset + 12 : offset + 12 + length])
            offset += 12 + length + 4
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return found


def test_tensorboard_gets_every_scalar_and_no_lists(tmp_path):
    with RunMetrics(tmp_path, ObserveConfig(tensorboard=True), resume_step=None) as metrics:
        metrics.train(train_row(1, loss=2.5))
        metrics.train(train_row(2, loss=math.nan))
        metrics.evaluation({"step": 2, "eval_loss": 2.0, "eval_tokens": 64})
    scalars = tensorboard_scalars(tmp_path)
    assert (1, "train/loss", 2.5) in scalars
    assert (2, "eval/eval_loss", 2.0) in scalars
    assert [math.isnan(value) for step, tag, value in scalars if (step, tag) == (2, "train/loss")] == [True]
    assert {tag for _, tag, _ in scalars} == {
        *(f"train/{key}" for key in TRAIN_KEYS - {"step"}),
        "eval/eval_loss",
        "eval/eval_tokens",
    }


class FakeWandb(types.ModuleType):
    """Records how the package is called."""

    def __init__(self):
        super().__init__("wandb")
        self.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
        self.runs = []

    def init(self, **arguments):
        run = types.SimpleNamespace(arguments=arguments, rows=[], axes=[], finished=False)
        run.log = run.rows.append
        run.define_metric = lambda name, **how: run.axes.append((name, how))
        run.finish = lambda: setattr(run, "finished", True)
        self.runs.append(run)
        return run


def test_a_resumed_run_goes_on_in_the_same_wandb_run(tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    observe = ObserveConfig(wandb_project="shapes")
    for resume_step in (None, 1, None):
        with RunMetrics(tmp_path, observe, resume_step=resume_step, config={"run": {"seed": 3}}) as metrics:
            metrics.train(train_row(2, loss=2.5))
    first, resumed, fresh = wandb.runs
    assert first.arguments["project"] == "shapes"
    assert first.arguments["config"] == {"run": {"seed": 3}}
    assert resumed.arguments["id"] == first.arguments["id"] != fresh.arguments["id"]
    assert first.rows[0]["step"] == 2
    assert first.rows[0]["train/loss"] == 2.5
    assert ("*", {"step_metric": "step"}) in first.axes
    assert all(run.finished for run in wandb.runs)


def test_missing_packages_are_named_with_their_extras(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    observe = ObserveConfig(tensorboard=True, wandb_project="shapes")
    with pytest.raises(ConfigError) as raised:
        check_sinks(observe)
    assert [problem.key for problem in raised.value.problems] == ["observe.tensorboard", "observe.wandb_project"]
    assert "pip install 'jaxpar[tensorboard]'" in str(raised.value)
    assert "pip install 'jaxpar[wandb]'" in str(raised.value)
    with pytest.raises(ConfigError):
        RunMetrics(tmp_path, observe, resume_step=None)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_missing_when_nothing_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    check_sinks(ObserveConfig())
