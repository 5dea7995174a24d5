"""Roles of the parameters of a tree: which ones decay, which ones are Muon's."""

from __future__ import annotations

import jax

from jaxpar.config.schema import OptimConfig
from jaxpar.model.moe import BIAS
from jaxpar.plan.param_views import is_hidden_matrix, role_of


def decay_mask(optim: OptimConfig, logical_axes: dict) -> dict:
    """Which parameters weight decay applies to, by role: a nested dict of booleans.

    A parameter's role follows from its name: norms (name ends in ``norm`` or ``scale``), biases (name ends in
    ``bias``), embeddings (name is ``embedding`` or ``positions``), and weights and heads, which always decay. The
    balance bias of a router never decays: the step moves it, not its gradient.
    """
    decays = {"norm": optim.decay_norms, "bias": optim.decay_biases, "embedding": optim.decay_embeddings}
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key != BIAS and decays.get(role_of(path[-1].key), True),
        logical_axes,
        is_leaf=is_axes,
    )


def is_axes(tree: object) -> bool:
    """Whether a part of a tree of logical axes is one parameter's."""
    return isinstance(tree, tuple)


def muon_mask(logical_axes: dict) -> dict:
    """Which parameters Muon orthogonalises: the matrices of blocks, but no embedding and no head."""
    return jax.tree_util.tree_map_with_path(
        lambda path, axes: is_hidden_matrix(path[-1].key, axes), logical_axes, is_leaf=is_axes
    )
