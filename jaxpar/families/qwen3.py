"""Qwen3, dense (arXiv 2505.09388): Llama with queries and keys normalised over head_dim."""

from __future__ import annotations

from functools import partial

from jaxpar.families.family import Family, HuggingFace
from jaxpar.families.llama import llama_keymap
from jaxpar.families.qwen2 import NO_WINDOW

QWEN3 = Family(
    qk_norm=True,
    huggingface=HuggingFace(
        architecture="Qwen3ForCausalLM",
        keymap=partial(llama_keymap, qk_norm=True),
        head_dim=128,
        written={"attention_bias": False, "attention_dropout": 0.0, "use_sliding_window": False},
        defaults=NO_WINDOW,
        layer_types=True,
    ),
)
