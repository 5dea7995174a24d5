"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm before each part, biases everywhere, a tied head."""

from __future__ import annotations

from jaxpar.families.family import Family, HuggingFace
from jaxpar.families.keymap import HARMLESS_TENSORS, KeyMap, TensorSource

_BLOCK = "transformer.h.{layer}"
_WIDTH = "embed -> layer embed"
# Queries, keys and values lie side by side in the last dim of one tensor.
_FUSED = (
    ("q", "(heads head_dim | heads*head_dim | heads*head_dim)", "heads"),
    ("k", "(kv_heads*head_dim | kv_heads head_dim | kv_heads*head_dim)", "kv_heads"),
    ("v", "(kv_heads*head_dim | kv_heads*head_dim | kv_heads head_dim)", "kv_heads"),
)


def gpt2_keymap(tied: bool) -> KeyMap:
    """Key map of GPT-2; transformers stores each projection as [in, out] (``Conv1D``), per layer.

    Target shapes: q, k and v [L, D, H, hd], o [L, H, hd, D], up [L, D, F], down [L, F, D], their biases without the
    input dims, norms and their biases [L, D], embedding [V, D], positions [P, D].

    Args:
        tied: The output head is the embedding; there is then no parameter ``head``.
    """
    rules: dict[str, tuple[str, str]] = {
        "attention_norm": ("ln_1.weight", _WIDTH),
        "attention_norm_bias": ("ln_1.bias", _WIDTH),
        "o": ("attn.c_proj.weight", "(heads head_dim) embed -> layer heads head_dim embed"),
        "o_bias": ("attn.c_proj.bias", _WIDTH),
        "mlp_norm": ("ln_2.weight", _WIDTH),
        "mlp_norm_bias": ("ln_2.bias", _WIDTH),
        "up": ("mlp.c_fc.weight", "embed mlp -> layer embed mlp"),
        "up_bias": ("mlp.c_fc.bias", "mlp -> layer mlp"),
        "down": ("mlp.c_proj.weight", "mlp embed -> layer mlp embed"),
        "down_bias": ("mlp.c_proj.bias", _WIDTH),
    }
    for name, part, heads in _FUSED:
        rules[name] = ("attn.c_attn.weight", f"embed {part} -> layer embed {heads} head_dim")
        rules[f"{name}_bias"] = ("attn.c_attn.bias", f"{part} -> layer {heads} head_dim")
    keymap: KeyMap = {
        ("embedding",): TensorSource("transformer.wte.weight", "vocab embed -> vocab embed"),
        ("positions",): TensorSource("transformer.wpe.weight", "positions embed -> positions embed"),
        **{("layers", name): TensorSource(f"{_BLOCK}.{tensor}", rule) for name, (tensor, rule) in rules.items()},
        ("final_norm",): TensorSource("transformer.ln_f.weight", "embed -> embed"),
        ("final_norm_bias",): TensorSource("transformer.ln_f.bias", "embed -> embed"),
    }
    if not tied:
        keymap["head",] = TensorSource("lm_head.weight", "vocab embed -> embed vocab")
    return keymap


GPT2 = Family(
    norm="layer",
    gated_mlp=False,
    activation="gelu_tanh",
    qkv_bias=True,
    linear_bias=True,
    learned_positions=True,
    huggingface=HuggingFace(
        architecture="GPT2LMHeadModel",
        keymap=gpt2_keymap,
        prefix="transformer.",
        # Causal masks, which files of transformers 4 and before hold.
        ignored=(*HARMLESS_TENSORS, r".*\.attn\.(masked_)?bias"),
        keys={
            "vocab_size": "vocab_size",
            "embed_dim": "n_embd",
            "num_layers": "n_layer",
            "num_heads": "n_head",
            "mlp_dim": "n_inner",
            "norm_eps": "layer_norm_epsilon",
            "max_positions": "n_positions",
        },
        tied=True,
        norm_eps=1e-5,
        mlp_ratio=4,
        activation_keys=("activation_function",),
        activations=("gelu_new", "gelu_pytorch_tanh"),
        # Dropout rates say how to train, not what the weights compute; every published file has them.
        refused=("add_cross_attention", "scale_attn_by_inverse_layer_idx"),
        required={"scale_attn_weights": True},
        written={"add_cross_attention": False, "scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True},
        defaults={"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "reorder_and_upcast_attn": False},
    ),
)
