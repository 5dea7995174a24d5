"""GPUs as data: what JAX calls them, what they can do at most, and how they are linked.

Peaks are dense (no 2:4 sparsity), with float32 accumulation, at boost clock. Source: NVIDIA's data sheets and
architecture white papers, whose tensor-core figures "with sparsity" are halved here. Memory is what the driver reports
in all (nvidia-smi); a program gets some hundred MiB less. Links are per GPU and direction: NVLink at half its total
bandwidth of the data sheet, PCIe x16 at 32 GB/s (generation 4) or 64 GB/s (generation 5) where there is no NVLink, and
the network interface of the usual server (DGX A100: 200 Gb/s per GPU; DGX H100, B200, GB200: 400 Gb/s).
"""

from __future__ import annotations

import dataclasses
import re

from jaxpar.config.errors import ConfigError, Problem
from jaxpar.config.keys import nearest_name

_MIB = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU model."""

    name: str
    """Short name for people."""
    pattern: str
    """Regular expression that matches the whole of JAX's ``device_kind``, with or without a leading "NVIDIA "."""
    bfloat16_flops: float | None
    """Peak FLOP/s of bfloat16 products; None where tensor cores do not have the type."""
    float16_flops: float
    """Peak FLOP/s of float16 products."""
    tf32_flops: float | None
    """Peak FLOP/s of TF32 products; None where tensor cores do not have the type."""
    float32_flops: float
    """Peak FLOP/s of full float32 products, outside the tensor cores."""
    memory_bytes: int
    """Device memory in all."""
    memory_bandwidth: float
    """Bytes/s between the chip and its memory."""
    float8_flops: float | None
    """Peak FLOP/s of float8 products; None where tensor cores do not have the type."""
    float4_flops: float | None
    """Peak FLOP/s of float4 products (NVFP4); None where tensor cores do not have the type."""
    link_bandwidth: float
    """Bytes/s to the other GPUs of a node, one direction: NVLink, or PCIe."""
    domain_size: int
    """GPUs that reach each other over NVLink; 1: none, the link is PCIe."""
    network_bandwidth: float
    """Bytes/s of this GPU's share of the node's network interfaces, one direction."""

    def peak_flops(self, compute: str) -> float | None:
        """Peak FLOP/s of matrix products in a ``precision.compute`` type; None where there is no honest peak.

        float32 is full float32: products run at the highest precision, never as TF32.
        """
        return {"bfloat16": self.bfloat16_flops, "float16": self.float16_flops, "float32": self.float32_flops}[compute]


def _gpu(
    name: str,
    pattern: str,
    *,
    half: float,
    tf32: float | None,
    float32: float,
    mib: int,
    gb_per_s: float,
    links: tuple[float, int, float],
    float8: float | None = None,
    float4: float | None = None,
) -> Gpu:
    """A catalogue line; peaks in TFLOP/s, memory in MiB, bandwidths in GB/s. bfloat16 came together with TF32.

    ``links`` is (to other GPUs of the node, NVLink domain, network).
    """
    link, domain, network = links
    return Gpu(
        name=name,
        pattern=pattern,
        bfloat16_flops=half * 1e12 if tf32 else None,
        float16_flops=half * 1e12,
        tf32_flops=tf32 * 1e12 if tf32 else None,
        float32_flops=float32 * 1e12,
        memory_bytes=mib * _MIB,
        memory_bandwidth=gb_per_s * 1e9,
        float8_flops=float8 * 1e12 if float8 else None,
        float4_flops=float4 * 1e12 if float4 else None,
        link_bandwidth=link * 1e9,
        domain_size=domain,
        network_bandwidth=network * 1e9,
    )


_GB300, _GB200 = (900, 72, 100), (900, 72, 50)
_NVLINK5, _NVLINK5_800G = (900, 8, 50), (900, 8, 100)
_NVLINK4, _NVLINK4_EXPORT, _BRIDGED_PAIR = (450, 8, 50), (200, 8, 50), (300, 2, 50)
_NVLINK3, _NVLINK2 = (300, 8, 25), (150, 8, 12.5)
_PCIE5, _PCIE4, _PCIE3 = (64, 1, 50), (32, 1, 25), (16, 1, 12.5)

