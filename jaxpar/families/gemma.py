"""Gemma (arXiv 2403.08295): GeGLU, norms that scale by 1 + weight, an embedding that is scaled and tied."""

from __future__ import annotations

from jaxpar.families.family import Family, HuggingFace
from jaxpar.families.llama import llama_keymap

GEMMA = Family(
    norm="rms_plus_one",
    activation="gelu_tanh",
    scaled_embedding=True,
    huggingface=HuggingFace(
        architecture="GemmaForCausalLM",
        keymap=llama_keymap,
        tied=True,
        head_dim=256,
        activation_keys=("hidden_act", "hidden_activation"),
        # The first files said "gelu", and transformers 4 computes the tanh form all the same: it is the authors'.
        activations=("gelu_pytorch_tanh", "gelu_new", "gelu"),
        refused=("attention_bias", "attention_dropout", "use_bidirectional_attention"),
        written={"attention_bias": False, "attention_dropout": 0.0},
        defaults={"use_bidirectional_attention": None},
    ),
)
