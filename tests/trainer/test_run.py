"""A run from start to end: what it writes, what it logs, how often it compiles."""

import math

import numpy as np
import pytest

from jaxpar import load_config
from jaxpar.checkpoint.store import Store
from jaxpar.events import TRAIN_KEYS
from tests.trainer.runs import BATCH, BATCHES_PER_EPOCH, ROWS, SEQ_LEN, STEPS, column, saved_arrays


def test_every_step_has_its_row(uninterrupted):
    rows = uninterrupted.rows
    assert column(rows, "step") == list(range(1, STEPS + 1))
    for row in rows:
        assert row.keys() >= {*TRAIN_KEYS, "ids"}
        assert row["tokens"] == BATCH * SEQ_LEN
        assert row["grad_norm"] > 0
        assert row["step_s"] > 0
        assert 0 <= row["data_wait_s"] <= row["step_s"]
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["step_s"])


def test_it_learns_from_the_loss_of_a_uniform_guess(uninterrupted):
    losses = column(uninterrupted.rows, "loss")
    assert losses[0] == pytest.approx(math.log(151), abs=0.1)
    assert losses[-1] < losses[0] - 0.3
    assert uninterrupted.outcome.loss == losses[-1]


def test_the_loss_is_cross_entropy_plus_z_loss(uninterrupted):
    for row in uninterrupted.rows:
        assert row["cross_entropy"] < row["loss"] < row["cross_entropy"] + 1e-3 * 10**2


def test_the_learning_rate_is_per_optimizer_step_whatever_the_microbatches(uninterrupted):
    optim = uninterrupted.config.optim
    assert uninterrupted.config.train.microbatches == 2

    def expected(step: int) -> float:  # step from 0
        progress = max(0.0, (step - optim.warmup_steps) / (STEPS - optim.warmup_steps))
        cosine = (1 + math.cos(math.pi * progress)) / 2
        ramp = min(1.0, (step + 1) / optim.warmup_steps)
        return optim.lr * ramp * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * cosine)

    np.testing.assert_allclose(column(uninterrupted.rows, "lr"), [expected(i) for i in range(STEPS)], rtol=1e-5)


def test_every_epoch_has_every_row_once_in_an_order_of_its_own(uninterrupted):
    ids = np.array(column(uninterrupted.rows, "ids"))
    assert ids.shape == (STEPS, BATCH)
    epochs = ids.reshape(STEPS // BATCHES_PER_EPOCH, ROWS)
    for epoch in epochs:
        assert sorted(epoch) == list(range(ROWS))
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


def test_one_program_is_compiled(uninterrupted):
    assert uninterrupted.compilations.count("train_step") == 1
    assert uninterrupted.compilations.count("init") == 1
    assert uninterrupted.compilations.count("eval_step") == 0


def test_the_config_that_is_written_loads_as_the_config_that_ran(uninterrupted):
    assert load_config(uninterrupted.directory / "config.toml") == uninterrupted.config


def test_the_log_says_what_ran_on_what(uninterrupted):
    log = (uninterrupted.directory / "log.txt").read_text()
    assert "1 process x 8 = 8 devices (cpu)" in log
    assert "mesh data=2 x fsdp=2 x tensor=2" in log
    assert "vocabulary padded to 152" in log
    assert "128 tokens a step = 8 rows x 16" in log


def test_the_last_step_is_saved_with_its_place_in_the_data(uninterrupted):
    outcome = uninterrupted.outcome
    assert (outcome.reason.name, outcome.step, outcome.eval_loss) == ("NONE", STEPS, None)
    assert outcome.checkpoint == uninterrupted.directory / "checkpoints" / str(STEPS)
    with Store(outcome.checkpoint.parent) as store:
        assert store.steps() == [STEPS]
        metadata = store.metadata(STEPS)
    assert metadata["position"] == {"epoch": 4, "offset": 0}
    assert metadata["tokens_seen"] == STEPS * BATCH * SEQ_LEN
    assert metadata["seed"] == uninterrupted.config.run.seed


def test_norm_scales_move_in_float32(uninterrupted):
    """In bfloat16 they can stay at exactly 1: there, no update below 1/256 changes a 1."""
    arrays = saved_arrays(uninterrupted.directory, STEPS)
    for name in ("final_norm", "layers/attention_norm", "layers/mlp_norm", "layers/q_norm", "layers/k_norm"):
        assert np.mean(arrays[f"params/{name}"] != 1) > 0.99, name
