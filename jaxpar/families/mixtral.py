"""Mixtral (arXiv 2401.04088): Llama with experts, and the part of a key map that experts have."""

from __future__ import annotations

from collections.abc import Callable

from jaxpar.families.family import ExpertKeys, Family, HuggingFace
from jaxpar.families.keymap import KeyMap, TensorSource
from jaxpar.families.llama import llama_keymap

ROUTER_DEFAULTS = {"output_router_logits": False, "router_aux_loss_coef": 0.001}
"""How transformers would train routers; it says nothing about the weights."""


def with_experts(keymap: Callable[..., KeyMap], place: str, gate: str, up: str, down: str) -> Callable[[bool], KeyMap]:
    """A key map with routed experts instead of the MLP, as Hugging Face transformers stores them: one by one.

    Target shapes: router [L, D, E], gate and up [L, E, D, F], down [L, E, F, D].

    Args:
        keymap: Of the dense family.
        place: Module of a block that holds router and experts.
        gate: Name of an expert's gate projection.
        up: Name of its up projection.
        down: Name of its down projection.
    """
    module = f"model.layers.{{layer}}.{place}"

    def with_router(tied: bool) -> KeyMap:
        dense = {path: source for path, source in keymap(tied).items() if path[-1] not in ("gate", "up", "down")}
        into, back = "expert_mlp embed -> layer experts embed", "embed expert_mlp -> layer experts expert_mlp embed"
        expert = f"{module}.experts.{{experts}}"
        return dense | {
            ("layers", "moe", "router"): TensorSource(f"{module}.gate.weight", "experts embed -> layer embed experts"),
            ("layers", "moe", "gate"): TensorSource(f"{expert}.{gate}.weight", f"{into} expert_mlp"),
            ("layers", "moe", "up"): TensorSource(f"{expert}.{up}.weight", f"{into} expert_mlp"),
            ("layers", "moe", "down"): TensorSource(f"{expert}.{down}.weight", back),
        }

    return with_router


MIXTRAL = Family(
    huggingface=HuggingFace(
        architecture="MixtralForCausalLM",
        keymap=with_experts(llama_keymap, "block_sparse_moe", "w1", "w3", "w2"),
        norm_eps=1e-5,
        kv_heads_may_be_absent=True,
        writes_head_dim="unless derived",
        refused=("attention_bias", "attention_dropout", "sliding_window", "router_jitter_noise"),
        defaults={**ROUTER_DEFAULTS, "head_dim": None},
        written={"attention_dropout": 0.0, "router_jitter_noise": 0.0, "sliding_window": None},
        experts=ExpertKeys(),
    )
)
