"""Sizes of a rule's factors, solved from the shapes on both sides and from what is given."""

from __future__ import annotations

import collections
import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence

from jaxpar.families.keymap import ParamPath, TensorSource, product

_Equation = tuple[tuple[tuple[str, ...], ...], int | None, str]
"""Terms whose sum is a size, that size if it is known, and where it stands in words."""


def solve_sizes(
    source: TensorSource,
    given: Mapping[str, int],
    *,
    target_shape: Sequence[int] | None = None,
    source_shape: Sequence[int | None] | None = None,
) -> dict[str, int]:
    """Every size that follows: of the rule's factors, of names in skipped parts, and of "the rest" in them.

    Args:
        source: The rule.
        given: Sizes by name; names that the rule does not have are ignored.
        target_shape: Shape of the parameter, if known.
        source_shape: Shape of each tensor, if known; None for a dim that is not.

    Returns:
        Size by name; a name without a size is absent.

    Raises:
        ValueError: The shapes and sizes contradict each other or the rule; says where.
    """
    equations = _equations(source, target_shape, source_shape)
    names = {word for terms, _, _ in equations for term in terms for word in term} | {*source.dims, *source.pinned}
    sizes = {name: size for name, size in given.items() if name in names}
    while solved := _next_size(equations, sizes):
        sizes |= solved
    for terms, total, where in equations:
        if total is None or not is_known(terms, sizes):
            continue
        if (found := sum(product(term, sizes) for term in terms)) != total:
            raise ValueError(f"{where} has size {total}, the rule makes it {found} ({_listed(terms, sizes)})")
    for name, index in source.pinned.items():
        if sizes.get(name, index + 1) <= index:
            raise ValueError(f"{name}={index} is asked for, but {name} has size {sizes[name]}")
    return sizes


def given_sizes(
    plan: Mapping[ParamPath, TensorSource],
    given: Mapping[str, int],
    shapes: Mapping[ParamPath, Sequence[int]] | None,
) -> dict[ParamPath, dict[str, int]]:
    """Sizes by name that each rule starts from: those given, and for its skipped parts those of its sibling rules.

    Siblings read the same tensors: the key part of a fused projection begins after ``heads*head_dim`` rows, and the
    rule of the query part tells what ``heads`` is. A name that two siblings give different sizes is left open.
    """
    siblings: dict[str, list[ParamPath]] = collections.defaultdict(list)
    for path, source in plan.items():
        siblings[source.name].append(path)
    known = dict.fromkeys(plan, given)
    for paths in siblings.values():
        told: dict[str, set[int]] = collections.defaultdict(set)
        for path in paths:
            # A contradiction is reported where the rule itself is solved.
            with contextlib.suppress(ValueError):
                sizes = solve_sizes(plan[path], given, target_shape=None if shapes is None else shapes[path])
                for factor in plan[path].dims:
                    told[factor] |= {sizes[factor]} if factor in sizes else set()
        agreed = {name: min(sizes) for name, sizes in told.items() if len(sizes) == 1}
        for path in paths:
            own = plan[path].dims
            known[path] = {name: size for name, size in agreed.items() if name not in own} | dict(given)
    return known


def missing_sizes(source: TensorSource, sizes: Mapping[str, int]) -> list[str]:
    """Names whose size is needed to read a box and is not known; "_" for the rest of a dim."""
    terms = [*source.target_dims, *(term for dim in source.stored_dims for term in dim.terms)]
    words = dict.fromkeys(word for term in terms for word in term if not word.isdigit())
    return ["_" if word.startswith("_") else word for word in words if word not in sizes]


def name_pattern(source: TensorSource, dim: str | None = None) -> str:
    """Pattern of the source's tensor names; the index of ``dim`` is its one group."""
    texts = re.split(r"\{(\w+)(?::[^}]*)?\}", source.name)  # literal text and names of stacked dims, alternately
    return "".join(
        re.escape(text) if i % 2 == 0 else r"(\d+)" if text == dim else r"\d+" for i, text in enumerate(texts)
    )


def stacked_size(source: TensorSource, dim: str, names: Iterable[str]) -> int:
    """How many indices of a stacked dim a checkpoint has: 1 + the largest one in its tensor names; 0 if none fits."""
    pattern = re.compile(name_pattern(source, dim))
    return max((int(match[1]) for name in names if (match := pattern.fullmatch(name))), default=-1) + 1


def _equations(
    source: TensorSource, target_shape: Sequence[int] | None, source_shape: Sequence[int | None] | None
) -> list[_Equation]:
    target = [None] * len(source.target_dims) if target_shape is None else list(target_shape)
    stored = [None] * len(source.stored_dims) if source_shape is None else list(source_shape)
    if len(target) != len(source.target_dims):
        raise ValueError(f"the parameter has shape {list(target)}, the rule gives it {len(source.target_dims)} dims")
    if len(stored) != len(source.stored_dims):
        raise ValueError(f"the tensor has shape {list(stored)}, the rule gives it {len(source.stored_dims)} dims")
    of_parameter = zip(source.target_dims, target, strict=True)
    of_tensor = zip(source.stored_dims, stored, strict=True)
    return [
        *(((factors,), size, f"dim {i} of the parameter") for i, (factors, size) in enumerate(of_parameter)),
        *((dim.terms, size, f"dim {i} of the tensor") for i, (dim, size) in enumerate(of_tensor)),
    ]


def _next_size(equations: Sequence[_Equation], sizes: Mapping[str, int]) -> dict[str, int]:
    """One more size, from an equation in which it is the only unknown; empty when there is none."""
    for terms, total, _ in equations:
        unknown = [word for term in terms for word in term if not word.isdigit() and word not in sizes]
        if total is None or len(unknown) != 1:
            continue
        (name,) = unknown
        known_sum = sum(product(term, sizes) for term in terms if name not in term)
        factor = next(product([w for w in term if w != name], sizes) for term in terms if name in term)
        size, remainder = divmod(total - known_sum, factor) if factor else (0, 1)
        # A contradiction shows when the equation is checked with the nearest size.
        return {name: max(size, 0) if not remainder else max(size, 1)}
    return {}


def is_known(terms: Sequence[Sequence[str]], sizes: Mapping[str, int]) -> bool:
    """Whether every name in the terms has a size."""
    return all(word.isdigit() or word in sizes for term in terms for word in term)


def _listed(terms: Sequence[Sequence[str]], sizes: Mapping[str, int]) -> str:
    """``heads 4 * head_dim 8 + 32``."""
    words = [[w if w.isdigit() else f"{'the rest' if w.startswith('_') else w} {sizes[w]}" for w in t] for t in terms]
    return " + ".join(" * ".join(term) for term in words)
