"""Key maps: where each of our parameters lies in another checkpoint, as data.

A ``TensorSource`` says by name which dims of a parameter come from which dims of which tensors; it holds no sizes and
no code, so one map serves every model of a family, reading and writing, weights and gradients. No JAX.

Both sides of a rule are shapes, outermost dim first, in the words below (``docs/key-maps.md`` explains them with
examples). Words that are names stand for *factors*: pieces of which dims are made.

=========================  =====================================================================================
``embed``                  a dim that is one factor
``(heads head_dim)``       a dim that several factors make together, the last one fastest; on either side
``{layer}`` in the name    a factor that is stacked: the source has one tensor per index
``qkv=1``                  source only: a factor of which one index is read, the others hold something else
``(skip | mlp | skip)``    source only: parts that lie one after another in a dim, of which one is read. A skipped part
                           is its length, as a number or a product (``heads*head_dim``), or ``_`` for "the rest"
=========================  =====================================================================================
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
import string
from collections.abc import Iterator, Mapping, Sequence

ParamPath = tuple[str, ...]
"""Path of a parameter in the nested dict of params, e.g. ``("layers", "q")``."""

KeyMap = dict[ParamPath, "TensorSource"]
"""Where each parameter lies, by path."""

HARMLESS_TENSORS = (r".*\.rotary_emb\.inv_freq",)
"""Patterns of tensor names that old checkpoints carry and that hold nothing learned: RoPE frequencies."""

_WORD = re.compile(r"\(([^()]*)\)|([^\s()]+)")
_FACTOR = re.compile(r"([A-Za-z]\w*)(?:=(\d+))?")
_LENGTH = re.compile(r"_|(?:[A-Za-z]\w*|\d+)(?:\*(?:[A-Za-z]\w*|\d+))*")


@dataclasses.dataclass(frozen=True)
class StoredDim:
    """One dim of a stored tensor: a part that is read, perhaps with skipped parts around it."""

    factors: tuple[str, ...]
    """Factors of the part that is read, the last one fastest; pinned ones included."""
    before: tuple[tuple[str, ...], ...] = ()
    """Skipped parts in front of it, each a product of names and numbers."""
    after: tuple[tuple[str, ...], ...] = ()
    """Skipped parts behind it."""

    @property
    def terms(self) -> tuple[tuple[str, ...], ...]:
        """Products whose sum is the size of the dim."""
        return (*self.before, self.factors, *self.after)


@dataclasses.dataclass(frozen=True)
class TensorSource:
    """The tensors of a checkpoint that make one parameter.

    ``TensorSource("layers.{layer}.q_proj.weight", "(heads head_dim) embed -> layer embed heads head_dim")`` reads: the
    parameter has dims [layer, embed, heads, head_dim]; there is one tensor per layer; each has two dims, the first
    being heads and head_dim merged (head_dim fastest), the second embed.

    A factor that appears as ``{factor}`` in the name is stacked: one tensor per index. Every other factor must appear
    exactly once on each side of the rule; a pinned one on the source side only.
    """

    name: str
    """Tensor name, with a ``{factor}`` for every stacked factor."""
    rule: str
    """Source dims, ``->``, target dims, in the words of this module's table."""

    def __post_init__(self) -> None:
        """Refuse a rule that cannot be read, or that loses, repeats or invents a factor."""
        read = [factor for dim in self.stored_dims for factor in dim.factors]
        sources = [*self.stacked_dims, *read]
        wanted = [*self.dims, *self.pinned]
        if sorted(sources) != sorted(set(wanted)) or len(set(wanted)) != len(wanted):
            raise ValueError(
                f"the key map of {self.name!r} does not account for every dim exactly once: rule {self.rule!r}, "
                f"stacked dims {list(self.stacked_dims)}"
            )

    @functools.cached_property
    def _sides(self) -> tuple[str, str]:
        source, arrow, target = self.rule.partition("->")
        if not arrow or "->" in target:
            raise self._mistake("a rule is source dims, one '->', target dims")
        return source, target

    @functools.cached_property
    def stored_dims(self) -> tuple[StoredDim, ...]:
        """The dims of each tensor, outermost first."""
        words = self._words(self._sides[0])
        return tuple(self._stored_dim(position, word) for position, word in enumerate(words))

    @functools.cached_property
    def target_dims(self) -> tuple[tuple[str, ...], ...]:
        """The parameter's dims, outermost first: the factors of each, the last one fastest."""
        words = [tuple(word.split()) for word in self._words(self._sides[1])]
        for factor in itertools.chain(*words):
            if not _FACTOR.fullmatch(factor) or "=" in factor:
                raise self._mistake(f"{factor!r} on the right of '->' is not a name")
        return tuple(words)

    @functools.cached_property
    def dims(self) -> tuple[str, ...]:
        """The factors of the parameter's dims, outermost first; its dims themselves where none is merged."""
        return tuple(itertools.chain(*self.target_dims))

    @functools.cached_property
    def pinned(self) -> dict[str, int]:
        """Factors of the tensors of which one index is read."""
        found = _FACTOR.findall(self._sides[0])
        return {name: int(index) for name, index in found if index}

    @functools.cached_property
    def source_dims(self) -> tuple[tuple[str, ...], ...]:
        """For each dim of a tensor, outermost first, the factors that are merged in the part that is read."""
        return tuple(dim.factors for dim in self.stored_dims)

    @functools.cached_property
    def stacked_dims(self) -> tuple[str, ...]:
        """Factors with one tensor per index, in the order in which the name has them."""
        fields = [field for _, field, _, _ in string.Formatter().parse(self.name) if field is not None]
        if any(not _FACTOR.fullmatch(field) or "=" in field for field in fields):
            raise self._mistake("braces in a tensor name hold the name of a stacked dim")
        return tuple(fields)

    @property
    def reads_whole_tensors(self) -> bool:
        """Whether nothing of a tensor is left for other parameters: no pinned factor, no skipped part."""
        return not self.pinned and all(len(dim.terms) == 1 for dim in self.stored_dims)

    def names(self, sizes: Mapping[str, int]) -> Iterator[tuple[dict[str, int], str]]:
        """Every tensor of this parameter: (index of each stacked dim, tensor name). ``sizes`` by factor."""
        stacked = self.stacked_dims
        for index in itertools.product(*(range(sizes[dim]) for dim in stacked)):
            indices = dict(zip(stacked, index, strict=True))
            yield indices, self.name.format(**indices)

    def source_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of each tensor, given the size of every factor by name."""
        return tuple(self.stored_size(dim, sizes) for dim in range(len(self.stored_dims)))

    def stored_size(self, dim: int, sizes: Mapping[str, int]) -> int:
        """Size of one dim of each tensor."""
        return sum(product(term, sizes) for term in self.stored_dims[dim].terms)

    def target_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of the parameter, given the size of every factor by name."""
        return tuple(product(factors, sizes) for factors in self.target_dims)

    def _words(self, side: str) -> list[str]:
        """The dims of one side as text, parentheses taken off."""
        if _WORD.sub("", side).strip():
            raise self._mistake("parentheses do not match; they cannot be nested")
        return [merged or single for merged, single in _WORD.findall(side)]

    def _stored_dim(self, position: int, text: str) -> StoredDim:
        parts = text.split("|")
        # One word that is no dim of the parameter is the name of a length: "(q_rows | mlp)".
        is_read = [len(parts) == 1 or "=" in part or bool(set(part.split()) & set(self.dims)) for part in parts]
        if sum(is_read) != 1:
            raise self._mistake(
                f"exactly one part of ({text}) must hold dims of the parameter; "
                "a part to skip is a number, _ or a product such as 1*mlp"
            )
        read = is_read.index(True)
        lengths = [self._length(position, part.strip()) for part in (*parts[:read], *parts[read + 1 :])]
        if sum(length == (_rest(position),) for length in lengths) > 1:
            raise self._mistake(f"({text}) has '_' twice: give the length of one of them")
        return StoredDim(self._factors(parts[read]), tuple(lengths[:read]), tuple(lengths[read:]))

    def _factors(self, text: str) -> tuple[str, ...]:
        matches = [(word, _FACTOR.fullmatch(word)) for word in text.split()]
        for word, match in matches:
            if match is None:
                raise self._mistake(f"{word!r} on the left of '->' is neither a name nor name=index")
        return tuple(match[1] for _, match in matches)

    def _length(self, position: int, text: str) -> tuple[str, ...]:
        if not _LENGTH.fullmatch(text):
            raise self._mistake(f"the skipped part {text!r} is neither a number, nor a product of names, nor _")
        return (_rest(position),) if text == "_" else tuple(text.split("*"))

    def _mistake(self, reason: str) -> ValueError:
        return ValueError(f"the key map of {self.name!r} has the rule {self.rule!r}: {reason}")


def product(term: Sequence[str], sizes: Mapping[str, int]) -> int:
    """Product of a term's numbers and of the sizes of its names."""
    return math.prod(int(word) if word.isdigit() else sizes[word] for word in term)


def _rest(position: int) -> str:
    """Name of the length that "_" stands for in one dim; no name in a rule can begin with an underscore."""
    return f"_{position}"
