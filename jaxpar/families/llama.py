"""Llama 2, 3 and 3.1 (arXiv 2307.09288, 2407.21783), and the tensor names that later families took over."""

from __future__ import annotations

from jaxpar.families.family import Family, HuggingFace
from jaxpar.families.keymap import KeyMap, ParamPath, TensorSource


def llama_keymap(tied: bool, *, qkv_bias: bool = False, qk_norm: bool = False) -> KeyMap:
    """Key map of Llama and of the families that took over its names, as Hugging Face transformers names them.

    Target shapes: q [L, D, H, hd], k and v [L, D, K, hd], o [L, H, hd, D], gate and up [L, D, F], down [L, F, D], norms
    [L, D], embedding [V, D], head [D, V]; transformers stores each projection as [out, in] (``nn.Linear``), per layer.

    Args:
        tied: The output head is the embedding; there is then no parameter ``head``.
        qkv_bias: Query, key and value projections have biases (Qwen2): [L, H, hd] and [L, K, hd].
        qk_norm: Queries and keys are normalised over head_dim (Qwen3): scales [L, hd].
    """
    block = "model.layers.{layer}"
    attention = f"{block}.self_attn"

    def layers(name: str, tensor: str, rule: str) -> tuple[ParamPath, TensorSource]:
        return ("layers", name), TensorSource(tensor, rule)

    keymap = dict(
        (
            (("embedding",), TensorSource("model.embed_tokens.weight", "vocab embed -> vocab embed")),
            layers("attention_norm", f"{block}.input_layernorm.weight", "embed -> layer embed"),
            layers("q", f"{attention}.q_proj.weight", "(heads head_dim) embed -> layer embed heads head_dim"),
            layers("k", f"{attention}.k_proj.weight", "(kv_heads head_dim) embed -> layer embed kv_heads head_dim"),
            layers("v", f"{attention}.v_proj.weight", "(kv_heads head_dim) embed -> layer embed kv_heads head_dim"),
            layers("o", f"{attention}.o_proj.weight", "embed (heads head_dim) -> layer heads head_dim embed"),
            layers("mlp_norm", f"{block}.post_attention_layernorm.weight", "embed -> layer embed"),
            layers("gate", f"{block}.mlp.gate_proj.weight", "mlp embed -> layer embed mlp"),
            layers("up", f"{block}.mlp.up_proj.weight", "mlp embed -> layer embed mlp"),
            layers("down", f"{block}.mlp.down_proj.weight", "embed mlp -> layer mlp embed"),
            (("final_norm",), TensorSource("model.norm.weight", "embed -> embed")),
        )
    )
    if qkv_bias:
        keymap |= dict(
            (
                layers("q_bias", f"{attention}.q_proj.bias", "(heads head_dim) -> layer heads head_dim"),
                layers("k_bias", f"{attention}.k_proj.bias", "(kv_heads head_dim) -> layer kv_heads head_dim"),
                layers("v_bias", f"{attention}.v_proj.bias", "(kv_heads head_dim) -> layer kv_heads head_dim"),
            )
        )
    if qk_norm:
        keymap |= dict(
            (
                layers("q_norm", f"{attention}.q_norm.weight", "head_dim -> layer head_dim"),
                layers("k_norm", f"{attention}.k_norm.weight", "head_dim -> layer head_dim"),
            )
        )
    if not tied:
        keymap["head",] = TensorSource("lm_head.weight", "vocab embed -> embed vocab")
    return keymap


LLAMA = Family(
    huggingface=HuggingFace(
        architecture="LlamaForCausalLM",
        keymap=llama_keymap,
        kv_heads_may_be_absent=True,
        written={"attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False},
    )
)
