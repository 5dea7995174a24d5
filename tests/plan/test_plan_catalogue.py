"""The GPU catalogue: names as JAX reports them; no peak for anything else."""

import re

import pytest

from jaxpar.plan.catalogue import GPUS, find_gpu

REPORTED = {
    "NVIDIA H100 80GB HBM3": ("H100 SXM", 989e12),
    "NVIDIA H100 PCIe": ("H100 PCIe", 756e12),
    "NVIDIA H100 NVL": ("H100 NVL", 835.5e12),
    "NVIDIA H200": ("H200", 989e12),
    "NVIDIA H200 NVL": ("H200 NVL", 835.5e12),
    "NVIDIA GH200 480GB": ("GH200 96GB", 989e12),
    "NVIDIA B200": ("B200", 2250e12),
    "NVIDIA GB200": ("GB200", 2500e12),
    "NVIDIA A100-SXM4-80GB": ("A100 SXM 80GB", 312e12),
    "NVIDIA A100-SXM4-40GB": ("A100 SXM 40GB", 312e12),
    "A100-SXM4-40GB": ("A100 SXM 40GB", 312e12),
    "NVIDIA A100 80GB PCIe": ("A100 PCIe 80GB", 312e12),
    "NVIDIA L40S": ("L40S", 362e12),
    "NVIDIA L4": ("L4", 121e12),
    "NVIDIA GeForce RTX 4090": ("RTX 4090", 165.2e12),
    "Tesla V100-SXM2-16GB": ("V100 SXM 16GB", None),
    "Tesla T4": ("T4", None),
}


@pytest.mark.parametrize("device_kind", REPORTED)
def test_known_gpus(device_kind):
    gpu = find_gpu(device_kind)
    name, bfloat16_flops = REPORTED[device_kind]
    assert (gpu.name, gpu.peak_flops("bfloat16")) == (name, bfloat16_flops)


@pytest.mark.parametrize(
    "device_kind",
    [
        "cpu",
        "",
        "NVIDIA H100",
        "NVIDIA H300",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA L40G",
        "AMD Instinct MI300X",
        "TPU v5e",
    ],
)
def test_unknown_gpus_have_no_peak(device_kind):
    assert find_gpu(device_kind) is None


def test_names_match_one_line_each():
    for device_kind in REPORTED:
        name = device_kind.removeprefix("NVIDIA ")
        assert sum(re.fullmatch(gpu.pattern, name) is not None for gpu in GPUS) == 1
    assert len({gpu.name for gpu in GPUS}) == len(GPUS)


def test_float32_is_not_tf32():
    gpu = find_gpu("NVIDIA A100-SXM4-80GB")
    assert gpu.peak_flops("float32") == 19.5e12
    assert gpu.tf32_flops == 156e12


def test_figures_are_of_the_right_size():
    for gpu in GPUS:
        assert gpu.float32_flops <= gpu.float16_flops
        assert gpu.tf32_flops is None or gpu.float32_flops <= gpu.tf32_flops <= gpu.float16_flops
        assert 15e9 < gpu.memory_bytes < 320e9
        assert 200e9 < gpu.memory_bandwidth < 9e12
