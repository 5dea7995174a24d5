"""Key maps: where each of our parameters lies in a Hugging Face checkpoint, as data.

A ``TensorSource`` says by name which dims of a parameter come from which dims of which tensors; it holds no sizes and
no code, so one map serves every model of a family, reading and writing, weights and gradients. No JAX.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import string
from collections.abc import Iterator, Mapping

ParamPath = tuple[str, ...]
"""Path of a parameter in the nested dict of params, e.g. ``("layers", "q")``."""

HARMLESS_TENSORS = (r".*\.rotary_emb\.inv_freq",)
"""Patterns of tensor names that old checkpoints carry and that hold nothing learned: RoPE frequencies."""


@dataclasses.dataclass(frozen=True)
class TensorSource:
    """The tensors of a checkpoint that make one parameter.

    ``TensorSource("layers.{layer}.q_proj.weight", "(heads head_dim) embed -> layer embed heads head_dim")`` reads: the
    parameter has dims [layer, embed, heads, head_dim]; there is one tensor per layer; each has two dims, the first
    being heads and head_dim merged (head_dim fastest), the second embed.

    A dim that appears as ``{dim}`` in the name is stacked: one tensor per index. Every other dim must appear exactly
    once on each side of the rule.
    """

    name: str
    """Tensor name, with a ``{dim}`` for every stacked dim."""
    rule: str
    """Source dims, ``->``, target dims. Parentheses merge several target dims into one source dim, last one fastest."""

    def __post_init__(self) -> None:
        """Refuse a rule that loses, repeats or invents a dim."""
        sources = [*self.stacked_dims, *(dim for dims in self.source_dims for dim in dims)]
        if sorted(sources) != sorted(set(self.dims)) or len(set(self.dims)) != len(self.dims):
            raise ValueError(
                f"the key map of {self.name!r} does not account for every dim exactly once: rule {self.rule!r}, "
                f"stacked dims {list(self.stacked_dims)}"
            )

    @property
    def dims(self) -> tuple[str, ...]:
        """Names of the parameter's dims, outermost first."""
        return tuple(self.rule.partition("->")[2].split())

    @property
    def source_dims(self) -> tuple[tuple[str, ...], ...]:
        """For each dim of a tensor, outermost first, the target dims that are merged in it."""
        groups = re.findall(r"\(([^()]*)\)|([^\s()]+)", self.rule.partition("->")[0])
        return tuple(tuple((merged or single).split()) for merged, single in groups)

    @property
    def stacked_dims(self) -> tuple[str, ...]:
        """Target dims with one tensor per index, in the order in which the name has them."""
        return tuple(field for _, field, _, _ in string.Formatter().parse(self.name) if field)

    def names(self, sizes: Mapping[str, int]) -> Iterator[tuple[dict[str, int], str]]:
        """Every tensor of this parameter: (index of each stacked dim, tensor name). ``sizes`` by dim name."""
        stacked = self.stacked_dims
        for index in itertools.product(*(range(sizes[dim]) for dim in stacked)):
            indices = dict(zip(stacked, index, strict=True))
            yield indices, self.name.format(**indices)

    def source_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of each tensor, given the size of every dim by name."""
        shape = []
        for dims in self.source_dims:
            size = 1
            for dim in dims:
                size *= sizes[dim]
            shape.append(size)
        return tuple(shape)


def decoder_keymap(*, qkv_bias: bool, qk_norm: bool, tied: bool) -> dict[ParamPath, TensorSource]:
    """Key map of Llama-like decoders (Llama 2 to 3.1, Qwen2, Qwen3) as Hugging Face transformers names them.

    Target shapes: q [L, D, H, hd], k and v [L, D, K, hd], o [L, H, hd, D], gate and up [L, D, F], down [L, F, D], norms
    [L, D], embedding [V, D], head [D, V]; transformers stores each projection as [out, in] (``nn.Linear``), per layer.

    Args:
        qkv_bias: Query, key and value projections have biases (Qwen2): [L, H, hd] and [L, K, hd].
        qk_norm: Queries and keys are normalised over head_dim (Qwen3): scales [L, hd].
        tied: The output head is the embedding; there is then no parameter ``head``.
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


def decoder_ignored(*, tied: bool) -> tuple[str, ...]:
    """Patterns of tensors that a decoder checkpoint may hold and that are not read; a tied head's copy is one."""
    return (*HARMLESS_TENSORS, r"lm_head\.weight") if tied else HARMLESS_TENSORS
