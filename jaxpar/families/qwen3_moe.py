"""Qwen3 with experts (arXiv 2505.09388)."""

from __future__ import annotations

from functools import partial

from jaxpar.families.family import ExpertKeys, Family, HuggingFace
from jaxpar.families.llama import llama_keymap
from jaxpar.families.mixtral import ROUTER_DEFAULTS, with_experts

QWEN3_MOE = Family(
    qk_norm=True,
    huggingface=HuggingFace(
        architecture="Qwen3MoeForCausalLM",
        keymap=with_experts(partial(llama_keymap, qk_norm=True), "mlp", "gate_proj", "up_proj", "down_proj"),
        refused=("attention_bias", "use_sliding_window", "attention_dropout", "mlp_only_layers"),
        defaults={**ROUTER_DEFAULTS, "sliding_window": None},
        required={"decoder_sparse_step": 1},
        written={
            "attention_bias": False,
            "attention_dropout": 0.0,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "use_sliding_window": False,
        },
        experts=ExpertKeys(
            num_experts=("num_experts", "num_local_experts"), width="moe_intermediate_size", norm_topk="norm_topk_prob"
        ),
    ),
)