GPUS: tuple[Gpu, ...] = (
    _gpu(
        "GB300",
        r"GB300",
        half=2500,
        tf32=1250,
        float32=80,
        mib=284208,
        gb_per_s=8000,
        links=_GB300,
        float8=5000,
        float4=15000,
    ),
    _gpu(
        "GB200",
        r"GB200",
        half=2500,
        tf32=1250,
        float32=80,
        mib=189471,
        gb_per_s=8000,
        links=_GB200,
        float8=5000,
        float4=10000,
    ),
    _gpu(
        "B300",
        r"B300( SXM6( AC)?)?",
        half=2250,
        tf32=1125,
        float32=75,
        mib=275040,
        gb_per_s=8000,
        links=_NVLINK5_800G,
        float8=4500,
        float4=13500,
    ),
    _gpu(
        "B200",
        r"B200",
        half=2250,
        tf32=1125,
        float32=75,
        mib=183359,
        gb_per_s=8000,
        links=_NVLINK5,
        float8=4500,
        float4=9000,
    ),
    _gpu(
        "GH200 144GB",
        r"GH200 144G HBM3e",
        half=989,
        tf32=494.5,
        float32=67,
        mib=146831,
        gb_per_s=4900,
        links=(450, 1, 50),
        float8=1979,
    ),
    _gpu(
        "GH200 96GB",
        r"GH200 480GB",
        half=989,
        tf32=494.5,
        float32=67,
        mib=97871,
        gb_per_s=4000,
        links=(450, 1, 50),
        float8=1979,
    ),
    _gpu("H200", r"H200", half=989, tf32=494.5, float32=67, mib=143771, gb_per_s=4800, links=_NVLINK4, float8=1979),
    _gpu(
        "H200 NVL",
        r"H200 NVL",
        half=835.5,
        tf32=417.5,
        float32=60,
        mib=143771,
        gb_per_s=4800,
        links=(450, 4, 50),
        float8=1671,
    ),
    _gpu(
        "H100 SXM",
        r"H100 80GB HBM3",
        half=989,
        tf32=494.5,
        float32=67,
        mib=81559,
        gb_per_s=3350,
        links=_NVLINK4,
        float8=1979,
    ),
    _gpu(
        "H100 NVL",
        r"H100 NVL",
        half=835.5,
        tf32=417.5,
        float32=60,
        mib=95830,
        gb_per_s=3900,
        links=_BRIDGED_PAIR,
        float8=1671,
    ),
    _gpu(
        "H100 PCIe", r"H100 PCIe", half=756, tf32=378, float32=51, mib=81559, gb_per_s=2000, links=_PCIE5, float8=1513
    ),
    _gpu(
        "H800 SXM",
        r"H800",
        half=989,
        tf32=494.5,
        float32=67,
        mib=81559,
        gb_per_s=3350,
        links=_NVLINK4_EXPORT,
        float8=1979,
    ),
    _gpu(
        "H800 PCIe", r"H800 PCIe", half=756, tf32=378, float32=51, mib=81559, gb_per_s=2000, links=_PCIE5, float8=1513
    ),
    _gpu("H20", r"H20", half=148, tf32=74, float32=44, mib=97871, gb_per_s=4000, links=_NVLINK4, float8=296),
    _gpu(
        "A100 SXM 80GB",
        r"A[18]00-SXM4-80GB",
        half=312,
        tf32=156,
        float32=19.5,
        mib=81920,
        gb_per_s=2039,
        links=_NVLINK3,
    ),
    _gpu(
        "A100 SXM 40GB", r"A100-SXM4-40GB", half=312, tf32=156, float32=19.5, mib=40960, gb_per_s=1555, links=_NVLINK3
    ),
    _gpu(
        "A100 PCIe 80GB", r"A[18]00 80GB PCIe", half=312, tf32=156, float32=19.5, mib=81920, gb_per_s=1935, links=_PCIE4
    ),
    _gpu("A100 PCIe 40GB", r"A100-PCIE-40GB", half=312, tf32=156, float32=19.5, mib=40960, gb_per_s=1555, links=_PCIE4),
    _gpu("A30", r"A30", half=165, tf32=82.5, float32=10.3, mib=24576, gb_per_s=933, links=_PCIE4),
    _gpu("A10", r"A10", half=125, tf32=62.5, float32=31.2, mib=23028, gb_per_s=600, links=_PCIE4),
    _gpu("A40", r"A40", half=149.7, tf32=74.8, float32=37.4, mib=46068, gb_per_s=696, links=_PCIE4),
    _gpu("RTX A6000", r"RTX A6000", half=154.8, tf32=77.4, float32=38.7, mib=49140, gb_per_s=768, links=_PCIE4),
    _gpu("L40S", r"L40S", half=362, tf32=183, float32=91.6, mib=46068, gb_per_s=864, links=_PCIE4, float8=733),
    _gpu("L40", r"L40", half=181, tf32=90.5, float32=90.5, mib=46068, gb_per_s=864, links=_PCIE4, float8=362),
    _gpu("L4", r"L4", half=121, tf32=60, float32=30.3, mib=23034, gb_per_s=300, links=_PCIE4, float8=242),
    _gpu(
        "RTX 5090",
        r"GeForce RTX 5090",
        half=209.5,
        tf32=104.8,
        float32=104.8,
        mib=32607,
        gb_per_s=1792,
        links=_PCIE5,
        float8=419,
        float4=1676,
    ),
    _gpu(
        "RTX 4090",
        r"GeForce RTX 4090",
        half=165.2,
        tf32=82.6,
        float32=82.6,
        mib=24564,
        gb_per_s=1008,
        links=_PCIE4,
        float8=330.3,
    ),
    _gpu("RTX 3090", r"GeForce RTX 3090", half=71, tf32=35.6, float32=35.6, mib=24576, gb_per_s=936, links=_PCIE4),
    _gpu(
        "V100 SXM 32GB",
        r"(Tesla )?V100-SXM2-32GB",
        half=125,
        tf32=None,
        float32=15.7,
        mib=32768,
        gb_per_s=900,
        links=_NVLINK2,
    ),
    _gpu(
        "V100 SXM 16GB",
        r"(Tesla )?V100-SXM2-16GB",
        half=125,
        tf32=None,
        float32=15.7,
        mib=16384,
        gb_per_s=900,
        links=_NVLINK2,
    ),
    _gpu(
        "V100 PCIe 32GB",
        r"(Tesla )?V100-PCIE-32GB",
        half=112,
        tf32=None,
        float32=14,
        mib=32768,
        gb_per_s=900,
        links=_PCIE3,
    ),
    _gpu(
        "V100 PCIe 16GB",
        r"(Tesla )?V100-PCIE-16GB",
        half=112,
        tf32=None,
        float32=14,
        mib=16384,
        gb_per_s=900,
        links=_PCIE3,
    ),
    _gpu("T4", r"(Tesla )?T4", half=65, tf32=None, float32=8.1, mib=15360, gb_per_s=320, links=_PCIE3),
)
"""Known GPUs. No two patterns match the same name."""


