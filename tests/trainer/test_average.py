"""The moving average of the parameters: its values, its checkpoints, what is validated."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

from jaxpar import resume
from jaxpar.checkpoint.store import Store
from jaxpar.config import ConfigError
from jaxpar.data.dataset import load_dataset
from jaxpar.data.loader import validation_loader
from jaxpar.plan.resolve import resolve
from jaxpar.program import Program
from jaxpar.sharding import batch_sharding
from tests.trainer.runs import Run, copied, run, saved_arrays

pytestmark = pytest.mark.proof

DECAY = 0.75
SECTIONS = {
    "optim": {"ema_decay": DECAY},
    "data": {"validation_fraction": 0.25, "num_samples": 32},
    "train": {"eval_every": 4, "eval_params": "ema", "steps": 4},
    "checkpoint": {"every": 1, "keep": 9},
}


def averaged_run(directory, **sections) -> Run:
    return run(
        directory, **{name: {**SECTIONS.get(name, {}), **sections.get(name, {})} for name in {*SECTIONS, *sections}}
    )


@pytest.fixture(scope="module")
def averaged(compiled_programs, tmp_path_factory) -> Run:
    """Four steps, each saved."""
    return averaged_run(tmp_path_factory.mktemp("averaged") / "run")


def test_it_follows_the_parameters_of_every_step(averaged):
    saved = [saved_arrays(averaged.directory, step) for step in (1, 2, 3, 4)]
    params = {name.removeprefix("params/") for name in saved[0] if name.startswith("params/")}
    assert params == {name.removeprefix("ema/") for name in saved[0] if name.startswith("ema/")}
    for name in params:
        for before, after in itertools.pairwise(saved):
            expected = DECAY * before[f"ema/{name}"] + (1 - DECAY) * after[f"params/{name}"]
            np.testing.assert_allclose(after[f"ema/{name}"], expected, rtol=1e-5, atol=1e-7, err_msg=name)
    assert not np.allclose(saved[-1]["ema/layers/q"], saved[-1]["params/layers/q"])


def test_it_goes_on_bit_for_bit(averaged, tmp_path):
    directory = tmp_path / "run"
    averaged_run(directory, train={"stop_at": 2, "eval_every": 0, "eval_params": "params"})
    averaged_run(directory, train={"eval_every": 0})
    want, got = (saved_arrays(place, 4) for place in (averaged.directory, directory))
    assert want.keys() == got.keys()
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


def test_it_is_validated_when_asked_for(averaged):
    config = averaged.config
    program = Program.build(resolve(config, num_devices=8))
    dataset = load_dataset(config.data, vocab_size=config.model.vocab_size, seed=config.run.seed).validation
    with Store(averaged.directory / "checkpoints") as store:
        state, _ = resume.restore(store, 4, program)
    evaluate = program.lower_eval_step().compile()
    loader = validation_loader(
        dataset, global_batch_size=8, microbatches=2, sharding=batch_sharding(program.mesh), num_threads=1, prefetch=1
    )
    batches = [batch.arrays for batch in loader]

    def loss(params: dict) -> float:
        sums = jax.device_get([evaluate(params, batch) for batch in batches])
        return sum(s["cross_entropy"] for s in sums) / sum(s["tokens"] for s in sums)

    assert averaged.outcome.eval_loss == pytest.approx(loss(state.ema), rel=1e-6)
    assert abs(loss(state.ema) - loss(state.params)) > 1e-3


@pytest.mark.parametrize(
    ("decay", "message"), [(0.0, "has an average of the params, which would be lost"), (DECAY, "has none to go on")]
)
def test_a_run_keeps_its_average_or_goes_without(averaged, every_third, tmp_path, decay, message):
    source = every_third if decay else averaged.directory
    data = {"data": SECTIONS["data"]} if not decay else {}
    with pytest.raises(ConfigError, match=message):
        run(copied(source, tmp_path / "run"), optim={"ema_decay": decay}, **data)
