"""Which attention kernel is chosen, and that one which cannot do the work is refused with what can."""

import pytest

from jaxpar.config import ConfigError, load_config
from jaxpar.plan.accelerator import Accelerator
from jaxpar.plan.attention import choose_attention

CPU = Accelerator(name="cpu", capability=None, has_tokamax=True)
T4 = Accelerator(name="Tesla T4", capability=(7, 5), has_tokamax=True)
A100 = Accelerator(name="NVIDIA A100-SXM4-80GB", capability=(8, 0), has_tokamax=True)
H100 = Accelerator(name="NVIDIA H100 80GB HBM3", capability=(9, 0), has_tokamax=True)
B200 = Accelerator(name="NVIDIA B200", capability=(10, 0), has_tokamax=True)
RTX5090 = Accelerator(name="NVIDIA GeForce RTX 5090", capability=(12, 0), has_tokamax=True)
BARE_H100 = Accelerator(name="NVIDIA H100 80GB HBM3", capability=(9, 0), has_tokamax=False)
PACKED, UNPACKED = ["data.pack=true"], ["data.pack=false"]


def choose(accelerator, *overrides, context=1):
    dims = ["model.embed_dim=512", "model.num_layers=2", "model.num_heads=4", "model.mlp_dim=64"]
    given = {override.partition("=")[0] for override in overrides}
    dims = [dim for dim in dims if dim.partition("=")[0] not in given]
    return choose_attention(load_config(None, [*dims, *overrides]), context, accelerator)


@pytest.mark.parametrize(
    ("accelerator", "overrides", "kernel", "reasons"),
    [
        (CPU, PACKED, "xla", ["not cudnn: it runs on GPUs", "not tokamax"]),
        (T4, PACKED, "xla", ["compute capability 8.0", "has 7.5"]),
        (H100, PACKED, "mosaic_gpu", ["not cudnn: rows are packed"]),
        (B200, PACKED, "mosaic_gpu", []),
        (A100, PACKED, "triton", []),
        (RTX5090, PACKED, "triton", []),
        (BARE_H100, PACKED, "xla", ["tokamax is not installed (pip install tokamax==0.0.17"]),
        (H100, UNPACKED, "cudnn", []),
        (BARE_H100, UNPACKED, "cudnn", []),
        (H100, ["data.pack=false", "precision.compute=float32"], "xla", ["precision.compute is float32"]),
        (H100, ["data.pack=false", "model.head_dim=256"], "cudnn", ["not tokamax: head_dim 256"]),
        (A100, ["data.pack=false", "model.head_dim=256"], "xla", ["not a multiple of 8 up to 128"]),
    ],
)
def test_auto_takes_the_fastest_that_can(accelerator, overrides, kernel, reasons):
    chosen = choose(accelerator, *overrides)
    assert chosen.kernel == kernel
    assert chosen.reason.startswith(f"attention {kernel} (auto")
    for text in reasons:
        assert text in chosen.reason


@pytest.mark.parametrize(
    ("overrides", "kernel", "reason"),
    [
        (["mesh.context_mode=ring"], "xla", "not tokamax: keys and values go around a ring"),
        (["data.seq_len=4096"], "xla", "not tokamax: keys and values go around a ring"),
        (["data.seq_len=2048"], "mosaic_gpu", "not cudnn: mesh.context = 2 splits the sequence"),
        (["mesh.context_mode=allgather"], "mosaic_gpu", "not cudnn: mesh.context = 2 splits the sequence"),
    ],
)
def test_on_a_context_axis_only_gathered_keys_have_a_fused_kernel(overrides, kernel, reason):
    chosen = choose(H100, *UNPACKED, *overrides, context=2)
    assert chosen.kernel == kernel
    assert reason in chosen.reason


@pytest.mark.parametrize(
    ("accelerator", "asked", "overrides", "why", "works"),
    [
        (H100, "cudnn", PACKED, "rows are packed", '"tokamax", "xla"'),
        (H100, "cudnn", ["data.pack=false", "model.head_dim=12"], "head_dim 12", '"tokamax", "xla"'),
        (H100, "tokamax", ["model.head_dim=256"], "head_dim 256", '"xla"'),
        (H100, "tokamax", ["precision.compute=float32"], "float32", '"xla"'),
        (T4, "tokamax", PACKED, "Ampere", '"xla"'),
        (CPU, "tokamax", PACKED, "this is cpu", '"xla"'),
        (CPU, "cudnn", UNPACKED, "this is cpu", '"xla"'),
    ],
)
def test_a_kernel_that_cannot_is_refused_by_name(accelerator, asked, overrides, why, works):
    with pytest.raises(ConfigError) as error:
        choose(accelerator, f"train.attention={asked}", *overrides)
    (problem,) = error.value.problems
    assert (problem.key, problem.value) == ("train.attention", asked)
    assert why in problem.message
    assert f"works here: {works};" in problem.remedy


@pytest.mark.parametrize(
    ("accelerator", "asked", "overrides", "kernel"),
    [
        (H100, "tokamax", UNPACKED, "mosaic_gpu"),
        (A100, "tokamax", PACKED, "triton"),
        (H100, "cudnn", UNPACKED, "cudnn"),
        (H100, "xla", PACKED, "xla"),
        (CPU, "xla", PACKED, "xla"),
    ],
)
def test_what_is_asked_for_is_used(accelerator, asked, overrides, kernel):
    assert choose(accelerator, f"train.attention={asked}", *overrides).kernel == kernel
