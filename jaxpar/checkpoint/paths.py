"""Pytrees by leaf path, so that what is on disk depends on names and not on container classes.

An optimizer state is a nest of named tuples whose classes belong to a library. Here every container becomes a plain
dict: attribute names and dict keys stay, positions become decimal strings. ``(EmptyState(), AdamState(count=c, mu={"w":
x}))`` is stored as ``{"1": {"count": c, "mu": {"w": x}}}``; containers without leaves leave no trace.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

LeafPath = tuple[str, ...]
"""Path of a leaf inside its section; the empty path when the section itself is a leaf."""


def leaves_by_path(tree: Any, section: str) -> dict[LeafPath, Any]:
    """The leaves of a pytree in tree order, by path.

    Raises:
        ValueError: A key cannot be stored: "/" and "." separate keys on disk. The message names the ``section``.
    """
    leaves: dict[LeafPath, Any] = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
        path = tuple(_key_name(key) for key in keys)
        if any(not re.fullmatch(r"[^/.]+", name) for name in path):
            raise ValueError(
                f"{section}: the keys {list(path)} cannot be stored: keys are not empty, without '/' and '.'"
            )
        assert path not in leaves, f"two leaves of {section} have the path {path}"
        leaves[path] = leaf
    return leaves


def nested(leaves: Mapping[LeafPath, Any]) -> Any:
    """Nested plain dicts from leaves by path; a leaf itself when its path is empty."""
    if () in leaves:
        return leaves[()]
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = leaf
    return tree


def of_its_param[T](path: LeafPath, by_param: Mapping[LeafPath, T]) -> T | None:
    """What belongs to the parameter that a leaf is or mirrors: optimizer state has the parameter's path at its end."""
    return next((value for param, value in by_param.items() if path[-len(param) :] == param), None)


def path_string(section: str, path: LeafPath) -> str:
    """How a leaf is named in messages and arguments: ``params/layers/q``."""
    return "/".join((section, *path))


def _key_name(key: Any) -> str:
    match key:
        case DictKey(key=name) | FlattenedIndexKey(key=name):
            return str(name)
        case GetAttrKey(name=name):
            return name
        case SequenceKey(idx=index):
            return str(index)
    return str(key)
