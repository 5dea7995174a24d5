"""What multiplies the rows of the experts is chosen by generation, number format and widths, and says why."""

import pytest

from jaxpar.config import load_config
from jaxpar.plan.accelerator import Accelerator
from jaxpar.plan.experts import choose_grouped_product

GENERATIONS = {"cpu": None, "Tesla T4": (7, 5), "A100": (8, 0), "H100": (9, 0), "B200": (10, 0), "RTX 5090": (12, 0)}
MODEL = ["model.embed_dim=512", "model.num_layers=2", "model.num_heads=4", "model.mlp_dim=64"]
EXPERTS = ["model.num_experts=8", "model.top_k=2", "model.expert_mlp_dim=64"]


def choose(name, *overrides, tensor=1, has_tokamax=True):
    accelerator = Accelerator(name=name, capability=GENERATIONS[name], has_tokamax=has_tokamax)
    return choose_grouped_product(load_config(None, [*MODEL, *EXPERTS, *overrides]), tensor, accelerator)


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("cpu", "tiles_64"),
        ("Tesla T4", "tiles_512"),
        ("A100", "mosaic_gpu_tiles_512"),
        ("H100", "mosaic_gpu"),
        ("B200", "tiles_512"),
        ("RTX 5090", "tiles_512"),
    ],
)
def test_by_generation(name, kernel):
    chosen = choose(name)
    assert chosen.kernel == kernel
    assert ("not tokamax" in chosen.reason) == (name not in ("cpu", "H100"))


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("H100", {"has_tokamax": False}, "tokamax is not installed (pip install tokamax"),
        ("H100", {"tensor": 16}, "model.expert_mlp_dim / mesh.tensor = 4 is not a multiple of 8"),
        ("A100", {"tensor": 4}, "model.expert_mlp_dim / mesh.tensor = 16 is not a multiple of 32"),
        ("B200", {}, "this is B200"),
    ],
)
def test_what_the_kernel_cannot_do_is_named(name, options, why):
    chosen = choose(name, **options)
    assert chosen.kernel == "tiles_512"
    assert why in chosen.reason


def test_it_computes_in_bfloat16_only():
    chosen = choose("H100", "precision.compute=float32")
    assert chosen.kernel == "tiles_512"
    assert "precision.compute is float32" in chosen.reason
