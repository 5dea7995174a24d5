"""Qwen2 and Qwen2.5 (arXiv 2407.10671): Llama with biases on queries, keys and values."""

from __future__ import annotations

from functools import partial

from jaxpar.families.family import Family, HuggingFace
from jaxpar.families.llama import llama_keymap

NO_WINDOW = {"max_window_layers": 28, "sliding_window": None}
"""Keys of the sliding window, which full attention does not read."""

QWEN2 = Family(
    qkv_bias=True,
    huggingface=HuggingFace(
        architecture="Qwen2ForCausalLM",
        keymap=partial(llama_keymap, qkv_bias=True),
        # Its class derives head_dim where the file has none, and its own files have none.
        writes_head_dim="unless derived",
        # It has its biases whatever attention_bias says.
        refused=("mlp_bias", "use_sliding_window", "attention_dropout"),
        written={"attention_dropout": 0.0, "use_sliding_window": False},
        defaults=NO_WINDOW,
        layer_types=True,
    ),
)
