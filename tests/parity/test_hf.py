"""Against Hugging Face transformers: logits, loss, gradient norm and every gradient leaf of its own checkpoints."""

import math
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxpar
from jaxpar.config.huggingface import read_model_settings
from jaxpar.config.schema import Config
from jaxpar.hf import hf_params
from jaxpar.step import accumulate, matmul_precision
from tests.parity.harness import DATA, build, gradient_errors, placed

FAMILIES = ("llama", "llama31", "qwen2", "qwen3", "gemma", "gpt2", "mixtral", "qwen3_moe")
ONE, FSDP, FSDP_TENSOR, HYBRID = {}, {"fsdp": 8}, {"fsdp": 2, "tensor": 2}, {"data": 2, "fsdp": 4}
CONTEXT = {"fsdp": 2, "context": 4}
EXPERT_MESHES = ({"expert": 2}, {"expert": 4}, {"expert": 2, "tensor": 2}, {"fsdp": 2, "expert": 2})
# Gemma has one kv head, which tensor = 2 does not divide.
MESHES = {name: (ONE, FSDP, HYBRID if name == "gemma" else FSDP_TENSOR, CONTEXT) for name in FAMILIES}
MESHES |= dict.fromkeys(("mixtral", "qwen3_moe"), (ONE, FSDP_TENSOR, *EXPERT_MESHES))
QUICK = [
    ("llama31", ONE),
    ("qwen2", FSDP_TENSOR),
    ("qwen3", FSDP),
    ("llama", FSDP_TENSOR),
    ("gemma", FSDP),
    ("gpt2", FSDP_TENSOR),
    ("mixtral", {"expert": 2, "tensor": 2}),
]
FULL = [(family, mesh) for family in FAMILIES for mesh in MESHES[family] if (family, mesh) not in QUICK]


def expected(family):
    with np.load(DATA / "hf" / family / "expected.npz") as arrays:
        return {name: arrays[name] for name in arrays.files}


def check(family, mesh, scratch):
    """Loss over all next tokens of the two rows; further rows, which a mesh of 8 needs, weigh nothing."""
    want = expected(family)
    directory = DATA / "hf" / family
    config = Config(
        model=read_model_settings(directory),
        mesh={**mesh, "context_mode": "ring"},
        data={"seq_len": 48, "num_samples": 8},
        train={"steps": 1, "global_batch_size": 8},
        precision={"compute": "float32"},
    )
    program = build(config)
    tokens = np.zeros((1, 8, 48), np.int32)
    tokens[0, :2] = want["tokens"]
    weights = np.zeros((1, 8, 48), np.float32)
    weights[0, :2, :-1] = 1
    batch = {
        "tokens": tokens,
        "labels": np.roll(tokens, -1, 2),
        "positions": np.broadcast_to(np.arange(48, dtype=np.int32), tokens.shape),
        "segment_ids": np.ones_like(tokens),
        "weights": weights,
    }
    params = hf_params(directory, program.config.model, program.definition, program.mesh, "float32")

    def gradients(params, batch):
        with matmul_precision(config):
            return accumulate(program.definition, program.loss_fn, params, batch)

    with jax.set_mesh(program.mesh):
        grads, metrics = jax.device_get(jax.jit(gradients)(params, placed(program, batch)))
    assert float(metrics["loss"]) == pytest.approx(float(want["loss"]), rel=1e-5)
    norm = math.sqrt(sum(float(np.sum(np.square(leaf, dtype=np.float64))) for leaf in jax.tree.leaves(grads)))
    assert norm == pytest.approx(float(want["grad_norm"]), rel=1e-5)
    errors = gradient_errors(grads, oracle_gradients(directory, program, scratch))
    worst = max(errors, key=errors.get)
    assert errors[worst] <= 1e-5, (worst, errors[worst])


def oracle_gradients(directory: Path, program, scratch: Path) -> dict:
    """Gradients as transformers wrote them, under the parameters' names, so that they read like weights."""
    shutil.copy(directory / "grads.safetensors", scratch / "model.safetensors")
    if program.config.model.num_experts:
        split_experts(scratch / "model.safetensors", mixtral=program.config.model.family == "mixtral")
    grads = hf_params(scratch, program.config.model, program.definition, program.mesh, "float32")
    return jax.device_get(grads)


def split_experts(path: Path, *, mixtral: bool) -> None:
    """In memory transformers 5 has a layer's experts in one array, gate and up side by side; on disk it has not."""
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    split = {}
    for name, values in load_file(path).items():
        if mixtral:
            name = name.replace(".mlp.", ".block_sparse_moe.")
        place, _, array = name.rpartition(".experts.")
        if array not in ("gate_up_proj", "down_proj"):
            split[name] = values
            continue
        for expert, matrix in enumerate(values):
            parts = np.split(matrix, 2) if array == "gate_up_proj" else [matrix]
            for part, values_of_part in zip((gate, up) if len(parts) == 2 else (down,), parts, strict=True):
                split[f"{place}.experts.{expert}.{part}.weight"] = np.ascontiguousarray(values_of_part)
    save_file(split, path)


@pytest.mark.parametrize(("family", "mesh"), QUICK, ids=str)
def test_loss_and_gradients(family, mesh, tmp_path):
    check(family, mesh, tmp_path)


@pytest.mark.proof
@pytest.mark.parametrize(("family", "mesh"), FULL, ids=str)
def test_loss_and_gradients_on_every_mesh(family, mesh, tmp_path):
    check(family, mesh, tmp_path)


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("llama", ONE),
        ("qwen2", FSDP_TENSOR),
        *(
            pytest.param(family, mesh, marks=pytest.mark.proof)
            for family in FAMILIES
            for mesh in MESHES[family]
            if (family, mesh) not in [("llama", ONE), ("qwen2", FSDP_TENSOR)]
        ),
    ],
    ids=str,
)
def test_logits(family, mesh):
    want = expected(family)
    model = jaxpar.from_hf(DATA / "hf" / family, mesh=mesh)
    logits = np.asarray(model(want["tokens"]))
    assert logits.shape == want["logits"].shape
    np.testing.assert_allclose(logits, want["logits"], atol=1e-4)
