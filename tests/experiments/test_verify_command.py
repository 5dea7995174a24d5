"""``jaxpar verify``: equal layouts pass, a broken one exits 1 and is named, bad input exits 2."""

import json
import math

import pytest

from jaxpar.experiments.parity import Comparison
from tests.cli.command import Command

DOUBLED = """
import jax
import jaxpar.step

honest = jaxpar.step.update

def faulty(config, optimizer, state, grads, metrics):
    # The reference on one device stays right.
    factor = 2.0 if jax.sharding.get_abstract_mesh().size > 1 else 1.0
    return honest(config, optimizer, state, grads | {"embedding": factor * grads["embedding"]}, metrics)

jaxpar.step.update = faulty
"""
"""A layout that doubles one gradient, as the sitecustomize of the process that verify starts."""

TINY = [
    "model.embed_dim=32", "model.num_layers=1", "model.num_heads=4", "model.num_kv_heads=2", "model.mlp_dim=64",
    "model.vocab_size=151", "train.global_batch_size=2",
]  # fmt: skip


@pytest.fixture
def jaxpar(monkeypatch, capsys, tmp_path) -> Command:
    monkeypatch.chdir(tmp_path)
    return Command(monkeypatch, capsys)


def test_a_layout_that_changes_the_answer_exits_1_and_names_the_leaf(jaxpar, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(DOUBLED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = jaxpar("verify", "mesh.data=-1", "--devices", "2", *TINY, "--json")
    report = json.loads(result.out)
    assert (result.code, report["ok"], report["devices"]) == (1, False, 2)
    assert report["worst"]["what"] == "gradient of embedding"
    # Twice the right gradient is off by the gradient itself.
    assert 0.1 < report["worst"]["difference"] < 1
    others = {name: difference for name, difference in report["grads"].items() if name != "embedding"}
    assert len(others) == 11
    assert max(others.values()) < 1e-6


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["mesh.tensor=3"], "model.num_heads"),
        (["mesh.tensor=2", "data.seq_len=7"], "data.seq_len"),
        (["--devices", "3", "mesh.tensor=2", "mesh.fsdp=-1"], "mesh.fsdp"),
        (["no-such-file.toml"], "no-such-file.toml"),
    ],
)
def test_what_is_not_legal_is_said_before_anything_runs(jaxpar, arguments, key):
    files = [argument for argument in arguments if argument.endswith(".toml")]
    result = jaxpar("verify", *files, *TINY, *(a for a in arguments if a not in files))
    assert result.code == 2
    assert f"error: {key}" in result.err


def test_a_crash_of_the_run_is_a_failure_with_its_last_words(jaxpar, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import sys\nprint('no luck', file=sys.stderr)\nimport os\nos.abort()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = jaxpar("verify", "mesh.data=2", *TINY)
    assert result.code == 1
    assert "ended by SIGABRT: no luck" in result.out
    result = jaxpar("verify", "mesh.data=2", *TINY, "--timeout", "0.01", "--json")
    assert (result.code, json.loads(result.out)["ok"]) == (1, False)


def comparison(**changed) -> Comparison:
    same = {"init": {"a": 0.0}, "loss": 0.0, "grad_norm": 0.0, "grads": {"a": 1e-7, "b": 0.0}, "params": {"a": 2e-7}}
    return Comparison(**{**same, **changed})


@pytest.mark.parametrize(
    ("changed", "what", "equal"),
    [
        ({}, "updated a", True),
        ({"loss": 1e-4}, "loss", False),
        ({"loss": 1e-4, "grads": {"a": 1e-7, "b": 2e-5}}, "gradient of b", False),
        ({"grad_norm": math.inf}, "gradient norm", False),
        ({"init": {"a": 1e-9}}, "initial a", False),
    ],
)
def test_the_cause_is_named_before_what_follows_from_it(changed, what, equal):
    found = comparison(**changed)
    assert (found.worst[0], found.equal) == (what, equal)


RECIPES = [
    ["configs/quickstart.toml"],
    ["model.preset=qwen2.5-0.5b", "mesh.data=4", "mesh.tensor=2", "train.microbatches=2", "train.global_batch_size=64"],
    ["model.preset=llama-3.2-1b", "mesh.fsdp=64", "mesh.tensor=8", "data.pack=false", "train.global_batch_size=64"],
]


@pytest.mark.proof
@pytest.mark.parametrize("arguments", RECIPES, ids=" ".join)
def test_layouts_that_ship_are_equal(monkeypatch, capsys, arguments):
    result = Command(monkeypatch, capsys)("verify", *arguments)
    assert result.code == 0, result.out
    assert "verified: " in result.out
    assert "worst: " in result.out
