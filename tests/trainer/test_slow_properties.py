"""Properties that need a program of their own, or many steps: master weights in float32, weights to start from."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from jaxpar import Trainer, from_hf, load_config
from jaxpar.data.dataset import load_dataset
from tests.trainer.runs import column, rows_of, run, saved_arrays, tiny

pytestmark = pytest.mark.proof

NORMS = ("params/final_norm", "params/layers/attention_norm", "params/layers/mlp_norm")
HF = Path(__file__).parents[1] / "data" / "hf" / "qwen3"


def norms_after_100_steps(run_dir: Path, params: str) -> np.ndarray:
    """At a learning rate of 6e-4, below the 1/256 by which bfloat16 steps down from 1."""
    run(
        run_dir,
        train={"steps": 100},
        optim={"lr": 6e-4, "schedule": "constant", "warmup_steps": 0},
        precision={"params": params},
        observe={"log_every": 100},
    )
    arrays = saved_arrays(run_dir, 100)
    return np.concatenate([arrays[name].astype(np.float32).ravel() for name in NORMS])


def test_norm_scales_move_in_float32_and_bfloat16_is_warned_about(tmp_path):
    master = norms_after_100_steps(tmp_path / "float32", "float32")
    assert np.mean(np.abs(master - 1) > 1e-3) > 0.95
    assert "bfloat16" not in (tmp_path / "float32" / "log.txt").read_text()

    rounded = norms_after_100_steps(tmp_path / "bfloat16", "bfloat16")
    assert np.mean(rounded == 1) > 0.95
    log = (tmp_path / "bfloat16" / "log.txt").read_text()
    assert log.count("warning: precision.params = 'bfloat16' keeps master weights") == 1


def test_a_run_starts_from_hugging_face_weights(tmp_path):
    """Its first loss is the cross entropy of ``from_hf``'s logits, and it goes on from its own checkpoint later."""
    base = tiny(tmp_path, optim={"warmup_steps": 0})
    # Their config.json gives the dimensions.
    model = load_config(None, [f"model.init_from=hf:{HF}"]).model
    config = dataclasses.replace(base, model=model)
    for stop_at in (1, 2):
        Trainer(dataclasses.replace(config, train=dataclasses.replace(config.train, stop_at=stop_at))).run()
    metrics = rows_of(tmp_path / "metrics.jsonl")
    assert column(metrics, "step") == [1, 2]
    assert (tmp_path / "log.txt").read_text().count(f"initial weights from {HF}") == 1

    decoder = from_hf(HF)
    rows = load_dataset(config.data, vocab_size=model.vocab_size, seed=0).train
    tokens, labels = (np.stack([rows[i][name] for i in metrics[0]["ids"]]) for name in ("tokens", "labels"))
    logits = np.asarray(decoder(tokens), np.float64)
    log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -np.take_along_axis(log_probabilities, labels[..., None], -1).mean()
    assert metrics[0]["cross_entropy"] == pytest.approx(expected, rel=1e-5)
