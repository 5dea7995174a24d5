"""A user's own module: the example of docs/own-model.md as written, parity between meshes, and mistakes by name."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar.config import Config, ConfigError
from jaxpar.trainer import Trainer
from tests.trainer.runs import column, rows_of, saved_arrays

DOCS = Path(__file__).parents[2] / "docs" / "own-model.md"
MESHES = {
    "data8": ["mesh.data=8"],
    "fsdp8": ["mesh.fsdp=8"],
    "fsdp4 x tensor2": ["mesh.fsdp=4", "mesh.tensor=2"],
    "data2 x fsdp4": ["mesh.data=2", "mesh.fsdp=4"],
}
PARITY = ["precision.compute=float32", "optim.eps=1e-4", "observe.sample_ids=true"]


def example() -> str:
    (block,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S)
    return block


def run_example(monkeypatch, directory: Path, *overrides: str) -> None:
    settings = [f"run.dir={directory}", "runtime.cpu_devices=8", *overrides]
    # The example's own settings come first; a key is given once.
    given = {setting.partition("=")[0] for setting in settings}
    code = example()
    for key in given:
        code = re.sub(rf'"{re.escape(key)}=[^"]*", ', "", code)
    monkeypatch.setattr(sys, "argv", ["images.py", *settings])
    exec(compile(code, str(DOCS), "exec"), {"__name__": "__main__"})


@pytest.fixture(scope="module")
def on_data(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("own") / "run"
    with pytest.MonkeyPatch.context() as patch:
        run_example(patch, directory, *MESHES["data8"], *PARITY)
    return directory


def test_the_example_learns_and_is_short(on_data):
    assert len([line for line in example().splitlines() if line.strip()]) <= 40
    losses = column(rows_of(on_data / "metrics.jsonl"), "loss")
    assert len(losses) == 40
    assert losses[0] == pytest.approx(np.log(10), abs=1)
    assert losses[-1] < 0.5


@pytest.mark.parametrize("mesh", ["fsdp8", "fsdp4 x tensor2", pytest.param("data2 x fsdp4", marks=pytest.mark.proof)])
def test_the_example_trains_alike_on_every_mesh(on_data, mesh, tmp_path, monkeypatch):
    """Stopped in the middle, with two microbatches; it goes on from its checkpoint."""
    run_example(monkeypatch, tmp_path / "run", *MESHES[mesh], *PARITY, "train.stop_at=20", "train.microbatches=2")
    run_example(monkeypatch, tmp_path / "run", *MESHES[mesh], *PARITY)
    rows, expected = rows_of(tmp_path / "run" / "metrics.jsonl"), rows_of(on_data / "metrics.jsonl")
    assert column(rows, "ids") == column(expected, "ids")
    for name in ("loss", "grad_norm", "tokens"):
        np.testing.assert_allclose(column(rows, name), column(expected, name), rtol=2e-5, err_msg=name)
    want = saved_arrays(on_data, 40)
    for name, value in saved_arrays(tmp_path / "run", 40).items():
        np.testing.assert_allclose(
            value, want[name], atol=2e-5 * max(1e-2, float(np.abs(want[name]).max())), err_msg=name
        )


class Rows:
    def __init__(self, **arrays):
        self.arrays = arrays or {"x": np.ones(6, np.float32)}

    def __len__(self):
        return 32

    def __getitem__(self, i):
        return self.arrays


def trainer(directory, axes=("embed", "mlp"), rows=None, param=nnx.Param, mesh=None, **sections) -> Trainer:
    class Model(nnx.Module):
        def __init__(self, rngs):
            metadata = {} if axes is None else {"logical_axes": axes}
            self.inner = nnx.Dict(weight=param(jnp.ones((6, 16)), **metadata))

    def loss_fn(model, batch):
        return (batch["x"] @ model.inner["weight"][...]).sum(), batch["x"].shape[0]

    config = Config(
        run={"dir": str(directory / "run")},
        mesh=mesh or {"data": 8},
        runtime={"cpu_devices": 8},
        train={"steps": 2, **sections.pop("train", {})},
        **sections,
    )
    return Trainer(config, model=Model, loss_fn=loss_fn, train_data=rows or Rows())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"axes": None}, r"parameter inner\.weight has no logical axes; create it with"),
        (
            {"axes": ("embed", "channels")},
            r"inner\.weight dim 1: unknown logical axis 'channels'; known: layers, vocab",
        ),
        (
            {"axes": ("embed",)},
            r"inner\.weight has logical axes \('embed',\) for shape \(6, 16\); give one name per dim",
        ),
        ({"mesh": {"fsdp": 8}}, r"inner\.weight dim 0 \(embed\) has size 6, which fsdp=8 = 8 does not divide"),
        ({"axes": ("embed", "unsharded"), "mesh": {"tensor": 8}}, r"mesh.tensor = 8: axis tensor shards nothing"),
        ({"param": nnx.BatchStat}, r"inner\.weight is a BatchStat: only nnx\.Param variables are trained"),
        ({"mesh": {"context": 8}}, r"mesh.context = 8: axis context splits what jaxpar's own decoder has"),
        (
            {"train": {"remat": "selective"}},
            r"train.remat = 'selective': keeps activations that jaxpar's own decoder names",
        ),
        ({"model": {"embed_dim": 8}}, r"model.embed_dim = 8: does nothing"),
        ({"data": {"last_batch": "pad"}}, r"data.last_batch = 'pad': rows of your own have no weight"),
        ({"train": {"eval_every": 1}}, r"train.eval_every = 1: asks for validation, but there is no eval_data"),
        ({"train": {"global_batch_size": 12}}, r"train.global_batch_size"),
    ],
)
def test_mistakes_are_named_before_anything_is_compiled(tmp_path, given, message):
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, **given).run()
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_list_of_layers_trains_and_goes_on(tmp_path):
    """NNX numbers the items of a list; in a state and on disk they have names."""

    class Stack(nnx.Module):
        def __init__(self, rngs):
            shape, axes = (8, 8), ("embed", "mlp")
            self.layers = nnx.List(
                [nnx.Param(rngs.params.normal(shape), logical_axes=axes) for _ in range(11)]  # 10 sorts before 2
            )

    def loss_fn(model, batch):
        x = batch["x"]
        for layer in model.layers:
            x = x + jnp.tanh(x @ layer[...])
        return jnp.square(x).sum(), x.shape[0]

    def run(name, mesh, **train):
        config = Config(
            run={"dir": str(tmp_path / name)},
            mesh=mesh,
            runtime={"cpu_devices": 8},
            train={"steps": 2, **train},
            optim={"warmup_steps": 0, "eps": 1e-4},
            precision={"compute": "float32"},
        )
        rows = Rows(x=np.ones(8, np.float32))
        return Trainer(config, model=Stack, loss_fn=loss_fn, train_data=rows).run()

    run("fsdp", {"fsdp": 8}, stop_at=1)
    assert run("fsdp", {"fsdp": 8}).step == 2
    run("data", {"data": 8})
    found, expected = (saved_arrays(tmp_path / name, 2) for name in ("fsdp", "data"))
    assert "params/layers/10" in found
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], atol=1e-5, err_msg=name)


def test_rows_that_differ_or_lose_digits_are_refused(tmp_path):
    with pytest.raises(ValueError, match="wider than 32 bits; give float32 or int32"):
        trainer(tmp_path, rows=Rows(x=np.ones(6))).run()


def test_a_part_of_a_model_of_ones_own_is_no_model():
    with pytest.raises(ValueError, match=r"needs model, loss_fn, train_data: loss_fn, train_data is missing"):
        Trainer(Config(), model=nnx.Module)


@pytest.mark.proof
def test_gradients_are_reduce_scattered(tmp_path):
    """Read from the compiled program: the sharded weight's gradient is never summed whole on every device."""
    own = trainer(tmp_path, axes=("unsharded", "embed"), mesh={"fsdp": 8}, precision={"compute": "float32"})
    program = own._program(8, {"num_rows": 32})
    text = program.lower_train_step().compile().as_text()
    assert re.search(r"f32\[6,2\]\S* reduce-scatter\(", text)
    assert not re.search(r"f32\[6,16\]\S* all-reduce\(", text)
    assert re.search(r"f32\[6,16\]\S* all-gather\(", text)
