"""Model families: each is one small file with what its blocks compute and how Hugging Face transformers stores it.

A family fixes which parameters exist and what a block computes. Dimensions are not part of a family; they come from
``model.*`` or a preset. No JAX.
"""

from __future__ import annotations

import types
from collections.abc import Mapping

from jaxpar.families.family import Family
from jaxpar.families.gemma import GEMMA
from jaxpar.families.gpt2 import GPT2
from jaxpar.families.llama import LLAMA
from jaxpar.families.mixtral import MIXTRAL
from jaxpar.families.qwen2 import QWEN2
from jaxpar.families.qwen3 import QWEN3
from jaxpar.families.qwen3_moe import QWEN3_MOE

__all__ = ["FAMILIES", "Family"]

FAMILIES: Mapping[str, Family] = types.MappingProxyType(
    {
        "llama": LLAMA,
        "qwen2": QWEN2,
        "qwen3": QWEN3,
        "gemma": GEMMA,
        "gpt2": GPT2,
        "mixtral": MIXTRAL,
        "qwen3_moe": QWEN3_MOE,
    }
)
"""Families by name, which is the ``model_type`` of transformers."""