def find_gpu(device_kind: str) -> Gpu | None:
    """The GPU of a ``jax.Device.device_kind``, e.g. "NVIDIA H100 80GB HBM3".

    None for anything that is not exactly a known name: a slice of a GPU (MIG) or a variant with other clocks must not
    be given the peak of the whole one.
    """
    name = device_kind.strip().removeprefix("NVIDIA ")
    return next((gpu for gpu in GPUS if re.fullmatch(gpu.pattern, name)), None)


ALIASES = {
    "a100": "A100 SXM 80GB",
    "a10080": "A100 SXM 80GB",
    "a10040": "A100 SXM 40GB",
    "h100": "H100 SXM",
    "h800": "H800 SXM",
    "v100": "V100 SXM 32GB",
    "gh200": "GH200 96GB",
    "4090": "RTX 4090",
    "3090": "RTX 3090",
    "5090": "RTX 5090",
}
"""Short names for planning; letters and digits of a catalogue name work too, e.g. "h100-pcie", "a100-sxm-40gb"."""


def gpu_named(name: str) -> Gpu:
    """The GPU that a person means, e.g. "h100", "a100-40", "H100 PCIe", "rtx4090"; see :data:`ALIASES`.

    Raises:
        ConfigError: No such GPU, with the nearest one.
    """
    letters = re.sub("[^a-z0-9]", "", name.lower())
    by_letters = {re.sub("[^a-z0-9]", "", gpu.name.lower()): gpu for gpu in GPUS}
    if letters in ALIASES:
        letters = re.sub("[^a-z0-9]", "", ALIASES[letters].lower())
    if letters in by_letters:
        return by_letters[letters]
    nearest = nearest_name(letters, [*by_letters, *ALIASES])
    hint = f"did you mean {nearest}? " if nearest else ""
    raise ConfigError(
        [
            Problem(
                key="--gpu",
                value=name,
                message="no such GPU in the catalogue",
                remedy=f"{hint}known: {', '.join(gpu.name for gpu in GPUS)}; describe any other in a [gpu] table of "
                "a cluster file (--cluster)",
            )
        ]
    )
